"""Batch normalisation, the sum with a shortcut, and relu in one kernel, on CPUs.

Every activation is read and written as rarely as possible. Parameters, buffers and values are torch.nn.BatchNorm's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.fast import kernels


class _Normalise(torch.autograd.Function):
    """norm(x), relu(norm(x)) or relu(norm(x) + shortcut)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shortcut: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
        norm: FusedNorm,
    ) -> torch.Tensor:  # fmt: skip
        result = torch.empty_like(x)
        # Mean and 1 / sqrt(variance + eps).
        mean, inverse = torch.empty(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        tensors = [x, shortcut, result, weight, bias, norm.running_mean, norm.running_var, mean, inverse]
        shape = kernels.integers(x.numel() // x.shape[1], x.shape[1], torch.get_num_threads())
        ctx.arguments = shape, ctypes.c_int(norm.training), ctypes.c_int(norm.relu)
        numbers = ctypes.c_double(norm.momentum or 0.0), ctypes.c_double(norm.eps)
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        kernels.call("forward", x.dtype, tensors, *ctx.arguments, *numbers)
        ctx.save_for_backward(x, weight, bias, mean, inverse, None if shortcut is None else result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse, result = ctx.saved_tensors
        # The gradient of the last activation comes out of the pooling in another memory format.
        grad = kernels.channels_last(grad.to(x.dtype))
        shortcut_grad = None if result is None else torch.empty_like(x)
        x_grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(mean)
        bias_grad = torch.empty_like(mean)
        tensors = [grad, result, x, shortcut_grad, x_grad, weight, bias, mean, inverse, weight_grad, bias_grad]
        kernels.call("backward", x.dtype, tensors, *ctx.arguments)
        return x_grad, shortcut_grad, weight_grad, bias_grad, None


# Function.apply carries no types of its own.
_normalise = cast("Callable[..., torch.Tensor]", _Normalise.apply)


class FusedNorm(_BatchNorm):
    """The batch normalisation `norm` and what follows it: norm(x), relu(norm(x)), or relu(norm(x) + shortcut).

    It has the parameters and buffers of `norm`, not copies of them. `norm` has a weight and running statistics.
    """

    def __init__(self, norm: _BatchNorm, relu: bool) -> None:
        # Without storage of its own: that of `norm` takes its place.
        super().__init__(norm.num_features, norm.eps, norm.momentum, device="meta")
        self._parameters = norm._parameters
        self._buffers = norm._buffers
        self.relu = relu
        self.training = norm.training

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and x.numel() == x.shape[1]:
            raise ValueError(f"batch normalisation needs more than 1 value per channel, got {tuple(x.shape)}")
        if not kernels.take(x):  # fp16
            out = super().forward(x)
            out = out if shortcut is None else out + shortcut
            return torch.relu(out) if self.relu else out
        if shortcut is not None:
            shortcut = kernels.channels_last(shortcut.to(x.dtype))
        return _normalise(kernels.channels_last(x), shortcut, self.weight, self.bias, self)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        """Take both (N, C, H, W) and (N, C, T, H, W)."""
