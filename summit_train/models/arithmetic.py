"""Where a library computes wrong gradients of a network."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.models.network import count_network
from summit_train.spec import Spec

_WRONG = 0.1  # relative error of a gradient; a right one in bf16 is off by 0.002


def check_arithmetic(spec: Spec, device: torch.device) -> None:
    """Raise UserError where the gradients of `spec` on `device` would be wrong.

    With torch 2.13.0 on a CPU with AVX-512, oneDNN's weight gradient of a 3D convolution in bf16 is uninitialised
    memory where clips have exactly two frames and the kernel sees three. I3D 3x3x3 with 16 frames has two in res4.
    """
    if device.type != "cpu" or spec.precision != "bf16" or 2 not in count_network(spec).stages.values():
        return
    if error_of_two_frames() > _WRONG:
        wrong = "this CPU's library computes wrong gradients of 3D convolutions over two frames"
        has = f"a stage of {spec.model.title} has two with data.num_frames {spec.data.num_frames}"
        raise UserError(f"precision bf16: {wrong}, and {has}; take precision=fp32")


def error_of_two_frames() -> float:
    """Return the relative error of a weight gradient in bf16, of a kernel of three frames over two; inf for a NaN."""
    generator = torch.Generator().manual_seed(0)
    clips, grad = (torch.randn(2, 16, 2, 4, 4, generator=generator).bfloat16() for _ in range(2))
    gradients = list[torch.Tensor]()
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.full((16, 16, 3, 1, 1), 0.125, dtype=dtype, requires_grad=True)
        out = functional.conv3d(clips.to(dtype), weight, padding=(1, 0, 0))
        gradients += torch.autograd.grad(out, weight, grad.to(dtype))
    found, right = gradients
    error = float((found.double() - right).norm() / right.norm())
    return error if error < math.inf else math.inf
