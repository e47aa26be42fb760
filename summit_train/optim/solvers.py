"""Solvers that can skip an update on the device: torch's fused kernels, and others in foreach operations.

All of them read two attributes in `step`: grad_scale, which gradients are divided by, and found_inf, 1 where the update
is to be skipped. No operation waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from summit_train.spec.keys import COUNTERS, OptimizerSpec, kept_tensors

Tensors = list[torch.Tensor]
Solver = TypeVar("Solver", bound=torch.optim.Optimizer)


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_factors: Mapping[str, float] | None = None, *, decay_norms: bool = False
) -> list[dict[str, Any]]:
    """Return groups of weights, with decay, and of biases and norms' scale and shift, with decay only if `decay_norms`.

    What the model names in `undecayed`, such as a vit's class token and positions, is among the second. has_ratio: of
    the first alone, whose layers lars and lamb give a trust ratio.

    lr_factors: of the parameters with these names, whose LR is that many times the others'; each such LR has two groups
    of its own, and so have parameters of the same epochs in the model's `frozen_until`: a group counts its updates.
    Source: the paper, section 4.1 ("no weight decay on BatchNorm and bias").
    """
    factors = lr_factors or {}
    undecayed = getattr(model, "undecayed", ())
    until: Mapping[str, float] = getattr(model, "frozen_until", {})
    groups: list[dict[str, Any]] = []
    for epochs, factor in product(dict.fromkeys((0.0, *until.values())), dict.fromkeys((1.0, *factors.values()))):
        kind = (epochs, factor)
        named = {n: p for n, p in model.named_parameters() if (until.get(n, 0.0), factors.get(n, 1.0)) == kind}
        large = [p for name, p in named.items() if p.ndim > 1 and name not in undecayed]
        small = [p for name, p in named.items() if p.ndim <= 1 or name in undecayed]
        small_decay = weight_decay if decay_norms else 0.0
        for params, decay, has_ratio in ((large, weight_decay, True), (small, small_decay, False)):
            if params:  # a convolution without a bias has one group
                groups.append({"params": params, "weight_decay": decay, "lr_factor": factor, "has_ratio": has_ratio})
    return groups


def build_sgd(groups: list[dict[str, Any]], momentum: float) -> torch.optim.SGD:
    """Return fused SGD, whose LR is set before each update. Only the fused kernel can skip an update on the device.

    The LR stays outside the momentum buffer (v <- m v + g; w <- w - lr v), so a warm-up needs no momentum correction
    (Goyal et al., section 3). The buffers begin with zeros: m * 0 + g is the first update's g. The fused kernel would
    leave them uninitialised if the first update is skipped.
    """
    optimizer = _uncompiled(torch.optim.SGD)(groups, lr=0.0, momentum=momentum, fused=True)
    begin_momentum(optimizer)
    return optimizer


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give zeros to the trained parameters of SGD that lack a momentum buffer; other solvers begin in a step."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        for parameter in group["params"] if group["momentum"] else []:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the LR of every group: `lr` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)  # checkpoints of before the factor have none


def build_solver(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the solver named in `spec` over groups of parameters; its LR is set before each update."""
    momentum = spec.momentum or 0.0
    eps = spec.eps or 0.0
    if spec.name == "sgd":
        return build_sgd(groups, momentum)
    if spec.name in ("adam", "adamw"):  # AdamW: w <- (1 - lr weight_decay) w before Adam's update
        kind = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
        return _uncompiled(kind)(groups, lr=0.0, betas=spec.betas, eps=eps, fused=True)
    if spec.name == "rmsprop":
        return _uncompiled(RMSprop)(groups, alpha=spec.alpha, eps=eps, momentum=momentum)
    if spec.name == "adagrad":
        return _uncompiled(Adagrad)(groups, eps=eps)
    return _uncompiled(Lamb)(groups, betas=spec.betas, eps=eps)


def _uncompiled(kind: type[Solver]) -> type[Solver]:
    """Return the class without the decorators that keep torch.compile out of its methods.

    They import the compiler to do so: 820 modules and a second of each rank's start.
    """
    methods = {}
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step"):
        method = getattr(kind, name)
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        methods[name] = torch.no_grad()(method) if name == "step" else method
    return type(kind.__name__, (kind,), methods)


