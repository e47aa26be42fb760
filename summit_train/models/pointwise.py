"""A convolution that is a matrix product where it can be one and that is faster."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d; a 1x1 of bf16 frames on a CPU, their channels last, as a product of (pixels, channels).

    oneDNN's bf16 products take four fifths of its convolutions' time, above all for the gradient to the weight; in fp32
    neither is faster (docs/performance.md).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_product(x):
            return super().forward(x)
        pixels = functional.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1))
        return pixels.permute(0, 3, 1, 2)

    def _is_product(self, x: torch.Tensor) -> bool:
        return (
            x.dtype == torch.bfloat16
            and x.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and self.kernel_size == self.stride == (1, 1)
            and self.padding == (0, 0)
            and self.bias is None
            and x.is_contiguous(memory_format=torch.channels_last)
        )
