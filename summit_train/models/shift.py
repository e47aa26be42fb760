"""The temporal shift (Lin et al., "TSM", Section 3): zero multiply-adds, zero parameters, one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

DIRECTIONS: tuple[str, ...] = ("both", "past")


def num_shifted_channels(num_channels: int, fraction: float) -> int:
    """Channels that move in each direction: floor(num_channels * fraction), 1/8 of them in the paper."""
    # 100 * 0.29 is 28.999999999999996 in binary; the small term keeps the 29 that was meant.
    return int(num_channels * fraction + 1e-9)


def _move(out_NTCHW: torch.Tensor, in_NTCHW: torch.Tensor, channels: slice, offset: int) -> None:
    """out[:, t, channels] = in[:, t + offset, channels], zero where t + offset is outside the clip."""
    num_frames = in_NTCHW.shape[1]
    target, source = out_NTCHW[:, :, channels], in_NTCHW[:, :, channels]
    if offset > 0:
        target[:, : num_frames - 1].copy_(source[:, 1:])
        target[:, num_frames - 1 :].zero_()
    else:
        target[:, 1:].copy_(source[:, : num_frames - 1])
        target[:, :1].zero_()


def shifted_copy(x: torch.Tensor, num_frames: int, from_next: int, from_previous: int, step: int) -> torch.Tensor:
    """Copy of `x` (N*T, C, H, W) in its own memory format, its leading channels taken from other frames.

    Channels [0, from_next) from frame t + step, the `from_previous` after them from t - step; step is 1 for the shift
    and -1 for its transpose. Autograd does not see through it.
    """
    # An NCHW result from a channels-last input would make every later convolution convert it back:
    # that, not the copy, is what made earlier shifts cost a third of the training step.
    out = torch.empty_like(x, memory_format=torch.preserve_format)
    by_clip = (x.shape[0] // num_frames, num_frames, *x.shape[1:])
    in_NTCHW, out_NTCHW = x.view(by_clip), out.view(by_clip)
    both = from_next + from_previous
    if from_next:
        _move(out_NTCHW, in_NTCHW, slice(0, from_next), step)
    if from_previous:
        _move(out_NTCHW, in_NTCHW, slice(from_next, both), -step)
    if both < x.shape[1]:
        out[:, both:].copy_(x[:, both:])
    return out


class _Shift(torch.autograd.Function):
    """The shift is linear; its transpose is the shift in the opposite direction, so nothing is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, num_frames: int, from_next: int, from_previous: int, step: int
    ) -> torch.Tensor:
        ctx.settings = (num_frames, from_next, from_previous, step)
        return shifted_copy(x, num_frames, from_next, from_previous, step)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        num_frames, from_next, from_previous, step = ctx.settings
        opposite = _apply_shift(grads[0], num_frames, from_next, from_previous, -step)
        return opposite, None, None, None, None


# Function.apply carries no types of its own.
_apply_shift = cast("Callable[[torch.Tensor, int, int, int, int], torch.Tensor]", _Shift.apply)


def temporal_shift(x: torch.Tensor, num_frames: int, fraction: float = 0.125, direction: str = "both") -> torch.Tensor:
    """Shift part of the channels of `x` (N*T, C, H, W) by one frame; same shape, dtype and memory format.

    With fold = floor(C * fraction): for "both", channels [0, fold) of frame t come from frame t+1 and
    [fold, 2*fold) from t-1; for "past" (online TSM), [0, fold) come from t-1. Frames outside the clip
    are zero. Raises ValueError when N*T is no multiple of `num_frames`.
    """
    check_batch(x, num_frames)
    fold = num_shifted_channels(x.shape[1], fraction)
    if fold == 0:
        return x
    from_next = fold if direction == "both" else 0
    return _apply_shift(x, num_frames, from_next, fold, 1)


class TemporalShift(nn.Module):
    """`temporal_shift` as a module; it has no parameters and no buffers, so no key in a state dict.

    Raises ValueError for a direction that is not "both" or "past", fewer than one frame, or a fraction
    outside [0, 1/2] ("both", since the two directions share the channels) or [0, 1] ("past").
    """

    def __init__(self, num_frames: int, fraction: float = 0.125, direction: str = "both") -> None:
        super().__init__()
        check_shift(fraction, direction, num_frames)
        self.num_frames = num_frames
        self.fraction = fraction
        self.direction = direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return temporal_shift(x, self.num_frames, self.fraction, self.direction)

    def extra_repr(self) -> str:
        return f"num_frames={self.num_frames}, fraction={self.fraction}, direction={self.direction}"


def check_batch(x: torch.Tensor, num_frames: int) -> None:
    """Raise ValueError where `x` (N*T, C, H, W) does not hold whole clips."""
    if x.shape[0] % num_frames:
        raise ValueError(f"a batch of {x.shape[0]} frames does not divide into clips of {num_frames} frames")


def check_shift(fraction: float, direction: str, num_frames: int = 1) -> None:
    """Raise ValueError, with what would be right, for shift settings that mean nothing."""
    if num_frames < 1:
        raise ValueError(f"num_frames is {num_frames}; a clip has at least 1 frame")
    if direction not in DIRECTIONS:
        raise ValueError(f"shift_direction is {direction!r}; valid: {', '.join(DIRECTIONS)}")
    largest = 0.5 if direction == "both" else 1.0
    if not 0.0 <= fraction <= largest:
        raise ValueError(
            f"shift_fraction is {fraction}; with shift_direction={direction} it lies between 0 and {largest}"
        )
