"""summit_train/structure.py against hand-worked numbers, the papers, and the torch networks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from summit_train.models import build_model
from summit_train.structure import ARCHS, BLOCKS, Structure, check_architecture, describe, minimum_frames

# arch, backbone, width, T, H, W: every architecture with every backbone, odd widths, odd T and sizes.
CASES = [
    ("tsm", "resnet18", 1.0, 8, 64, 64),
    ("tsm", "resnet34", 0.3, 5, 33, 47),
    ("tsm", "resnet50", 1.0, 8, 224, 224),
    ("tsm", "resnet101", 0.5, 3, 56, 72),
    ("tsn", "resnet18", 0.125, 1, 32, 32),
    ("tsn", "resnet34", 1.0, 4, 61, 32),
    ("tsn", "resnet50", 1.7, 8, 64, 80),
    ("tsn", "resnet101", 1.0, 8, 112, 112),
    ("i3d_3x3x3", "resnet18", 0.6, 16, 32, 40),
    ("i3d_3x3x3", "resnet34", 1.0, 19, 64, 64),
    ("i3d_3x3x3", "resnet50", 1.0, 16, 224, 224),
    ("i3d_3x3x3", "resnet101", 0.25, 33, 48, 48),
    ("i3d_3x1x1", "resnet50", 1.0, 32, 224, 224),
    ("i3d_3x1x1", "resnet50", 0.5, 13, 50, 66),
    ("i3d_3x1x1", "resnet101", 1.0, 8, 64, 64),
]


def _meta(arch: str, backbone: str, width: float, t: int, h: int, w: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        model = build_model(arch, backbone, t, 10, width=width).eval()
        return model, torch.empty(1, t, 3, h, w)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_torch_network_layer_by_layer(case: tuple[str, str, float, int, int, int]) -> None:
    arch, backbone, width, t, h, w = case
    structure = describe(arch, backbone, width, 10, t, h, w)
    model, clip = _meta(*case)
    model.unroll()  # so that every convolution's hook is called
    outputs: dict[str, tuple[int, ...]] = {}
    norms = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(
                lambda _module, _inputs, out, name=name: outputs.update({name: tuple(out.shape)})
            )
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            norms[name] = module.num_features
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(clip)
    assert structure.parameters == sum(p.numel() for p in model.parameters())
    assert 2 * structure.multiply_adds == counter.get_total_flops()
    ours = {conv.name: (conv.out_channels, *conv.output) for conv in structure.convs}
    theirs = {n: s[1:] if len(s) == 5 else (s[1], s[0], *s[2:]) for n, s in outputs.items()}
    assert ours == theirs
    assert {norm.name: norm.channels for norm in structure.norms} == norms


def _kept_elements(model: nn.Module, clip: torch.Tensor) -> tuple[int, int]:
    """Distinct floats and 64-bit indices that a forward pass really keeps, but parameters and statistics."""
    floats: dict[int, int] = {}
    indices: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.dim() >= 2 and place not in parameters:
            (indices if tensor.dtype == torch.int64 else floats)[place] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(clip)
    assert logits.requires_grad
    return sum(floats.values()), sum(indices.values())


@pytest.mark.parametrize(
    ("arch", "backbone", "t", "options"),
    [
        ("tsn", "resnet18", 4, {}),
        ("tsn", "resnet50", 4, {}),
        ("tsm", "resnet18", 4, {}),
        ("tsm", "resnet50", 4, {}),
        ("tsm", "resnet50", 4, {"shift_direction": "past", "shift_fraction": 0.3}),
        ("tsm", "resnet50", 4, {"shift_place": "in_place"}),
        ("tsm", "resnet50", 4, {"shift_fraction": 0.0}),
        ("tsm", "resnet101", 2, {}),
        ("i3d_3x3x3", "resnet18", 16, {}),
        ("i3d_3x1x1", "resnet50", 16, {}),
    ],
)
def test_activations_are_what_autograd_keeps(arch: str, backbone: str, t: int, options: dict) -> None:
    structure = describe(arch, backbone, 0.25, 5, t, 32, 48, **options)
    model = build_model(arch, backbone, t, 5, width=0.25, **options)
    floats, indices = _kept_elements(model, torch.randn(1, t, 3, 32, 48))
    assert (structure.activation_elements, structure.index_elements) == (floats, indices)
    assert structure.activation_bytes(2) == 2 * floats + 8 * indices


@pytest.mark.parametrize(
    ("arch", "frames", "parameters", "giga", "compute_io"),
    [
        ("tsm", 8, 24_327_632, 32.9, 27.4e3),
        ("tsn", 8, 24_327_632, 32.9, 27.4e3),
        ("i3d_3x1x1", 32, 28_043_472, 33.1, 6.85e3),
        ("i3d_3x3x3", 16, 47_018_576, 39.85, 16.6e3),
    ],
)
def test_the_papers_numbers(arch: str, frames: int, parameters: int, giga: float, compute_io: float) -> None:
    """Table 1 and the counts of the project's issue, ResNet-50, 400 classes, 224^2."""
    structure = describe(arch, num_frames=frames)
    assert structure.parameters == parameters
    assert structure.gradient_bytes == 4 * parameters
    assert structure.multiply_adds == pytest.approx(giga * 1e9, rel=0.01)
    assert structure.input_bytes == frames * 3 * 224 * 224
    assert structure.compute_io == pytest.approx(compute_io, rel=0.01)