def kept_state(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return the names of a solver's state for each parameter, and whether each has the parameter's shape."""
    name = type(optimizer).__name__.lower()
    momentum = optimizer.param_groups[0].get("momentum")
    return dict.fromkeys(kept_tensors(name, momentum), True) | dict.fromkeys(COUNTERS.get(name, ()), False)


class ForeachSolver(torch.optim.Optimizer):
    """A solver whose algebra a subclass gives for one group of parameters.

    Skipping is part of the algebra: the gradients are zeros then, and `keep` is 0 instead of 1. A running average with
    the factor b is written a <- (1 - keep (1 - b)) a + (1 - b) g, so it stays to the bit.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], **options: float | tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "has_ratio": True, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update, or leave weights and state as they are where found_inf is 1."""
        assert closure is None
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if weights:
                keep, gradients = self._gradients(weights)
                self._advance(group, weights, gradients, keep)

    def _advance(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> None:
        """Advance state and weights of one group in place."""
        raise NotImplementedError

    def _gradients(self, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Return keep and the unscaled gradients, zeros where the update is skipped."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        # In the order of their dense memory: in another layout than the weights' each operation would take longer.
        flat = torch.cat([gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients])
        if self.grad_scale is not None:
            flat = flat / self.grad_scale
        keep = torch.ones((), dtype=flat.dtype, device=flat.device)
        if self.found_inf is not None:
            keep = (self.found_inf <= 0).to(flat.dtype)
            flat = torch.where(keep > 0, flat, 0)  # a product would keep a NaN
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        return keep, [part.as_strided(g.shape, g.stride()) for part, g in zip(parts, gradients, strict=True)]

    def _state(self, name: str, weights: Tensors, like: torch.Tensor | None = None) -> Tensors:
        """Return one state of each weight, of the weight's shape or that of `like`, zeros at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight if like is None else like)
        return [self.state[weight][name] for weight in weights]


class RMSprop(ForeachSolver):
    """RMSprop (Tieleman and Hinton, lecture 6.5) as torch's: s <- a s + (1 - a) g^2; w <- w - lr g / (sqrt(s) + eps).

    With momentum m: v <- m v + g / (sqrt(s) + eps); w <- w - lr v. Options: alpha, eps, momentum.
    """

    def _advance(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> None:
        # The gradients of the loss with an L2 penalty: g + decay * w.
        gradients = list(torch._foreach_add(gradients, torch._foreach_mul(weights, keep * group["weight_decay"])))
        squares = self._state("square_avg", weights)
        torch._foreach_mul_(squares, 1 - keep * (1 - group["alpha"]))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        moves = _divided(gradients, squares, group["eps"])
        if group["momentum"]:
            velocity = self._state("momentum_buffer", weights)
            torch._foreach_mul_(velocity, 1 - keep * (1 - group["momentum"]))
            torch._foreach_add_(velocity, moves)
            moves = velocity
        torch._foreach_add_(weights, torch._foreach_mul(moves, -group["lr"] * keep))


class Adagrad(ForeachSolver):
    """AdaGrad (Duchi, Hazan, Singer 2011) as torch's: s <- s + g^2; w <- w - lr g / (sqrt(s) + eps). Option: eps.

    torch has a fused kernel of it for CPUs, for GPUs in its newest releases alone.
    """

    def _advance(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> None:
        gradients = list(torch._foreach_add(gradients, torch._foreach_mul(weights, keep * group["weight_decay"])))
        sums = self._state("sum", weights)
        torch._foreach_addcmul_(sums, gradients, gradients, 1.0)
        torch._foreach_add_(weights, _divided(gradients, sums, group["eps"]), alpha=-group["lr"])


def _divided(gradients: Tensors, squares: Tensors, eps: float) -> Tensors:
    """Return g / (sqrt(s) + eps)."""
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(gradients, roots))


class Lamb(ForeachSolver):
    """LAMB (You et al., *Large Batch Optimization for Deep Learning*, 2019, Algorithm 2).

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  m^ = m / (1 - b1^t);  v^ = v / (1 - b2^t)
        u = m^ / (sqrt(v^) + eps) + weight_decay w;  w <- w - lr |w| / |u| u

    The ratio |w| / |u| is 1 where one of them is 0, and in groups without `has_ratio` (see parameter_groups).
    phi, which may clip |w|, is the identity. t counts the updates that were not skipped. Options: betas, eps.
    """

    def _advance(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> None:
        directions = self._adam(group, weights, gradients, keep)
        torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        if group["has_ratio"]:
            norms = layer_norms(weights)
            lengths = layer_norms(directions)
            ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, 1)
            torch._foreach_mul_(directions, list(ratios.unbind()))
        torch._foreach_mul_(directions, -group["lr"] * keep)
        torch._foreach_add_(weights, directions)

    def _adam(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> Tensors:
        """Return m^ / (sqrt(v^) + eps) after this gradient."""
        beta1, beta2 = group["betas"]
        means = self._state("exp_avg", weights)
        squares = self._state("exp_avg_sq", weights)
        torch._foreach_mul_(means, 1 - keep * (1 - beta1))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, 1 - keep * (1 - beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = self._state("updates", weights, keep)
        torch._foreach_add_(updates, [keep] * len(updates))  # by one tensor for all, a host may wait for its number
        count = updates[0].clamp(min=1)  # the same for all; 0 if the first update is skipped
        unbiased = torch._foreach_div(squares, 1 - beta2**count)
        directions = _divided(means, list(unbiased), group["eps"])
        torch._foreach_div_(directions, 1 - beta1**count)
        return directions


def layer_norms(tensors: Tensors) -> torch.Tensor:
    """Return the L2 norm of each tensor, shape (tensors,), in a few kernels for all of them."""
    return torch.stack(torch._foreach_norm(tensors))
