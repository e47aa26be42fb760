"""A convolution that sees its input shifted in time and keeps no shifted copy of it (Lin et al., "TSM", Section 3).

A copy of a block's input costs a read and a write of the whole activation, and on a CPU memory that is new to the
process; only 1/4 of the channels move. So on a CPU these are moved within the input itself, the convolution runs, and
they are moved back: bit for bit what they were, so that the shortcut, and what autograd has saved, never see a
difference. The backward pass does the same, and moves the input's gradient within itself too. On a GPU, where that
would be 14 small kernels, the copy is made anew in the backward pass. Either way nothing is saved that the 2D network
does not save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from summit_train.models.shift import check_batch, check_shift, num_shifted_channels, shifted_copy, temporal_shift

Pair = tuple[int, int]


@dataclass(frozen=True)
class _Settings:
    """What the shift and the convolution need besides tensors. Channels [0, from_next) come from frame t + 1, the
    `from_previous` after them from t - 1."""

    num_frames: int
    from_next: int
    from_previous: int
    stride: Pair
    padding: Pair


def _pull(frames_NTCHW: torch.Tensor, step: int) -> torch.Tensor:
    """In place: frame t becomes frame t + step (+1 or -1), zero beyond the clip's end; returns what fell out."""
    num_frames = frames_NTCHW.shape[1]
    order = range(num_frames) if step > 0 else range(num_frames - 1, -1, -1)
    fell_out = frames_NTCHW[:, order[0]].clone()
    for target, source in pairwise(order):
        frames_NTCHW[:, target].copy_(frames_NTCHW[:, source])
    frames_NTCHW[:, order[-1]].zero_()
    return fell_out


def _moving(x: torch.Tensor, settings: _Settings) -> Iterator[tuple[torch.Tensor, int]]:
    """The two groups of channels that move, as views (N, T, c, H, W), each with the step it takes its frames from."""
    # .data: the same memory with a version of its own. What is moved is moved back before anyone looks.
    clips = x.data.view(-1, settings.num_frames, *x.shape[1:])
    both = settings.from_next + settings.from_previous
    if settings.from_next:
        yield clips[:, :, : settings.from_next], 1
    if settings.from_previous:
        yield clips[:, :, settings.from_next : both], -1


@contextmanager
def _shifted(x: torch.Tensor, settings: _Settings) -> Iterator[torch.Tensor]:
    """`x` (N*T, C, H, W) shifted. On a CPU it is `x` itself; after the block, also one that fails, it is as before."""
    if x.device.type != "cpu":
        yield shifted_copy(x, settings.num_frames, settings.from_next, settings.from_previous, 1)
        return
    moved = [(view, step, _pull(view, step)) for view, step in _moving(x, settings)]
    try:
        yield x
    finally:
        for view, step, fell_out in moved:
            _pull(view, -step)
            view[:, 0 if step > 0 else settings.num_frames - 1].copy_(fell_out)


def _shifted_back(grad: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """The shift's transpose of a gradient that nobody else holds: each group moves the other way, zeros come in."""
    if grad.device.type != "cpu":
        return shifted_copy(grad, settings.num_frames, settings.from_next, settings.from_previous, -1)
    for view, step in _moving(grad, settings):
        _pull(view, -step)
    return grad


class _ShiftedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: _Settings) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        with _shifted(x, settings) as shifted:
            return functional.conv2d(shifted, weight, None, settings.stride, settings.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        settings: _Settings = ctx.settings
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        with _shifted(x, settings) as shifted:
            grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
                grad, shifted, weight, None, settings.stride, settings.padding, (1, 1), False, (0, 0), 1, wanted
            )
        if grad_x is not None:
            grad_x = _shifted_back(grad_x, settings)
        return grad_x, grad_weight, None


# Function.apply carries no types of its own.
_apply = cast("Callable[[torch.Tensor, torch.Tensor, _Settings], torch.Tensor]", _ShiftedConvolution.apply)


class ShiftedConv2d(nn.Conv2d):
    """conv(temporal_shift(x)) of frames (N*T, C, H, W), T = `num_frames`; its parameters are those of nn.Conv2d.

    Raises ValueError for shift settings that mean nothing, and where a batch is no multiple of `num_frames`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Pair, stride: Pair, padding: Pair,
        *, num_frames: int, fraction: float, direction: str,
    ) -> None:
        check_shift(fraction, direction, num_frames)
        super().__init__(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.num_frames, self.fraction, self.direction = num_frames, fraction, direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_batch(x, self.num_frames)
        if torch.compiler.is_compiling():  # A compiler fuses the copy with what is around it.
            return super().forward(temporal_shift(x, self.num_frames, self.fraction, self.direction))
        x, weight = self._in_one_type(x)
        if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
            x = x.contiguous()  # Elements that share memory, as an expanded tensor's do, cannot be moved.
        fold = num_shifted_channels(self.in_channels, self.fraction)
        settings = _Settings(
            self.num_frames,
            fold if self.direction == "both" else 0,
            fold,
            cast(Pair, self.stride),
            cast(Pair, self.padding),
        )
        return _apply(x, weight, settings)

    def extra_repr(self) -> str:
        shift = f"num_frames={self.num_frames}, fraction={self.fraction}, direction={self.direction}"
        return f"{super().extra_repr()}, {shift}"  # type: ignore[no-untyped-call]

    def _in_one_type(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and weight as autocast gives them to a convolution; it does not look into our own functions."""
        device = x.device.type
        known = torch.amp.is_autocast_available(device)  # the meta device has none
        if not known or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
            return x, self.weight
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), self.weight.to(dtype)
