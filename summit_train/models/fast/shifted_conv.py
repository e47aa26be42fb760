"""A convolution whose input is shifted in time, and that keeps no shifted copy of it (Lin et al., "TSM", section 3).

On CPUs the input is shifted in place, read by the convolution, and shifted back, which moves a quarter of the channels,
where a copy would move all of them. Elsewhere a copy is made for as long as the convolution takes. The backward pass
does the same, so nothing is kept that the 2D network does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from summit_train.models.fast import kernels
from summit_train.models.fast.kernels import Group
from summit_train.models.shift import TemporalShift, num_shifted_channels


class _ShiftedConvolution(torch.autograd.Function):
    """conv(shift(x))."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, conv: ShiftedConv2d) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv = conv
        with conv.shifted(x) as shifted:
            return functional.conv2d(shifted, weight, None, conv.stride, conv.padding, conv.dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        conv: ShiftedConv2d = ctx.conv
        needed = [*ctx.needs_input_grad[:2], False]
        with conv.shifted(x) as shifted:
            x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
                grad, shifted, weight, None, conv.stride, conv.padding, conv.dilation, False, (0, 0), 1, needed
            )
        return None if x_grad is None else conv.shifted_back(x_grad), weight_grad, None


# Function.apply carries no types of its own.
_shifted_convolution = cast("Callable[..., torch.Tensor]", _ShiftedConvolution.apply)


class ShiftedConv2d(nn.Conv2d):
    """conv(shift(x)) of frames (N*T, C, H, W), with the parameters of `conv`, not copies of them."""

    def __init__(self, conv: nn.Conv2d, shift: TemporalShift) -> None:
        assert conv.bias is None and conv.groups == 1 and not isinstance(conv.padding, str)
        kernel = cast("tuple[int, int]", conv.kernel_size)
        stride = cast("tuple[int, int]", conv.stride)
        padding = cast("tuple[int, int]", conv.padding)
        dilation = cast("tuple[int, int]", conv.dilation)
        channels = conv.in_channels, conv.out_channels
        super().__init__(*channels, kernel, stride, padding, dilation, bias=False, device="meta")
        self._parameters = conv._parameters
        self.num_frames = shift.num_frames
        fold = num_shifted_channels(conv.in_channels, shift.fraction)
        left = fold if shift.direction == "both" else 0
        from_past = Group(left, left + fold, -1)
        self.moves = [Group(0, left, 1), from_past] if left else [from_past]
        self.moves_back = [Group(begin, end, -step) for begin, end, step in self.moves]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) % self.num_frames == 0
        weight = self.weight
        device = x.device.type
        known = torch.amp.is_autocast_available(device)  # the meta device has none
        if known and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            # Autocast does not look into a function of our own.
            x, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, weight))
        return _shifted_convolution(kernels.channels_last(x) if kernels.take(x) else x, weight, self)

    @contextmanager
    def shifted(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend `x` shifted for the block. Afterwards `x` is what it was, to the bit, so autograd need not know."""
        if not kernels.take(x):
            yield _shifted_copy(x, self.num_frames, self.moves)
            return
        ends = x.new_empty(len(x) // self.num_frames, *x.shape[2:], sum(end - begin for begin, end, _ in self.moves))
        kernels.shift(x, self.num_frames, self.moves, ends)
        try:
            yield x
        finally:
            kernels.shift(x, self.num_frames, self.moves, ends, restore=True)

    def shifted_back(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the transposed shift of a gradient that nothing else needs."""
        if not kernels.take(grad):
            return _shifted_copy(grad, self.num_frames, self.moves_back)
        grad = kernels.channels_last(grad)
        kernels.shift(grad, self.num_frames, self.moves_back)
        return grad


def _shifted_copy(x: torch.Tensor, num_frames: int, groups: list[Group]) -> torch.Tensor:
    out = torch.empty_like(x)  # in the memory format of x
    shifted, clips = (frames.view(-1, num_frames, *x.shape[1:]) for frames in (out, x))
    for begin, end, step in groups:
        ahead = slice(1, None)
        behind = slice(None, -1)
        to, source = (behind, ahead) if step > 0 else (ahead, behind)
        shifted[:, to, begin:end] = clips[:, source, begin:end]
        shifted[:, -1 if step > 0 else 0, begin:end].zero_()
    rest = groups[-1].end
    shifted[:, :, rest:] = clips[:, :, rest:]
    return out
