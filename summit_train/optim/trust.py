"""Trust ratios: each layer's LR times a ratio of norms of its weight and its gradient, over any solver.

    lars:    r = coefficient |w| / (|g| + weight_decay |w|)   (You, Gitman, Ginsburg 2017, section 4)
    bounded: r = min(max(|w| / |g|, lower), upper)            (You et al. 2019, DATE, Algorithm 1, lines 13 to 17)

g is the gradient as the solver gets it: averaged over the ranks, unscaled, clipped. Where |w| or |g| is 0, lars has
r = 1 and bounded r = 1 within its bounds. A layer is one tensor of weights. lars leaves groups without `has_ratio`, as
of biases and batch normalisation, without a ratio; DATE's lines have no such exception. All stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from summit_train.optim.solvers import layer_norms
from summit_train.spec.optimizer import TrustRatioSpec


@dataclass(frozen=True)
class Ratios:
    """The ratios of one update, still on the device: values[i] is that of the parameter names[i]."""

    names: list[str]
    values: torch.Tensor

    def read(self) -> dict[str, float]:
        """Wait for the device and return the ratio of each parameter."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class TrustRatio:
    """Makes the step of an optimizer with a ratio on each layer's LR."""

    def __init__(self, spec: TrustRatioSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._spec = spec
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> Ratios | None:
        """Make the optimizer's step so that each layer moves by its ratio; nothing moves where `skipped` is 1.

        Returns None where no trained layer has a ratio.
        """
        weights = []
        parts = []
        for group in self._optimizer.param_groups:
            layers = [parameter for parameter in group["params"] if parameter.grad is not None]
            if layers and (self._spec.kind == "bounded" or group["has_ratio"]):
                weights += layers
                parts.append(self._ratios(layers, group["weight_decay"]))
        if not parts:
            self._optimizer.step()
            return None
        ratios = torch.where(skipped > 0, 1, torch.cat(parts))
        if self._spec.kind == "lars" and isinstance(self._optimizer, torch.optim.SGD):
            self._step_with_lr_in_momentum(dict(zip(weights, ratios.unbind(), strict=True)))
        else:
            _step_scaled(self._optimizer, weights, list(ratios.unbind()))
        return Ratios([self._names[parameter] for parameter in weights], ratios)

    def _ratios(self, layers: list[torch.Tensor], weight_decay: float) -> torch.Tensor:
        spec = self._spec
        scale = getattr(self._optimizer, "grad_scale", None)
        weights = layer_norms(layers)
        gradients = layer_norms([w.grad for w in layers if w.grad is not None])
        if scale is not None:
            gradients = gradients / scale
        is_known = (weights > 0) & (gradients > 0)
        if spec.kind == "bounded":
            return torch.where(is_known, weights / gradients, 1).clamp(spec.lower, spec.upper)
        return torch.where(is_known, spec.coefficient * weights / (gradients + weight_decay * weights), 1)

    def _step_with_lr_in_momentum(self, ratios: dict[torch.Tensor, torch.Tensor]) -> None:
        """v <- m v + lr r (g + weight_decay w); w <- w - v: SGD at LR 1 on a gradient that holds all the rest."""
        optimizer: Any = self._optimizer
        before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in weights]
            if not weights:
                continue
            if optimizer.grad_scale is not None:
                torch._foreach_div_(gradients, optimizer.grad_scale)
            torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])
            torch._foreach_mul_(gradients, group["lr"])
            adapted = [w.grad for w in weights if w in ratios]
            if adapted:
                torch._foreach_mul_(adapted, [ratios[w] for w in weights if w in ratios])
            group["lr"] = 1.0
            group["weight_decay"] = 0.0
        optimizer.grad_scale = None
        optimizer.step()
        for group, (lr, decay) in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
            group["weight_decay"] = decay


def _step_scaled(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], ratios: list[torch.Tensor]) -> None:
    """Make the step, then scale what each weight moved by: w <- w_before + r (w_after - w_before)."""
    before = [weight.clone() for weight in weights]
    optimizer.step()
    moves = torch._foreach_sub(weights, before)
    torch._foreach_mul_(moves, ratios)
    torch._foreach_copy_(weights, torch._foreach_add(before, moves))
