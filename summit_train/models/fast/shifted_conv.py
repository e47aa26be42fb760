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

from summit_train.models.fast.native import kernels
from summit_train.models.fast.native.kernels import Group
from summit_train.models.shift import TemporalShift, num_shifted_channels, shifted_copy


class _ShiftedConvolution(torch.autograd.Function):
    """conv(shift(x))."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, conv: ShiftedConv2d) -> torch.Tensor:
        """Convolve the shifted input."""
        ctx.save_for_backward(x, weight)
        ctx.conv = conv
        with conv.shifted(x) as shifted:
            return functional.conv2d(shifted, weight, None, conv.stride, conv.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients to the input and the weight."""
        x, weight = ctx.saved_tensors
        conv: ShiftedConv2d = ctx.conv
        wanted = [*ctx.needs_input_grad[:2], False]
        with conv.shifted(x) as shifted:
            x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
                grad, shifted, weight, None, conv.stride, conv.padding, (1, 1), False, (0, 0), 1, wanted
            )
        return None if x_grad is None else conv.shifted_back(x_grad), weight_grad, None


# Function.apply carries no types of its own.
_shifted_convolution = cast("Callable[..., torch.Tensor]", _ShiftedConvolution.apply)


class ShiftedConv2d(nn.Conv2d):
    """conv(shift(x)) of frames (N*T, C, H, W), with the parameters of `conv`, not copies of them."""

    def __init__(self, conv: nn.Conv2d, shift: TemporalShift) -> None:
        assert conv.bias is None and conv.groups == 1 and conv.dilation == (1, 1) and not isinstance(conv.padding, str)
        kernel, stride = cast("tuple[int, int]", conv.kernel_size), cast("tuple[int, int]", conv.stride)
        padding = cast("tuple[int, int]", conv.padding)
        super().__init__(conv.in_channels, conv.out_channels, kernel, stride, padding, bias=False, device="meta")
        self._parameters = conv._parameters
        self.num_frames, self.fraction, self.direction = shift.num_frames, shift.fraction, shift.direction
        self.from_previous = num_shifted_channels(conv.in_channels, shift.fraction)
        self.from_next = self.from_previous if shift.direction == "both" else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return conv(shift(x)). Raises ValueError where the batch does not hold whole clips."""
        if x.shape[0] % self.num_frames:
            raise ValueError(f"a batch of {x.shape[0]} frames does not divide into clips of {self.num_frames} frames")
        weight, device = self.weight, x.device.type
        known = torch.amp.is_autocast_available(device)  # the meta device has none
        if known and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            # Autocast does not look into a function of our own.
            x, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, weight))
        return _shifted_convolution(kernels.channels_last(x) if kernels.take(x) else x, weight, self)

    @contextmanager
    def shifted(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend `x` shifted for the block. Afterwards `x` is what it was, to the bit, so autograd need not know."""
        if not kernels.take(x):
            yield shifted_copy(x, self.num_frames, self.from_next, self.from_previous, 1)
            return
        ends = kernels.shift(x, self.num_frames, self._groups(1), keep=True)
        try:
            yield x
        finally:
            kernels.restore(x, cast(torch.Tensor, ends), self.num_frames, self._groups(1))

    def shifted_back(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the transposed shift of a gradient that nobody else needs."""
        if not kernels.take(grad):
            return shifted_copy(grad, self.num_frames, self.from_next, self.from_previous, -1)
        grad = kernels.channels_last(grad)
        kernels.shift(grad, self.num_frames, self._groups(-1), keep=False)
        return grad

    def _groups(self, step: int) -> list[Group]:
        both = self.from_next + self.from_previous
        groups = [Group(0, self.from_next, step), Group(self.from_next, both, -step)]
        return [group for group in groups if group.end > group.begin]

    def extra_repr(self) -> str:
        """Return the settings for repr."""
        shift = f"num_frames={self.num_frames}, fraction={self.fraction}, direction={self.direction}"
        return f"{super().extra_repr()}, {shift}"  # type: ignore[no-untyped-call]
