"""SGD with momentum as the paper uses it, built so that a step can be skipped on the device."""

from __future__ import annotations

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: convolution and linear weights with decay; biases and BN's scale and shift without.

    Source: the paper, section 4.1 ("no weight decay on BatchNorm and bias").
    """
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def build_sgd(model: nn.Module, *, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """Fused SGD; its LR is set before each update.

    The LR stays outside the momentum buffer (v <- m v + g; w <- w - lr v), so a warm-up needs no momentum correction
    (Goyal et al., section 3). Fused, as the fused kernel alone can skip an update by a flag on the device.
    """
    return torch.optim.SGD(parameter_groups(model, weight_decay), lr=0.0, momentum=momentum, fused=True)


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter a momentum buffer of zeros: m * 0 + g is the first update's g.

    Left to itself the fused kernel makes buffers at the first update, uninitialised, and leaves them so if that update
    is skipped. To be called after the optimizer is wrapped, which drops its state.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the LR of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
