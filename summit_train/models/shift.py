"""TSM: the temporal shift, and where it goes in a 2D network (Lin et al., "TSM", sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from summit_train.models.video import VideoNetwork
from summit_train.spec.catalog import ShiftDirection, ShiftPlace


def temporal_shift(
    x: torch.Tensor, num_frames: int, fraction: float = 0.125, direction: ShiftDirection = "both"
) -> torch.Tensor:
    """Shift part of the channels of frames `x` (N*T, C, H, W) by one frame; frames outside the clip are zero.

    Each shift moves fold = floor(C * fraction) channels: "both" shifts left and right, "past" (online TSM) right alone.
    """
    fold = num_shifted_channels(x.shape[1], fraction)
    left = fold if direction == "both" else 0
    both = left + fold
    out = torch.zeros_like(x)  # in the memory format of x
    shifted, clips = (frames.view(-1, num_frames, *x.shape[1:]) for frames in (out, x))
    shifted[:, :-1, :left] = clips[:, 1:, :left]  # shift left
    shifted[:, 1:, left:both] = clips[:, :-1, left:both]  # shift right
    shifted[:, :, both:] = clips[:, :, both:]  # not shifted
    return out


def num_shifted_channels(num_channels: int, fraction: float) -> int:
    """Return the channels that move in each direction: floor(num_channels * fraction), 1/8 of them in the paper."""
    # 100 * 0.29 is 28.999999999999996 in binary; the small term keeps the 29 that was meant.
    return int(num_channels * fraction + 1e-9)


class TemporalShift(nn.Module):
    """`temporal_shift` as a module. It has no parameters and no buffers, so no key in a state dict."""

    def __init__(self, num_frames: int, fraction: float = 0.125, direction: ShiftDirection = "both") -> None:
        super().__init__()
        self.num_frames = num_frames
        self.fraction = fraction
        self.direction = direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return temporal_shift(x, self.num_frames, self.fraction, self.direction)


def add_shifts(network: VideoNetwork, fraction: float, place: ShiftPlace, direction: ShiftDirection) -> None:
    """Give the residual blocks of `network` a shift, as the authors' code does.

    place: "residual" (in front of the branch) or "in_place" (in front of branch and shortcut; Figure 3).
    In front of the branch, ResNets with 23 blocks or more in a stage get a shift in every second one. MobileNetV2 gets
    it in its blocks that expand and have a shortcut.
    """
    stages = [list(network.get_submodule(name).children()) for name in network.sequences]
    step = shift_step(map(len, stages), place)
    for stage in stages:
        for block in [block for block in stage if getattr(block, "takes_shift", False)][::step]:
            shift = TemporalShift(network.num_frames, fraction, direction)
            if place == "in_place":
                block.in_place_shift = shift
            else:
                block.shift = shift


def shift_step(blocks_per_stage: Iterable[int], place: ShiftPlace) -> int:
    """Return 1 where each block gets a shift, 2 where every second one does."""
    return 2 if place == "residual" and max(blocks_per_stage) >= 23 else 1
