"""A convolution that sees its input shifted in time and keeps no shifted copy of it (Lin et al., "TSM", Section 3).

Where the stream comes rolled (models/rolled.py) it is shifted as it lies. Where it does not, as in front of the first
block, a shifted copy is made for as long as the convolution takes, forward and backward. Either way nothing is saved
that the 2D network does not save, but for the ends of a projection's input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from summit_train.models.pointwise import POINTWISE, Conv2d, Geometry, Pair, convolve, gradients
from summit_train.models.rolled import Roll, Stream
from summit_train.models.shift import check_batch, check_shift, num_shifted_channels, temporal_shift


class _OfPlain(torch.autograd.Function):
    """The convolution of a stream with every frame in its place, shifted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, roll: Roll) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = geometry, roll
        return convolve(roll.shifted(x), weight, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        geometry, roll = ctx.settings
        wanted = ctx.needs_input_grad[:2]
        shifted = roll.shifted(x) if wanted[1] else x  # The gradient to the input reads its shape alone.
        grad_x, grad_weight = gradients(grad, shifted, weight, geometry, wanted)
        return None if grad_x is None else roll.shifted(grad_x, back=True), grad_weight, None, None


class _BesideProjection(torch.autograd.Function):
    """A rolled stream into a block that projects it: (the convolution of it shifted, the shortcut).

    The shortcut is the 1x1 convolution of every `step`-th pixel, with every frame in its place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor,
        geometry: Geometry, step: int, roll: Roll,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        # Kept whole, the pixels would be what the 2D network does not keep.
        kept = ends[..., ::step, ::step].contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, kept, weight, projection)
        ctx.settings = geometry, step, roll, ends.shape
        out = convolve(x, weight, geometry)
        return out, convolve(roll.restored(x, kept, step), projection, POINTWISE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, shortcut_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, weight, projection = ctx.saved_tensors
        geometry, step, roll, shape = ctx.settings
        of_x, _, of_weight, of_projection = ctx.needs_input_grad[:4]
        pixels = roll.restored(x, ends, step)
        to_pixels, to_projection = gradients(shortcut_grad, pixels, projection, POINTWISE, (of_x, of_projection))
        to_x, to_weight = gradients(grad, x, weight, geometry, (of_x, of_weight))
        to_ends = None
        if to_x is not None:
            beside, beside_ends = roll.stored(to_pixels)
            to_x[..., ::step, ::step] += beside
            to_ends = torch.zeros(shape, dtype=x.dtype, device=x.device)
            to_ends[..., ::step, ::step] = beside_ends
        return to_x, to_ends, to_weight, to_projection, None, None, None


# Function.apply carries no types of its own.
_of_plain = cast("Callable[[torch.Tensor, torch.Tensor, Geometry, Roll], torch.Tensor]", _OfPlain.apply)
_beside_projection = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", _BesideProjection.apply)


class ShiftedConv2d(Conv2d):
    """conv(temporal_shift(x)) of frames (N*T, C, H, W), T = `num_frames`; its parameters are those of nn.Conv2d.

    Raises ValueError for shift settings that mean nothing, and where a batch is no multiple of `num_frames`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        *,
        num_frames: int,
        fraction: float,
        direction: str,
    ) -> None:
        check_shift(fraction, direction, num_frames)
        super().__init__(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.num_frames, self.fraction, self.direction = num_frames, fraction, direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_batch(x, self.num_frames)
        if torch.compiler.is_compiling():  # A compiler fuses the copy with what is around it.
            return super().forward(temporal_shift(x, self.num_frames, self.fraction, self.direction))
        x, weight = self._in_one_type(x)
        return _of_plain(x, weight, self.geometry, self.roll)

    @cached_property
    def roll(self) -> Roll:
        """How a stream is stored that needs no shift any more."""
        fold = num_shifted_channels(self.in_channels, self.fraction)
        return Roll(self.num_frames, fold if self.direction == "both" else 0, fold)

    def of_rolled(self, stream: Stream) -> torch.Tensor:
        """What `forward` gives of the stream unrolled: the convolution of its frames as they lie."""
        return super().forward(stream.frames)

    def beside_projection(self, stream: Stream, projection: nn.Conv2d) -> tuple[torch.Tensor, torch.Tensor]:
        """`of_rolled`, and what a projection of 1x1 makes of the stream, with every frame in its place."""
        x, weight = self._in_one_type(stream.frames)
        ends = cast(torch.Tensor, stream.ends).to(x.dtype)
        step = int(projection.stride[0])
        return _beside_projection(x, ends, weight, projection.weight.to(weight.dtype), self.geometry, step, stream.roll)

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
