"""The count of a network against numbers worked by hand, the papers' tables, and what autograd really keeps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from summit_train.core.count import Count
from summit_train.models import VideoNetwork, build_model
from summit_train.models.count import count
from summit_train.models.fast import accelerate
from summit_train.spec.catalog import ARCHITECTURES, BACKBONES
from tests.held import kept
from tests.networks import clips

# T per stage (the paper's Table 2), and compute/IO (Table 1); ResNet-50.
TABLES = {
    "tsm": ([8, 8, 8, 8, 8, 8, 8, 1], 27.4e3),
    "tsn": ([8, 8, 8, 8, 8, 8, 8, 1], 27.4e3),
    "i3d_3x3x3": ([16, 16, 8, 8, 4, 2, 1, 1], 16.6e3),
    "i3d_3x1x1": ([32, 16, 8, 8, 4, 4, 4, 4, 1], 6.85e3),
}


def counted(
    arch: str, backbone: str | None = "resnet50", frames: int = 8, height: int = 224, classes: int = 400,
    **options: object,
) -> Count:  # fmt: skip
    with torch.device("meta"):
        return count(build_model(arch, backbone, frames, classes, **options), height)


@pytest.mark.parametrize(("arch", "frames", "compute_io"), [(arch, *row) for arch, row in TABLES.items()])
def test_the_papers_tables(arch: str, frames: list[int], compute_io: float) -> None:
    found = counted(arch, frames=frames[0])
    assert found.compute_io == pytest.approx(compute_io, rel=0.01)
    names = ["data", "conv1", "pool1", "res2", "res3", "res4", "res5", "global_pool"]
    if arch == "i3d_3x1x1":
        names.insert(4, "pool2")
    assert list(found.stages.items()) == list(zip(names, frames, strict=True))


@pytest.mark.parametrize(
    ("arch", "backbone", "frames", "height", "options", "parameters", "multiply_adds"),
    [
        # The paper prints 32.9 G for both.
        ("tsm", "resnet50", 8, 224, {}, 24_327_632, 32.70e9),
        ("tsn", "resnet50", 8, 224, {}, 24_327_632, 32.70e9),
        ("i3d_3x3x3", "resnet50", 16, 224, {}, 47_018_576, 39.85e9),
        ("i3d_3x1x1", "resnet50", 32, 224, {}, 28_043_472, 33.1e9),
        # Lin et al., journal version, Tables 3 and 6.
        ("tsm", "mobilenet_v2", 8, 224, {}, 2_736_272, 2.400e9),
        ("tsm", "resnet101", 8, 224, {}, 43_319_760, 62.40e9),
        ("tsm", "resnet152", 8, 224, {}, 58_963_408, 92.10e9),
        ("tsm", "resnext101_32x4d", 8, 224, {}, 42_948_304, 63.75e9),
        ("tsm", "resnext101_32x8d", 8, 224, {}, 87_561_936, 131.30e9),
        ("i3d_replace", "resnet50", 8, 224, {}, 32_986_576, 47.71e9),
        # Worked out from the authors' code. Four ECO-lites, on 92 frames in all, give the 267 G and 150 M of Lin et al.
        ("trn", "resnet50", 8, 224, {}, 27_047_728, 32.7e9),
        ("trn", "resnet50", 8, 224, {"classes": 174}, 26_641_154, 32.7e9),
        ("eco_lite", None, 16, 224, {}, 37_503_856, 46.49e9),
        ("eco_lite", None, 8, 224, {}, 37_503_856, 23.24e9),
        # Published for views of 256 pixels, but for X3D's 4.73 G: Feichtenhofer et al., Table 2: 36.1 G; Feichtenhofer,
        # Table 3: 4.73 G, Table 4: 6.2 G, 3.8 M; Tran et al.: 96.7 G, 29.6 M.
        ("slowfast", None, 32, 224, {}, 34_480_216, 27.64e9),
        ("slowfast", None, 32, 256, {}, 34_480_216, 36.1e9),
        ("x3d_m", None, 16, 224, {}, 3_794_322, 4.73e9),
        ("x3d_m", None, 16, 256, {}, 3_794_322, 6.2e9),
        ("ir_csn", None, 32, 256, {}, 29_703_568, 96.7e9),
        # Lin et al. print 31.7 M. Pooling first saves multiply-adds: phi and g run on a quarter of the places.
        ("tsm", "resnet50", 8, 224, {"non_local": "tsm"}, 31_686_096, 61.10e9),
        ("tsm", "resnet50", 8, 224, {"non_local": "original"}, 31_686_096, 54.94e9),
        ("i3d_3x1x1", "resnet50", 32, 224, {"non_local": "tsm"}, 35_401_936, 44.34e9),
        ("i3d_3x1x1", "resnet50", 32, 224, {"non_local": "original"}, 35_401_936, 41.26e9),
        # VideoMAE, Table 6 and model zoo: 22, 87 and 305 M, 57, 180 and 597 G.
        ("vit", "vit_s", 16, 224, {}, 22_033_936, 56.9e9),
        ("vit", "vit_b", 16, 224, {}, 86_534_800, 180.3e9),
        ("vit", "vit_l", 16, 224, {}, 304_270_736, 596.8e9),
        # TSM of five flow fields; AAVG's two streams, ten fields and pictures.
        ("tsm", "resnet50", 8, 224, {"in_channels": 10}, 24_349_584, 34.904e9),
        ("tsn", "resnet152", 1, 224, {"in_channels": 20, "classes": 101}, 58_404_069, 12.18e9),
        ("tsn", "resnet152", 1, 224, {"classes": 101}, 58_350_757, 11.51e9),
    ],
)
def test_published_counts(
    arch: str, backbone: str | None, frames: int, height: int, options: dict, parameters: int, multiply_adds: float
) -> None:
    """At 400 classes, unless `options` has another number."""
    found = counted(arch, backbone, frames, height, **options)
    assert found.parameters == parameters and found.gradient_bytes == 4 * parameters
    assert found.multiply_adds == pytest.approx(multiply_adds, rel=0.005)
    assert found.input_bytes == frames * options.get("in_channels", 3) * height**2


def test_trns_head_by_hand() -> None:
    """8 frames: a linear layer for each; at scale s 3 tuples, at scale 8 one, of 256 s features; 256 features each."""
    found = counted("trn", classes=174)
    head = found.multiply_adds - counted("tsn", classes=174).multiply_adds + 8 * 2048 * 174
    tuples = {8: 1, 7: 3, 6: 3, 5: 3, 4: 3, 3: 3, 2: 3}
    relations = sum(number * (256 * scale * 256 + 256 * 174) for scale, number in tuples.items())
    assert head == 8 * 2048 * 256 + relations


def test_the_comparators_frames() -> None:
    """SlowFast, Table 1; X3D, Table 3; CSN, Table 1; ECO, which is 2D and then 3D."""
    both = {"fast conv1": 32, "fast pool1": 32, "slow conv1": 4, "slow pool1": 4}
    stages = [f"res{number}" for number in (2, 3, 4, 5)]
    for stage in stages:
        both |= {f"slow {stage}": 4, f"fast {stage}": 32}
    assert counted("slowfast", None, 32, 64, width=0.125).stages == {"data": 32, **both, "global_pool": 1}
    names = ["data", "conv1", *stages, "conv5"]
    assert counted("x3d_m", None, 16, 64, width=0.125).stages == {**dict.fromkeys(names, 16), "global_pool": 1}
    eco = {"data": 16, "conv1": 16, "pool1": 16, "conv2": 16, "pool2": 16, "inception3": 16, "res3": 16, "res4": 8}
    assert counted("eco_lite", None, 16, 64, width=0.125).stages == {**eco, "res5": 4, "global_pool": 1}
    csn = dict(zip(["data", "conv1", "pool1", *stages, "global_pool"], [32, 32, 32, 32, 16, 8, 4, 1], strict=True))
    assert counted("ir_csn", None, 32, 64, width=0.125).stages == csn


@pytest.mark.parametrize(("form", "fast"), [("tsm", True), ("original", False)])
def test_attention_is_counted_and_is_no_layer(form: str, fast: bool) -> None:
    """Beside the layers are two products a block: places x pooled places x half the channels."""
    with torch.device("meta"):
        model = build_model("tsm", "resnet50", 2, 10, width=0.25, non_local=form)
    if fast:
        accelerate(model)
    found = count(model, 72)
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert sorted(layer.name for layer in found.layers) == sorted([*convolutions, "fc"])
    assert sum(layer.parameters for layer in found.layers) == found.parameters
    # 72 pixels are 9 in res3, pooled 4, and 5 in res4, pooled 2; inner channels are 512 / 4 / 2 and 1024 / 4 / 2.
    attention = 2 * 2 * (2 * 81) * (2 * 16) * 64 + 3 * 2 * (2 * 25) * (2 * 4) * 128
    assert sum(layer.multiply_adds for layer in found.layers) + attention == found.multiply_adds


def test_torchvisions_published_parameters() -> None:
    with torch.device("meta"):
        networks = {backbone: build_model("tsn", backbone, 1, 1000) for backbone in BACKBONES}
    found = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    assert found == {
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
        "resnet50": 25_557_032,
        "resnet101": 44_549_160,
        "resnet152": 60_192_808,
        "resnext101_32x4d": 44_177_704,
        "resnext101_32x8d": 88_791_336,
        "mobilenet_v2": 3_504_872,
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_are_the_whole_network(arch: str) -> None:
    known = ARCHITECTURES[arch]
    # The lightest with each kind of block; plain and accelerated in turn.
    backbones = [b for b in ("resnet18", "resnet50", "mobilenet_v2") if b in known.backbones] or known.backbones
    for number, backbone in enumerate(backbones or (None,)):
        with torch.device("meta"):
            model = build_model(arch, backbone, known.minimum_frames + known.frames_step, 10, width=0.3)
        if number % 2 == 0:
            accelerate(model)
        found = count(model, 33, 47)
        convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        assert sorted(layer.name for layer in found.layers) == sorted([*convolutions, *linear])
        assert found.layers[0].name == convolutions[0] and found.layers[-1].name == linear[-1]
        assert sum(layer.parameters for layer in found.layers) == found.parameters
        if arch != "vit":  # whose attention is no layer (test_vit.py)
            assert sum(layer.multiply_adds for layer in found.layers) == found.multiply_adds


def wide_under_autocast(model: nn.Module, clip: torch.Tensor) -> int:
    """Twice the results of softmaxes, in fp32 beside a copy of 16 bits, and once the inputs of layer norms, in fp32."""
    softmaxes, inputs, softmax = [0], [0], torch.softmax

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = softmax(*args, **kwargs)
        softmaxes.append(result.numel())
        return result

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].numel()))
    with patch("torch.softmax", counted):
        model(clip)
    return 2 * sum(softmaxes) + sum(inputs)


@pytest.mark.parametrize(
    ("arch", "backbone", "t", "fast", "options"),
    [
        ("tsn", "resnet18", 4, True, {}),
        ("tsn", "resnet50", 4, False, {}),
        ("tsm", "resnet18", 4, False, {}),
        ("tsm", "resnet50", 4, True, {}),
        ("tsm", "resnet50", 4, True, {"shift_direction": "past", "shift_fraction": 0.3}),
        ("tsm", "resnet50", 4, True, {"shift_place": "in_place"}),
        ("tsm", "resnet18", 4, False, {"shift_place": "in_place"}),
        ("tsm", "resnet18", 4, True, {"shift_fraction": 0.0}),
        ("tsm", "resnet50", 2, True, {"non_local": "tsm"}),
        ("tsn", "resnet50", 2, False, {"non_local": "original"}),
        ("i3d_3x3x3", "resnet18", 16, True, {}),
        ("i3d_3x1x1", "resnet50", 8, False, {"non_local": "original"}),
        ("trn", "resnet18", 4, True, {}),
        ("eco_lite", None, 4, False, {}),
        ("slowfast", None, 8, True, {}),
        ("x3d_m", None, 3, True, {}),
        ("ir_csn", None, 8, False, {}),
        ("i3d_replace", "resnet50", 4, True, {"non_local": "tsm"}),
        ("vit", "vit_s", 4, True, {}),
        ("vit", "vit_s", 4, False, {"adapter": "shift"}),
        ("vit", "vit_s", 3, True, {"adapter": "st"}),
    ],
)
def test_activations_are_what_autograd_keeps(
    arch: str, backbone: str | None, t: int, fast: bool, options: dict
) -> None:
    def built() -> VideoNetwork:
        model = build_model(arch, backbone, t, 5, width=0.125, **options)
        if fast:
            accelerate(model)
        return model

    with torch.device("meta"):
        found = count(built(), 32, 48)
    model, clip = built(), clips(1, t, 32, 48).float()
    with kept(model.parameters()) as noted:
        assert model(clip).requires_grad
    floats, indices = noted.elements(), noted.elements(indices=True)
    assert (found.kept_elements, found.index_elements) == (floats, indices)
    wide = wide_under_autocast(model, clip)
    assert found.activation_bytes(2) == 2 * (floats + wide) + 8 * indices
    assert bool(wide) == (arch == "vit" or "non_local" in options)


def test_the_shift_is_free_and_a_layer_is_counted_by_hand() -> None:
    tsm, tsn = (build_model(arch, "resnet18", 4, 5, width=0.25) for arch in ("tsm", "tsn"))
    accelerate(tsm)
    assert count(tsm, 64) == count(tsn, 64)
    # conv1 on 2 frames of 5x7: 3 -> 64 channels, 7x7, output 2x3x4; its norm has 2 x 64 parameters.
    layer = count(build_model("tsn", "resnet18", 2), 5, 7).layers[0]
    assert (layer.product, layer.parameters) == ((2 * 3 * 4, 3 * 49, 64), 3 * 64 * 49 + 2 * 64)
    assert layer.multiply_adds == 3 * 64 * 49 * 24


def test_minimum_frames_leave_one_frame_for_every_stride() -> None:
    stages = {"i3d_3x3x3": "res5", "i3d_3x1x1": "res5", "eco_lite": "res5", "ir_csn": "res5", "slowfast": "slow res5"}
    for arch, stage in stages.items():
        assert counted(arch, None, ARCHITECTURES[arch].minimum_frames, height=32, width=0.125).stages[stage] == 1


def test_the_network_is_left_alone() -> None:
    model = build_model("tsm", "resnet18", 2, 5, width=0.125).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert count(model, 40, 56).clip == (2, 40, 56)
    assert model.training and model.conv1.weight.device.type == "cpu"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
