"""Frozen normalisations: what they keep, whatever mode the network is put into, plain and accelerated."""

from __future__ import annotations

import copy

import pytest
import torch

from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.models.video import freeze_norms, is_frozen


def network(which: str, fast: bool) -> VideoNetwork:
    model = build_model("tsm", "resnet18", 2, 3, width=0.125, generator=torch.Generator().manual_seed(0)).train()
    freeze_norms(model, which)
    if fast:
        accelerate(model)
    return model


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("which", "num_frozen"), [("none", 0), ("all", 20), ("all_but_first", 19)])
def test_what_is_frozen_stays(which: str, num_frozen: int, fast: bool) -> None:
    model = network(which, fast)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.eval()
    model.train()
    model(torch.randn(2, 2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    norms = {name for name in before if name.endswith("running_mean")}
    assert len(norms - changed) == num_frozen
    frozen = {name.removesuffix("running_mean") for name in norms - changed}
    assert not any(name.startswith(prefix) for name in changed for prefix in frozen)
    assert ("bn1.running_mean" in changed) == (which != "all")
    assert "fc.weight" in changed and "layer1.0.conv1.weight" in changed
    assert sum(is_frozen(module) for module in model.modules()) == num_frozen


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("arch", "num_frames"), [("tsm", 2), ("slowfast", 8), ("x3d_m", 2), ("ir_csn", 8)])
def test_a_frozen_network_trains_as_it_evaluates(arch: str, num_frames: int, fast: bool) -> None:
    model = build_model(arch, "resnet18" if arch == "tsm" else None, num_frames, 3, width=0.125)
    freeze_norms(model, "all")
    if fast:
        accelerate(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    clip = torch.randn(2, num_frames, 3, 32, 32)
    assert torch.equal(model.train()(clip), model.eval()(clip))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
