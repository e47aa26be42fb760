"""A convolution that sees its input shifted in time and keeps no shifted copy of it (Lin et al., "TSM", Section 3).

Where the stream comes rolled (models/rolled.py) only what came round the clips' ends is blanked, and the shortcut is
given beside the convolution's result. Where it does not, as in front of the first block, a quarter of its channels is
rolled within the input itself, and back after the convolution: bit for bit what they were, so that the shortcut, and
what autograd has saved, never see a difference. Either way nothing is saved that the 2D network does not save.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from summit_train.models.activation import add
from summit_train.models.rolled import Roll, Rolled
from summit_train.models.shift import check_batch, check_shift, num_shifted_channels, temporal_shift

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """How a convolution walks over a frame."""

    stride: Pair
    padding: Pair


_POINTWISE = Geometry((1, 1), (0, 0))


class _OfPlain(torch.autograd.Function):
    """The convolution of a stream with every frame in its place, shifted."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, roll: Roll
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = geometry, roll
        with roll.shifted(x) as shifted:
            return functional.conv2d(shifted, weight, None, geometry.stride, geometry.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        geometry, roll = ctx.settings
        with roll.shifted(x) as shifted:
            grad_x, grad_weight = _gradients(grad, shifted, weight, geometry, ctx.needs_input_grad[:2])
        return None if grad_x is None else roll.of_shifted(grad_x), grad_weight, None, None


class _OfRolled(torch.autograd.Function):
    """A rolled stream into a block: (the convolution of it shifted, the shortcut).

    With the weight of a projection the shortcut is that 1x1 convolution of every `step`-th pixel, with every frame in
    its place. Without, it is the stream itself, still rolled, and so is its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor | None,
        geometry: Geometry, step: int, roll: Roll,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.save_for_backward(x, weight, projection)
        ctx.settings = geometry, step, roll
        with roll.blanked(x):
            out = functional.conv2d(x, weight, None, geometry.stride, geometry.padding)
        if projection is None:
            return out, x
        return out, functional.conv2d(roll.pixels(x, step), projection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, shortcut_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, projection = ctx.saved_tensors
        geometry, step, roll = ctx.settings
        wanted = ctx.needs_input_grad
        beside, grad_projection = cast("torch.Tensor | None", shortcut_grad), None
        if projection is not None:
            pixels = roll.pixels(x, step)  # Kept, they would be what the 2D network does not keep.
            asked = (wanted[0], wanted[2])
            beside, grad_projection = _gradients(shortcut_grad, pixels, projection, _POINTWISE, asked)
            if beside is not None:
                roll.roll_(beside)
        with roll.blanked(x):
            grad_x, grad_weight = _gradients(grad, x, weight, geometry, wanted[:2])
        if grad_x is not None and beside is not None:
            roll.blank_(grad_x)
            if step == 1:
                grad_x = add(grad_x, beside)
            else:
                grad_x[..., ::step, ::step] += beside
        return grad_x, grad_weight, grad_projection, None, None, None


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A convolution's gradients to its input and its weight, those that are wanted."""
    stride, padding = geometry.stride, geometry.padding
    grads = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, [*wanted, False]
    )
    return grads[0], grads[1]


# Function.apply carries no types of its own.
_of_plain = cast("Callable[[torch.Tensor, torch.Tensor, Geometry, Roll], torch.Tensor]", _OfPlain.apply)
_of_rolled = cast(
    "Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Geometry, int, Roll], tuple[torch.Tensor, ...]]",
    _OfRolled.apply,
)


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
        return _of_plain(x, weight, self.geometry, self.roll)

    @property
    def geometry(self) -> Geometry:
        """Stride and padding."""
        return Geometry(cast(Pair, self.stride), cast(Pair, self.padding))

    @cached_property
    def roll(self) -> Roll:
        """How a stream is stored that needs no shift any more."""
        fold = num_shifted_channels(self.in_channels, self.fraction)
        return Roll(self.num_frames, fold if self.direction == "both" else 0, fold)

    def of_rolled(self, stream: Rolled, projection: nn.Conv2d | None = None) -> tuple[torch.Tensor, ...]:
        """What `forward` gives of the stream unrolled, and the shortcut beside it.

        That is the stream as it is stored, or what a projection of 1x1 makes of it, with every frame in its place.
        """
        x, weight = self._in_one_type(stream.frames)
        if projection is None:
            return _of_rolled(x, weight, None, self.geometry, 1, stream.roll)
        step = int(projection.stride[0])
        return _of_rolled(x, weight, projection.weight.to(weight.dtype), self.geometry, step, stream.roll)

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
