"""Batch normalisation with what follows it: relu, or the sum with a shortcut and relu.

On CPUs both are one kernel (models/native), which reads and writes every activation as rarely as can be, and where the
stream of a TSM is rolled in time at no price. Elsewhere they are PyTorch's operators, one after the other. Parameters,
buffers and values are those of torch.nn.BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from summit_train.models.activation import add, relu
from summit_train.models.native import kernels
from summit_train.models.native.kernels import Gradients, Layout, Parameters, Statistics, Stored
from summit_train.models.rolled import Roll, Stream, join, layout_of


class _Normalise(torch.autograd.Function):
    """norm(x), or relu(norm(x)) where `rectify`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: _Norm, rectify: bool
    ) -> torch.Tensor:
        result, statistics = _forward(ctx, x, None, weight, bias, norm, rectify, layout_of(x.shape[1], None, None))
        ctx.save_for_backward(x, weight, bias, *statistics)
        return result.frames

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        grads = _backward(ctx, Stored(_as_stored(grad, x), None), None, None, x, *saved)
        return grads.x, grads.weight, grads.bias, None, None


class _Join(torch.autograd.Function):
    """relu(norm(x) + shortcut) twice, as a Stream has it, and what fell out of it.

    The shortcut is stored as `before` says, the result as `after` does. Gradients are stored as what they belong to.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor,
        ends: torch.Tensor | None, norm: _Norm, before: Roll | None, after: Roll | None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        stored = Stored(shortcut, None if ends is None else _as_stored(ends, x))
        layout = layout_of(x.shape[1], before, after)
        result, statistics = _forward(ctx, x, stored, weight, bias, norm, True, layout)
        ctx.save_for_backward(x, weight, bias, *statistics, result.frames)
        ctx.set_materialize_grads(False)
        return result.frames, result.frames.detach(), result.ends

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, beside: torch.Tensor | None, ends: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, *saved, result = ctx.saved_tensors
        one, other = (None if some is None else _as_stored(some, x) for some in (grad, beside))
        if one is None:
            one, other = torch.zeros_like(x) if other is None else other, None
        layout = ctx.settings[2]
        if layout.after_ends is not None:
            shape = (len(x) // layout.num_frames, layout.after_ends, *x.shape[2:])
            ends = _as_stored(x.new_zeros(shape) if ends is None else ends, x)
        grads = _backward(ctx, Stored(one, ends), other, result, x, *saved)
        return grads.x, grads.weight, grads.bias, *cast(Stored, grads.shortcut), None, None, None


def _as_stored(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """In the type and layout of x; the gradient of the last activation comes out of the pooling in one of its own."""
    return grad.to(x.dtype).contiguous(memory_format=kernels.channels_last_of(x))


def _forward(
    ctx: Any, x: torch.Tensor, shortcut: Stored | None, weight: torch.Tensor, bias: torch.Tensor, norm: _Norm,
    rectify: bool, layout: Layout,
) -> tuple[Stored, Statistics]:  # fmt: skip
    train, momentum = norm.by_batch, norm.take_in()
    ctx.settings = train, rectify, layout
    parameters = Parameters(weight, bias, norm.running_mean, norm.running_var)
    return kernels.forward(x, shortcut, parameters, layout, train=train, relu=rectify, momentum=momentum, eps=norm.eps)


def _backward(
    ctx: Any, grad: Stored, beside: torch.Tensor | None, result: torch.Tensor | None, x: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor,
) -> Gradients:  # fmt: skip
    train, rectify, layout = ctx.settings
    return kernels.backward(
        grad, beside, result, x, Parameters(weight, bias, None, None), Statistics(mean, inverse), layout,
        train=train, relu=rectify, x_wanted=ctx.needs_input_grad[0],
    )  # fmt: skip


# Function.apply carries no types of its own.
_normalise = cast("Callable[..., torch.Tensor]", _Normalise.apply)
_join = cast("Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]", _Join.apply)


class _Norm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.BatchNorm, that can also do what follows it. fused: in one kernel where there is one."""

    fused = True

    def rectified(self, x: torch.Tensor) -> torch.Tensor:
        """relu(norm(x))."""
        if not self._fuses(x):
            return relu(self(x))
        return _normalise(x, self.weight, self.bias, self, True)

    def joined(self, x: torch.Tensor, shortcut: Stream, after: Roll | None = None) -> Stream:
        """relu(norm(x) + shortcut), stored as `after` says."""
        other, before = shortcut.beside, shortcut.roll
        alike = other.shape == x.shape and other.dtype == x.dtype and kernels.channels_last(other)
        if alike and self._fuses(x):
            return Stream(*_join(x, self.weight, self.bias, other, shortcut.ends, self, before, after), after)
        out = self(x)
        if before is after is None:
            return Stream.of(relu(add(out, other)))
        out, ends = join(out, other, shortcut.ends, before, after)
        return Stream(out, out, ends, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fuses(x):
            return super().forward(x)
        return _normalise(x, self.weight, self.bias, self, False)

    @property
    def by_batch(self) -> bool:
        """The batch's own statistics are what it is normalised by."""
        return self.training or self.running_mean is None

    def take_in(self) -> float:
        """Count a batch, if one is taken in; its share of the running statistics."""
        if not (self.training and self.running_mean is not None):
            return 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return float(self.momentum)
        return 1.0 / float(cast(torch.Tensor, self.num_batches_tracked))

    def _fuses(self, x: torch.Tensor) -> bool:
        rows = x.numel() // max(1, x.shape[1])
        return (
            self.fused
            and not torch.compiler.is_compiling()
            and (rows > 1 or not self.training)  # PyTorch's own refuses a single value a channel.
            and kernels.available(x)
            and self.weight.dtype == kernels.wide(x.dtype)
            and self.weight.device == x.device
        )


class Norm2d(_Norm, nn.BatchNorm2d):
    """Of (N, C, H, W)."""


class Norm3d(_Norm, nn.BatchNorm3d):
    """Of (N, C, T, H, W)."""