def _table_2() -> Iterator[tuple[Structure, list[tuple[str, int]]]]:
    names = ["data", "conv1", "pool1", "res2", "res3", "res4", "res5", "global_pool"]
    yield describe("tsm"), list(zip(names, [8] * 7 + [1], strict=True))
    yield (
        describe("i3d_3x3x3", num_frames=16),
        list(zip(names, [16, 16, 8, 8, 4, 2, 1, 1], strict=True)),
    )
    names.insert(4, "pool2")
    yield (
        describe("i3d_3x1x1", num_frames=32),
        list(zip(names, [32, 16, 8, 8, 4, 4, 4, 4, 1], strict=True)),
    )


def test_t_per_stage_is_table_2() -> None:
    for structure, stages in _table_2():
        assert list(structure.stages.items()) == stages


def test_one_convolution_by_hand() -> None:
    """conv1 of a 2D ResNet on 2 frames of 5x7: 3 -> 64 channels, 7x7, output 2x3x4."""
    conv = describe("tsn", num_frames=2, height=5, width_px=7).convs[0]
    assert conv.output == (2, 3, 4)
    assert conv.parameters == 3 * 64 * 49
    assert conv.multiply_adds == 3 * 64 * 49 * 24


def test_minimum_frames_leave_one_frame_for_every_stride() -> None:
    assert {arch: minimum_frames(arch) for arch in ARCHS} == {
        "tsm": 1,
        "tsn": 1,
        "i3d_3x3x3": 16,
        "i3d_3x1x1": 8,
    }
    for arch in ("i3d_3x3x3", "i3d_3x1x1"):
        assert describe(arch, num_frames=minimum_frames(arch)).stages["res5"] == 1
        with pytest.raises(ValueError, match=f"at least {minimum_frames(arch)} frames.*num_frames is 7"):
            describe(arch, num_frames=7)


@pytest.mark.parametrize(
    ("arch", "backbone", "message"),
    [
        ("c3d", "resnet50", "arch is 'c3d'; valid: tsm, tsn, i3d_3x3x3, i3d_3x1x1"),
        ("tsm", "vgg16", "backbone is 'vgg16'; valid: resnet18, resnet34, resnet50, resnet101"),
        ("i3d_3x1x1", "resnet18", "1x1 convolutions.*valid: resnet50, resnet101"),
    ],
)
def test_wrong_choices_name_the_right_ones(arch: str, backbone: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_architecture(arch, backbone, 32)


def test_impossible_sizes_are_refused() -> None:
    for sizes in ({"num_classes": 0}, {"height": 0}, {"num_frames": -1}):
        with pytest.raises(ValueError):
            describe("tsm", **sizes)
    for width in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            describe("tsm", width=width)
    with pytest.raises(ValueError, match="shift_place is 'inplace'; valid: residual, in_place"):
        describe("tsm", shift_place="inplace")


def test_all_backbones_are_described() -> None:
    counts = {backbone: describe("tsn", backbone, num_classes=1000).parameters for backbone in BLOCKS}
    # torchvision's published counts.
    assert counts == {
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
        "resnet50": 25_557_032,
        "resnet101": 44_549_160,
    }


def test_import_needs_no_torch() -> None:
    code = "import sys, summit_train.structure as s; s.describe('tsm'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
