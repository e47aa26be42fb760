"""Keep BN's running statistics the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.comm import World
from summit_train.models.freeze import is_frozen


class RunningStatistics:
    """Average the micro-batches' statistics of one step over the rank's virtual GPUs, then over the ranks.

    One step of V virtual GPUs with micro-batch statistics s_1 .. s_V is defined as

        r <- (1 - m) r + m / V * sum_i s_i

    BN itself updates r once per forward pass, r <- (1 - q) r + q s. With q_i = 1 / (A / m - A + i) in the i-th of A
    passes (i = 1 .. A) every s_i gets the weight m / A and r gets 1 - m: the product of the (1 - q_j) telescopes. The
    update is linear, so the mean of r over the ranks is the r of all V virtual GPUs.

    The ranks average in every step, hidden under the backward pass (for a ResNet-50 0.2 MB beside 97 MB of gradients).
    Averaging only before a checkpoint would make a run that was stopped differ in the last bits from one that was not.
    """

    def __init__(self, model: nn.Module, accumulation: int, world: World) -> None:
        self._norms = [
            m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and not is_frozen(m)
        ]
        self._momenta = [norm.momentum for norm in self._norms]
        self._accumulation = accumulation
        self._world = world
        self._before = self._mean = torch.empty(0)
        self._handle = 0

    def begin_step(self) -> None:
        """Remember the statistics: a step that is skipped must leave them as they were."""
        if self._norms:
            self._before = torch.cat(self._buffers())

    def begin_pass(self, micro_batch: int) -> None:
        """Set the weight of the forward pass number `micro_batch` (from 0) of the step."""
        if self._accumulation == 1:
            return
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            if momentum is not None:
                norm.momentum = 1 / (self._accumulation / momentum - self._accumulation + micro_batch + 1)

    def start_mean(self) -> None:
        """Begin the average over the ranks, after the step's last forward pass."""
        if self._norms:
            self._mean = torch.cat(self._buffers())
            self._handle = self._world.start_mean(self._mean, "batch_norm")

    def finish(self, skipped: torch.Tensor) -> None:
        """Put the average in place or, if `skipped` is 1, the statistics from before the step."""
        if self._norms:
            self._world.finish(self._handle)
            buffers = self._buffers()
            settled = torch.where(skipped > 0, self._before, self._mean)
            torch._foreach_copy_(buffers, list(torch.split(settled, [b.numel() for b in buffers])))

    def count(self, steps: int) -> None:
        """Set num_batches_tracked to updates of the weights; forward passes depend on the accumulation."""
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(steps)

    def _buffers(self) -> list[torch.Tensor]:
        both = [(norm.running_mean, norm.running_var) for norm in self._norms]
        return [buffer for pair in both for buffer in pair if buffer is not None]
