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
from summit_train.models.native.kernels import Parameters, Statistics
from summit_train.models.rolled import Roll, join, layout_of


class _Normalise(torch.autograd.Function):
    """relu(norm(x) + shortcut), stored as `after` says; `before` says how the shortcut is. None is unrolled.

    Without a shortcut relu is taken only where `rectify`. Gradients are stored as what they belong to.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor | None,
        norm: _Norm, rectify: bool, before: Roll | None, after: Roll | None,
    ) -> torch.Tensor:  # fmt: skip
        train, momentum = norm.by_batch, norm.take_in()
        parameters = Parameters(weight, bias, norm.running_mean, norm.running_var)
        layout = layout_of(x.shape[1], before, after)
        result, statistics = kernels.forward(
            x, shortcut, parameters, layout, train=train, relu=rectify, momentum=momentum, eps=norm.eps
        )
        ctx.save_for_backward(x, weight, bias, *statistics, None if shortcut is None else result)
        ctx.settings = train, rectify, layout
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse, result = ctx.saved_tensors
        train, rectify, layout = ctx.settings
        # The gradient of the last activation comes out of the pooling in a layout of its own.
        grad = grad.to(x.dtype).contiguous(memory_format=kernels.channels_last_of(x))
        grads = kernels.backward(
            grad, result, x, Parameters(weight, bias, None, None), Statistics(mean, inverse), layout,
            train=train, relu=rectify, x_wanted=ctx.needs_input_grad[0],
        )  # fmt: skip
        return *grads, None, None, None, None


# Function.apply carries no types of its own.
_normalise = cast("Callable[..., torch.Tensor]", _Normalise.apply)


class _Norm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.BatchNorm, that can also do what follows it. fused: in one kernel where there is one."""

    fused = True

    def rectified(self, x: torch.Tensor) -> torch.Tensor:
        """relu(norm(x))."""
        if not self._fuses(x):
            return relu(self(x))
        return _normalise(x, self.weight, self.bias, None, self, True, None, None)

    def joined(
        self, x: torch.Tensor, shortcut: torch.Tensor, before: Roll | None = None, after: Roll | None = None
    ) -> torch.Tensor:
        """relu(norm(x) + shortcut): the shortcut is stored as `before` says, the result as `after` does."""
        alike = shortcut.shape == x.shape and shortcut.dtype == x.dtype and kernels.channels_last(shortcut)
        if not (alike and self._fuses(x)):
            out = self(x)
            return relu(add(out, shortcut)) if before is after is None else join(out, shortcut, before, after)
        return _normalise(x, self.weight, self.bias, shortcut, self, True, before, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fuses(x):
            return super().forward(x)
        return _normalise(x, self.weight, self.bias, None, self, False, None, None)

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

