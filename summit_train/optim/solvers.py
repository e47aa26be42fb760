"""Build the spec's solver, one that skips an update on the device: torch's fused kernels, else foreach operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from summit_train.optim.foreach import Adagrad, Lamb, RMSprop
from summit_train.optim.sgd import build_sgd
from summit_train.spec.optimizer import OptimizerSpec


def build_solver(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the solver named in `spec` over groups of parameters; its LR is set before each update."""
    momentum, eps = spec.momentum or 0.0, spec.eps or 0.0
    if spec.name == "sgd":
        return build_sgd(groups, momentum)
    if spec.name == "adam":
        return torch.optim.Adam(groups, lr=0.0, betas=spec.betas, eps=eps, fused=True)
    if spec.name == "rmsprop":
        return RMSprop(groups, alpha=spec.alpha, eps=eps, momentum=momentum)
    if spec.name == "adagrad":
        return Adagrad(groups, eps=eps)
    return Lamb(groups, betas=spec.betas, eps=eps)


def kept_state(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return the names of a solver's state for each parameter, and whether each has the parameter's shape.

    Found by one step of a solver of the same kind and options.
    """
    kinds = (torch.optim.SGD, torch.optim.Adam, RMSprop, Adagrad, Lamb)
    kind: Any = next(kind for kind in kinds if isinstance(optimizer, kind))
    parameter = nn.Parameter(torch.zeros(1, 1))
    parameter.grad = torch.zeros(1, 1)
    solver = kind([{**optimizer.param_groups[0], "params": [parameter]}])
    solver.step()
    return {name: value.shape == parameter.shape for name, value in solver.state[parameter].items()}
