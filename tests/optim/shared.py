"""A network for the tests of solvers, and gradients for it."""

from __future__ import annotations

import torch
from torch import nn


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Each kind of layer: parameters of one, two and four dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1), nn.Linear(16, 5)).to(dtype)


def give_gradients(model: nn.Module, seed: int, by: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter) * by
