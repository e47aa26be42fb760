"""The temporal shift (Lin et al., "TSM", section 3): zero multiply-adds, zero parameters, one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn

Direction = Literal["both", "past"]


def temporal_shift(
    x: torch.Tensor, num_frames: int, fraction: float = 0.125, direction: Direction = "both"
) -> torch.Tensor:
    """Shift part of the channels of frames `x` (N*T, C, H, W) by one frame; same shape, type and memory format.

    With fold = floor(C * fraction): for "both", channels [0, fold) of frame t come from frame t+1 and channels
    [fold, 2*fold) from frame t-1; for "past" (online TSM), channels [0, fold) come from frame t-1. Frames outside the
    clip are zero. Raises ValueError where N*T is no multiple of `num_frames`.
    """
    if x.shape[0] % num_frames:
        raise ValueError(f"a batch of {x.shape[0]} frames does not divide into clips of {num_frames} frames")
    fold = num_shifted_channels(x.shape[1], fraction)
    if fold == 0:
        return x
    return _shift(x, num_frames, fold if direction == "both" else 0, fold, 1)


def num_shifted_channels(num_channels: int, fraction: float) -> int:
    """Return the channels that move in each direction: floor(num_channels * fraction), 1/8 of them in the paper."""
    # 100 * 0.29 is 28.999999999999996 in binary; the small term keeps the 29 that was meant.
    return int(num_channels * fraction + 1e-9)


def shifted_copy(x: torch.Tensor, num_frames: int, from_next: int, from_previous: int, step: int) -> torch.Tensor:
    """Copy frames `x` (N*T, C, H, W): channels [0, from_next) from frame t + step, `from_previous` more from t - step.

    step is 1 for the shift and -1 for its transpose.
    """
    # In the memory format of x: an NCHW result would make every later convolution convert it back.
    out = torch.zeros_like(x)
    source, target = (frames.view(-1, num_frames, *x.shape[1:]) for frames in (x, out))
    forward, backward = slice(0, from_next), slice(from_next, from_next + from_previous)
    if step < 0:
        forward, backward = backward, forward
    target[:, :-1, forward] = source[:, 1:, forward]
    target[:, 1:, backward] = source[:, :-1, backward]
    target[:, :, from_next + from_previous :] = source[:, :, from_next + from_previous :]
    return out


class _Shift(torch.autograd.Function):
    """The shift is linear and its transpose is the shift in the opposite direction, so nothing is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, num_frames: int, from_next: int, from_previous: int, step: int
    ) -> torch.Tensor:
        """Shift."""
        ctx.settings = (num_frames, from_next, from_previous, step)
        return shifted_copy(x, num_frames, from_next, from_previous, step)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Shift back."""
        num_frames, from_next, from_previous, step = ctx.settings
        return _shift(grads[0], num_frames, from_next, from_previous, -step), None, None, None, None


# Function.apply carries no types of its own.
_shift = cast("Callable[[torch.Tensor, int, int, int, int], torch.Tensor]", _Shift.apply)


class TemporalShift(nn.Module):
    """`temporal_shift` as a module. It has no parameters and no buffers, so no key in a state dict.

    Raises ValueError for fewer than one frame, and for a fraction outside [0, 1/2] ("both", where the two directions
    share the channels) or [0, 1] ("past").
    """

    def __init__(self, num_frames: int, fraction: float = 0.125, direction: Direction = "both") -> None:
        super().__init__()
        largest = {"both": 0.5, "past": 1.0}.get(direction)
        if num_frames < 1 or largest is None or not 0.0 <= fraction <= largest:
            raise ValueError(
                f"a shift of {fraction} of the channels, direction {direction!r}, {num_frames} frames; the fraction "
                "lies between 0 and 0.5 for both, between 0 and 1 for past, and a clip has at least 1 frame"
            )
        self.num_frames = num_frames
        self.fraction = fraction
        self.direction = direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift frames (N*T, C, H, W)."""
        return temporal_shift(x, self.num_frames, self.fraction, self.direction)

    def extra_repr(self) -> str:
        """Return the settings for repr."""
        return f"num_frames={self.num_frames}, fraction={self.fraction}, direction={self.direction}"
