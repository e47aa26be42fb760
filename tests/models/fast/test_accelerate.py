"""The door: accelerated networks are the plain ones, to rounding, under the same names."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.models.fast import accelerate, execution
from summit_train.models.fast.norm import FusedNorm
from tests.closeness import assert_all_near, assert_near
from tests.models.test_build import SMALL
from tests.networks import clips, random_network

ROOT = Path(__file__).resolve().parents[3]
NETWORKS = [
    *((*network, {}) for network in SMALL),
    ("tsm", "resnet50", 3, {"shift_fraction": 0.3}),
    ("tsm", "resnet50", 4, {"shift_place": "in_place"}),
    ("tsm", "resnet50", 4, {"shift_direction": "past"}),
    ("tsm", "resnet50", 2, {"non_local": "original"}),
    ("i3d_3x1x1", "resnet50", 8, {"non_local": "tsm"}),
]
needs_kernels = pytest.mark.skipif(execution().startswith("none"), reason=f"no kernels: {execution()}")


@pytest.mark.parametrize(("arch", "backbone", "num_frames", "options"), NETWORKS)
def test_values_gradients_and_statistics_are_the_plain_networks(
    arch: str, backbone: str | None, num_frames: int, options: dict
) -> None:
    plain = random_network(arch, backbone, num_frames, dropout=0.2, **options)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    clip = clips(2, num_frames, 40)
    assert list(fast.state_dict()) == list(plain.state_dict())
    for weight in fast.parameters():
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim(), torch.contiguous_format)
        assert weight.is_contiguous(memory_format=form)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for network in (plain.double().train(), fast.double().train()):
        network.reseed(5)
        network(clip).square().sum().backward()
    for (name, parameter), other in zip(plain.named_parameters(), fast.parameters(), strict=True):
        # The gradient of a bias in front of a normalisation, or of a softmax, is 0 but for rounding: that of sums as
        # large as those of its layer's weight.
        weight = plain.get_parameter(re.sub("bias$", "weight", name))
        assert_near(other.grad, parameter.grad, 1e-9, name, beside=weight.grad)
    assert_all_near(fast.buffers(), plain.buffers(), 1e-9)
    assert_near(fast.eval()(clip), plain.eval()(clip), 1e-9)


@needs_kernels
def test_what_was_replaced_is_said_and_nothing_is_replaced_twice() -> None:
    model = build_model("tsm", "resnet50", 4, 3, width=0.125)
    before = [*model.parameters(), *model.buffers()]
    said = accelerate(model)
    assert all(one is other for one, other in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    assert said == f"C++ kernels: {execution()}; replaced: 53 FusedNorm, 16 FusedBlock, 16 ShiftedConv2d"
    modules = list(model.modules())
    assert accelerate(model) == said
    assert all(before is after for before, after in zip(modules, model.modules(), strict=True))


def test_a_network_that_it_does_not_know_runs_plain() -> None:
    for norm in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None), nn.GroupNorm(2, 4)):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU())
        before = list(model.modules())
        assert accelerate(model).endswith("replaced: nothing")
        assert list(model.modules()) == before


def test_another_device_keeps_its_normalisations() -> None:
    with torch.device("meta"):
        model = build_model("tsm", "resnet18", 4, 3, width=0.125)
    assert accelerate(model) == "on meta; replaced: 8 ShiftedConv2d"
    assert not any(isinstance(module, FusedNorm) for module in model.modules())


def test_only_the_door_is_used_from_outside() -> None:
    for path in sorted((ROOT / "summit_train").rglob("*.py")):
        if "models/fast" in path.as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not (module or "").startswith("summit_train.models.fast."), path
            if module == "summit_train.models.fast":
                assert path.name in ("network.py", "count.py", "probe.py"), path
