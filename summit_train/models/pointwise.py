"""Convolutions that are matrix products where they can be and that is faster.

A 1x1 convolution of frames on a CPU, their channels last, is a product of (pixels, channels) and the weight. In bf16
oneDNN's products take four fifths of its convolutions' time, above all for the gradient to the weight; in fp32 neither
is faster (docs/performance.md).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """How a convolution walks over a frame."""

    stride: Pair
    padding: Pair


POINTWISE = Geometry((1, 1), (0, 0))


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d, without a bias as a product where that is faster."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under autocast the weight becomes of x's type, if that is a 16-bit one.
        if self.bias is None and _is_product(x, self.weight, self.geometry):
            return _product(x, self.weight)
        return super().forward(x)

    @property
    def geometry(self) -> Geometry:
        """Stride and padding."""
        return Geometry(cast(Pair, self.stride), cast(Pair, self.padding))


def convolve(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The convolution of frames (N, C, H, W), without a bias."""
    if _is_product(x, weight, geometry):
        return _product(x, weight)
    return functional.conv2d(x, weight, None, geometry.stride, geometry.padding)


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A convolution's gradients to its input and its weight, those that are wanted."""
    if _is_product(x, weight, geometry) and _is_product(grad, weight, geometry):
        pixels, rows = (frames.permute(0, 2, 3, 1).flatten(0, 2) for frames in (grad, x))
        return (
            _product(grad, weight.transpose(0, 1)) if wanted[0] else None,
            (pixels.t() @ rows).view_as(weight) if wanted[1] else None,
        )
    stride, padding = geometry
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, [*wanted, False]
    )
    return found[0], found[1]


def _is_product(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and geometry == POINTWISE
        and weight.shape[2:] == (1, 1)
        and not torch.compiler.is_compiling()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x.permute(0, 2, 3, 1), weight.flatten(1)).permute(0, 3, 1, 2)
