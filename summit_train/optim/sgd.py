"""SGD with momentum as the paper uses it, built so that a step can be skipped on the device."""

from __future__ import annotations

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: convolution and linear weights with decay; biases and BN's scale and shift without.

    Source: the paper, section 4.1 ("no weight decay on BatchNorm and bias").
    """
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_sgd(model: nn.Module, *, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """Return fused SGD, whose LR is set before each update. Only the fused kernel can skip an update on the device.

    The LR stays outside the momentum buffer (v <- m v + g; w <- w - lr v), so a warm-up needs no momentum correction
    (Goyal et al., section 3).
    """
    return torch.optim.SGD(parameter_groups(model, weight_decay), lr=0.0, momentum=momentum, fused=True)


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter a momentum buffer of zeros: m * 0 + g is the first update's g.

    The fused kernel would leave its buffers uninitialised if the first update is skipped. Call this after the optimizer
    is wrapped, which drops its state.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the LR of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
