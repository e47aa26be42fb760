"""Rectifying and adding activations: in place where that is faster."""

from __future__ import annotations

import torch


def relu(x: torch.Tensor) -> torch.Tensor:
    """relu of a tensor that nobody else needs.

    PyTorch's kernels for 16-bit types on CPUs take longer in place than into a new tensor, up to twice as long
    (docs/performance.md); on GPUs there is no difference.
    """
    return torch.relu(x) if x.element_size() == 2 else torch.relu_(x)


def add(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x + other, where nobody else needs `x`."""
    return x + other if x.element_size() == 2 else x.add_(other)
