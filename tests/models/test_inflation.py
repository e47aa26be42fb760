"""An inflated I3D on one image repeated in time equals the 2D network, up to where temporal padding reaches.

Convolutions pad time with zeros, so the first and last frames of each see fewer copies of the image. Each
layer carries that further inwards. `_clean` follows it frame by frame; the tests hold both sides of the
border: clean frames equal the 2D features to 1e-4, the outermost ones do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from summit_train.models import VideoNetwork, build_model
from summit_train.models.resnet import STAGES
from summit_train.models.shift import TemporalShift
from tests.closeness import assert_near
from tests.networks import load, random_network

Clean = list[bool]


def _conv(clean: Clean, kernel: int, stride: int = 1) -> Clean:
    """A frame is clean when every tap reads a clean frame inside the clip (zeros are not the image)."""
    pad, num_frames = kernel // 2, len(clean)
    starts = range(-pad, num_frames + pad - kernel + 1, stride)
    return [all(0 <= t < num_frames and clean[t] for t in range(s, s + kernel)) for s in starts]


def _pool(clean: Clean, kernel: int, pad: int) -> Clean:
    """A max pool ignores its padding: only what it reads inside the clip counts."""
    num_frames = len(clean)
    starts = range(-pad, num_frames + pad - kernel + 1, 2)
    return [all(clean[t] for t in range(s, s + kernel) if 0 <= t < num_frames) for s in starts]


def _clean_3x3x3(num_frames: int) -> dict[str, Clean]:
    """ResNet-18: two 3x3x3 a block, two blocks a stage, the first of res3 to res5 with stride 2."""
    stages = {"conv1": _conv([True] * num_frames, 7)}
    now = stages["pool1"] = _pool(stages["conv1"], 3, 1)
    for stage in ("res2", "res3", "res4", "res5"):
        for layer in range(4):
            now = _conv(now, 3, 2 if layer == 0 and stage != "res2" else 1)
        stages[stage] = now
    return stages


def _clean_3x1x1(num_frames: int) -> dict[str, Clean]:
    """ResNet-50: 3, 2, 3 and 1 inflated 1x1 in the four stages, pool2 after the first."""
    stages = {"conv1": _conv([True] * num_frames, 5, 2)}
    now = stages["pool1"] = _pool(stages["conv1"], 2, 0)
    for stage, inflated in (("res2", 3), ("res3", 2), ("res4", 3), ("res5", 1)):
        for _ in range(inflated):
            now = _conv(now, 3)
        stages[stage] = now
        if stage == "res2":
            now = _pool(now, 2, 0)
    return stages


# At the paper's lengths the padding reaches every frame of the last stages; these leave a few.
CASES = {"i3d_3x3x3": ("resnet18", 240, _clean_3x3x3), "i3d_3x1x1": ("resnet50", 144, _clean_3x1x1)}


def _stage_outputs(model: VideoNetwork, clip: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stage -> (T, C, H, W) of the only clip."""
    outputs: dict[str, torch.Tensor] = {}

    def note(stage: str, output: torch.Tensor) -> None:
        # A copy, since the ReLU that follows conv1's norm works in place.
        outputs[stage] = (output if output.dim() == 4 else output[0].transpose(0, 1)).clone()

    for name, stage in STAGES.items():
        model.get_submodule(name).register_forward_hook(lambda _m, _i, out, stage=stage: note(stage, out))
    with torch.no_grad():
        model(clip)
    return outputs


