"""Names to networks: TSN, TSM and the paper's two I3Ds (Tables 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from summit_train.models.resnet import (
    BLOCKS,
    BOTTLENECK_BACKBONES,
    BlockShift,
    BlockTime,
    BlockTimes,
    FrameResNet,
    InflatedResNet,
    Layout,
    Shift,
    StemTime,
    VideoResNet,
    initialise,
)
from summit_train.models.shift import check_shift

# Fewest frames of each network: the product of its strides in time. A clip any shorter reaches a stage with
# one frame before the last stride, which then halves nothing and sees padding alone.
MINIMUM_FRAMES: dict[str, int] = {"tsm": 1, "tsn": 1, "i3d_3x3x3": 16, "i3d_3x1x1": 8}
SHIFT_PLACES: tuple[str, ...] = ("residual", "in_place")


def build_model(
    arch: str,
    backbone: str = "resnet50",
    num_frames: int = 8,
    num_classes: int = 400,
    *,
    width: float = 1.0,
    dropout: float = 0.0,
    shift_fraction: float = 0.125,
    shift_place: str = "residual",
    shift_direction: str = "both",
    recompute: bool = False,
    generator: torch.Generator | None = None,
) -> VideoResNet:
    """A video network with fresh weights: float (N, num_frames, 3, H, W) -> logits (N, num_classes).

    arch: "tsn" (2D, the frames' logits averaged), "tsm" (the same with the temporal shift), "i3d_3x3x3" or
    "i3d_3x1x1". backbone: resnet18, resnet34, resnet50 or resnet101; i3d_3x1x1 inflates 1x1 convolutions and
    so needs one of the last two. width multiplies the channels (rounded to multiples of 8). Only "tsm" reads
    the shift settings.
    recompute: between forward and backward pass only the blocks' inputs are kept, at the cost of a second forward pass.
    Weights are drawn from `generator`, or from torch's global one. Raises ValueError for a choice that does
    not exist and for a clip that is too short for the network's strides in time.
    """
    _check_choice("arch", arch, MINIMUM_FRAMES)
    _check_choice("backbone", backbone, BLOCKS)
    _check_choice("shift_place", shift_place, SHIFT_PLACES)
    check_shift(shift_fraction, shift_direction)
    _check_numbers(arch, backbone, num_frames, num_classes, width)
    shift = _shifts(backbone, num_frames, shift_fraction, shift_place, shift_direction)
    layout = Layout(
        backbone=backbone,
        num_dims=3 if arch.startswith("i3d") else 2,
        num_frames=num_frames,
        num_classes=num_classes,
        width=width,
        dropout=dropout,
        stem=_STEMS[arch],
        block_time=_BLOCK_TIMES[arch],
        block_shift=shift if arch == "tsm" else _no_shift,
        recompute=recompute,
    )
    model = FrameResNet(layout) if layout.num_dims == 2 else InflatedResNet(layout)
    initialise(model, generator)
    return model


def _check_choice(name: str, value: str, valid: Iterable[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def _check_numbers(arch: str, backbone: str, num_frames: int, num_classes: int, width: float) -> None:
    if arch == "i3d_3x1x1" and backbone not in BOTTLENECK_BACKBONES:
        raise ValueError(
            f"i3d_3x1x1 inflates the first 1x1 convolution of bottleneck blocks and {backbone} has none; "
            f"valid backbones: {', '.join(BOTTLENECK_BACKBONES)}"
        )
    if num_frames < MINIMUM_FRAMES[arch]:
        raise ValueError(
            f"{arch} needs at least {MINIMUM_FRAMES[arch]} frames, the product of its strides in time; "
            f"num_frames is {num_frames}"
        )
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; it is at least 1")
    if not (math.isfinite(width) and width > 0):
        raise ValueError(f"width is {width}; it is a positive number")


# i3d_3x3x3 (Hara et al.): conv1 7x7x7 / (1,2,2), pool1 3x3x3 / 2 padded by 1.
# i3d_3x1x1 (Wang et al., non-local networks): conv1 5x7x7 / 2, pool1 2x3x3 / 2, pool2 2x1x1 after res2.
_STEMS: dict[str, StemTime] = {
    "tsm": StemTime(),
    "tsn": StemTime(),
    "i3d_3x3x3": StemTime(conv_kernel=7, pool_kernel=3, pool_stride=2, pool_padding=1),
    "i3d_3x1x1": StemTime(conv_kernel=5, conv_stride=2, pool_kernel=2, pool_stride=2, pool2=2),
}


def _time_2d(stage: int, block: int) -> BlockTime:
    return BlockTime()


def _time_3x3x3(stage: int, block: int) -> BlockTime:
    """Every 3x3 inflated; res3 to res5 halve T together with H and W."""
    return BlockTime(spatial=3, stride=2 if stage > 0 and block == 0 else 1)


def _time_3x1x1(stage: int, block: int) -> BlockTime:
    """First 1x1 inflated: in res2 in all blocks, res3 1010.., res4 101010.., res5 010."""
    inflated = stage == 0 or (block % 2 == 1 if stage == 3 else block % 2 == 0)
    return BlockTime(pointwise=3 if inflated else 1)


_BLOCK_TIMES: dict[str, BlockTimes] = {
    "tsm": _time_2d,
    "tsn": _time_2d,
    "i3d_3x3x3": _time_3x3x3,
    "i3d_3x1x1": _time_3x1x1,
}


def _no_shift(stage: int, block: int) -> None:
    return None


def _shifts(backbone: str, num_frames: int, fraction: float, place: str, direction: str) -> BlockShift:
    """A shift in every block; as in the authors' code, in every second one for a residual ResNet-101."""
    every = 2 if place == "residual" and BLOCKS[backbone][2] >= 23 else 1

    def shift(stage: int, block: int) -> Shift | None:
        return None if block % every else Shift(num_frames, fraction, direction, place == "in_place")

    return shift
