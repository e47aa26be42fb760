"""Refuse to train where this machine's arithmetic is known to be wrong, as a small product shows."""

from __future__ import annotations

import torch
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.models.network import count_network
from summit_train.spec import Spec

_WRONG = 0.1  # relative; a right bf16 gradient is off by 0.002


def check_arithmetic(spec: Spec, device: torch.device) -> None:
    """Raise UserError where the gradients of `spec` on `device` would be wrong.

    With torch 2.13.0 on a CPU with AVX-512, oneDNN's weight gradient of a 3D convolution in bf16 is uninitialised
    memory where clips have exactly two frames and the kernel sees three, whatever the picture's size. I3D 3x3x3 with
    16 frames has two in res4.
    """
    if device.type != "cpu" or spec.precision != "bf16" or 2 not in count_network(spec).stages.values():
        return
    if error_of_two_frames() > _WRONG:
        raise UserError(
            f"precision bf16: this CPU's library computes wrong gradients of 3D convolutions over two frames, and a "
            f"stage of {spec.model.title} has two with data.num_frames {spec.data.num_frames}; take precision=fp32"
        )


def error_of_two_frames() -> float:
    """Return the relative error of a weight gradient in bf16, of a kernel of three frames over two; inf for a NaN."""
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(2, 16, 2, 4, 4, generator=generator).bfloat16()
    grad = torch.randn(2, 16, 2, 4, 4, generator=generator).bfloat16()
    found, wanted = (_weight_gradient(clips.to(dtype), grad.to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if error < float("inf") else float("inf")


def _weight_gradient(clips: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient to the weight of a convolution with a kernel of three frames, not strided."""
    weight = torch.full((16, 16, 3, 1, 1), 0.125, dtype=clips.dtype, requires_grad=True)
    out = functional.conv3d(clips, weight, padding=(1, 0, 0))
    (gradient,) = torch.autograd.grad(out, weight, grad)
    return gradient
