"""Solvers without a fused kernel of torch's, in foreach operations: they skip an update on the device all the same.

As the fused solvers do, they read two attributes in `step`: grad_scale, which gradients are divided by, and found_inf,
1 where the update is to be skipped. No operation waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from summit_train.optim.trust import layer_norms

Tensors = list[torch.Tensor]


class ForeachSolver(torch.optim.Optimizer):
    """A solver whose algebra a subclass gives for one group of parameters.

    Skipping is part of the algebra: the gradients are zeros then, and `keep` is 0 instead of 1. A running average with
    the factor b is written a <- (1 - keep (1 - b)) a + (1 - b) g, so it stays to the bit.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], **options: float | tuple[float, float]) -> None:
        """Take groups of parameters, which carry the options."""
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, **options})

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
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self.grad_scale is not None:
            flat = flat / self.grad_scale
        keep = torch.ones((), dtype=flat.dtype, device=flat.device)
        if self.found_inf is not None:
            keep = (self.found_inf <= 0).to(flat.dtype)
            flat = torch.where(keep > 0, flat, 0)  # a product would keep a NaN
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        return keep, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

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

    The ratio |w| / |u| is 1 where one of them is 0, and for biases and batch normalisation, which have no decay either.
    phi, which may clip |w|, is the identity. t counts the updates that were not skipped. Options: betas, eps.
    """

    def _advance(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> None:
        directions = self._adam(group, weights, gradients, keep)
        torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        if weights[0].ndim > 1:  # a group has matrices and kernels, or biases and norms
            norms, lengths = layer_norms(weights), layer_norms(directions)
            ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, 1)
            torch._foreach_mul_(directions, list(ratios.unbind()))
        torch._foreach_mul_(directions, -group["lr"] * keep)
        torch._foreach_add_(weights, directions)

    def _adam(self, group: dict[str, Any], weights: Tensors, gradients: Tensors, keep: torch.Tensor) -> Tensors:
        """Return m^ / (sqrt(v^) + eps) after this gradient."""
        (one, two), means, squares = group["betas"], self._state("exp_avg", weights), self._state("exp_avg_sq", weights)
        torch._foreach_mul_(means, 1 - keep * (1 - one))
        torch._foreach_add_(means, gradients, alpha=1 - one)
        torch._foreach_mul_(squares, 1 - keep * (1 - two))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - two)
        updates = self._state("updates", weights, keep)
        torch._foreach_add_(updates, keep)
        count = updates[0].clamp(min=1)  # the same for all; 0 if the first update is skipped
        unbiased = torch._foreach_div(squares, 1 - two**count)
        directions = _divided(means, list(unbiased), group["eps"])
        torch._foreach_div_(directions, 1 - one**count)
        return directions