@pytest.mark.parametrize("arch", CASES)
def test_one_image_repeated_gives_the_2d_features(arch: str, tmp_path: Path) -> None:
    backbone, num_frames, clean_frames = CASES[arch]
    flat = random_network("tsn", backbone, 1, seed=3).eval()
    inflated = build_model(arch, backbone, num_frames, 5, width=0.125).eval()
    load(inflated, flat.state_dict(), tmp_path)
    image = torch.randn(1, 1, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    expected = _stage_outputs(flat, image)
    actual = _stage_outputs(inflated, image.expand(1, num_frames, 3, 24, 24))
    clean = clean_frames(num_frames)
    for stage in STAGES.values():
        assert len(clean[stage]) == len(actual[stage]) and any(clean[stage])
        off = (actual[stage] - expected[stage]).abs().amax(dim=(1, 2, 3))
        assert all(
            off[t] <= 1e-4 * expected[stage].abs().max() for t, is_clean in enumerate(clean[stage]) if is_clean
        ), stage
        assert off[0] > 1e-2 and off[-1] > 1e-2, stage


def _double(arch: str, backbone: str, num_frames: int, seed: int, **options: object) -> VideoNetwork:
    return random_network(arch, backbone, num_frames, seed=seed, **options).double().eval()


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("resnet50", {}),
        ("resnet50", {"shift_direction": "past", "shift_fraction": 0.3}),
        ("resnet50", {"shift_fraction": 0.25, "non_local": "tsm"}),
        ("resnet50", {"shift_fraction": 0.0}),
        ("resnet101", {}),  # every second block
    ],
    ids=str,
)
def test_i3d_replace_from_our_tsm_gives_its_outputs(tmp_path: Path, backbone: str, options: dict) -> None:
    tsm = _double("tsm", backbone, 5, 1, **options)
    spec = {"model": {"arch": "tsm", "shift_fraction": 0.125, "shift_place": "residual", **options}}
    inflated = _double("i3d_replace", backbone, 5, 2, non_local=options.get("non_local", False))
    report = load(inflated, {"model": tsm.state_dict(), "step": 1, "spec": spec}, tmp_path)
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    blocks = sum(name.endswith("conv3.weight") for name in tsm.state_dict())
    assert [row.note for row in report.rows if row.note] == ["the shift as taps in time"] * blocks
    clip = torch.randn(2, 5, 3, 32, 32, dtype=torch.double)
    expected = tsm(clip)
    assert expected.std() > 1e-3
    assert_near(inflated(clip), expected, 1e-10)


def test_i3d_replace_from_the_authors_tsm_gives_its_outputs(tmp_path: Path) -> None:
    """conv1.net where a shift is: in every second block."""
    tsm = _double("tsm", "resnet101", 4, 1)
    shifted = {f"{name}.conv1.weight" for name, block in tsm.named_modules() if hasattr(block, "shift")
               and isinstance(block.shift, TemporalShift)}  # fmt: skip
    state = {f"base_model.{name.replace('conv1', 'conv1.net') if name in shifted else name}": value
             for name, value in tsm.state_dict().items()}  # fmt: skip
    inflated = _double("i3d_replace", "resnet101", 4, 2)
    report = load(inflated, {"state_dict": state}, tmp_path)
    assert {row.fate for row in report.rows} <= {"loaded", "counter"}
    clip = torch.randn(2, 4, 3, 32, 32, dtype=torch.double)
    assert_near(inflated(clip), tsm(clip), 1e-10)


@pytest.mark.parametrize(
    "spec", [{}, {"model": {"arch": "tsn"}}, {"model": {"arch": "tsm", "shift_place": "in_place"}}]
)
def test_i3d_replace_from_plain_weights_is_inflated(tmp_path: Path, spec: dict) -> None:
    """A shift in place moves the shortcut too, which no kernel of the branch does."""
    flat = _double("tsn", "resnet50", 2, 1)
    inflated = _double("i3d_replace", "resnet50", 2, 2)
    report = load(inflated, {"model": flat.state_dict(), "spec": spec}, tmp_path)
    assert [row.note for row in report.rows if row.note] == ["inflated over 3 frames"] * 16
    kernel = flat.layer2[1].conv1.weight
    for tap in range(3):
        assert_near(inflated.layer2[1].conv1.weight[:, :, tap], kernel / 3, 1e-6)
