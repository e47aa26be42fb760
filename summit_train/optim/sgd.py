"""SGD with momentum as the paper uses it, built so that a step can be skipped on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_factors: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return convolution and linear weights, with decay, and biases and BN's scale and shift, without.

    lr_factors: of the modules with these names, whose LR is that many times the others'; each such LR has two groups of
    its own. Source: the paper, section 4.1 ("no weight decay on BatchNorm and bias").
    """
    factors = lr_factors or {}
    factor_of = {p: factor for name, factor in factors.items() for p in model.get_submodule(name).parameters()}
    groups: list[dict[str, Any]] = []
    for factor in dict.fromkeys((1.0, *factors.values())):
        own = [p for p in model.parameters() if factor_of.get(p, 1.0) == factor]
        for decay, params in ((weight_decay, [p for p in own if p.ndim > 1]), (0.0, [p for p in own if p.ndim <= 1])):
            if params:  # a convolution without a bias has one group
                groups.append({"params": params, "weight_decay": decay, "lr_factor": factor})
    return groups


def build_sgd(groups: list[dict[str, Any]], momentum: float) -> torch.optim.SGD:
    """Return fused SGD, whose LR is set before each update. Only the fused kernel can skip an update on the device.

    The LR stays outside the momentum buffer (v <- m v + g; w <- w - lr v), so a warm-up needs no momentum correction
    (Goyal et al., section 3). The buffers begin with zeros: m * 0 + g is the first update's g. The fused kernel would
    leave them uninitialised if the first update is skipped.
    """
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=True)
    for parameter in (p for group in groups for p in group["params"] if momentum):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the LR of every group: `lr` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)  # checkpoints of before the factor have none
