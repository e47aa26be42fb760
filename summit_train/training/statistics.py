"""BN's running statistics under virtual GPUs: the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.comm import World
from summit_train.models.freeze import is_frozen


class RunningStatistics:
    """Averages the micro-batches' statistics of one step: first over the rank's virtual GPUs, then over the ranks.

    One step of V virtual GPUs with micro-batch statistics s_1 .. s_V is defined as

        r <- (1 - m) r + m / V * sum_i s_i

    BN itself updates r once per forward pass, r <- (1 - q) r + q s. With q_i = 1 / (A / m - A + i) in the i-th of A
    passes (i = 1 .. A) every s_i ends up with the weight m / A and r with 1 - m: the product of the (1 - q_j) has a
    telescoping form. The update is linear, so the mean over ranks of their r is the r of all V virtual GPUs.

    The ranks are averaged in every step, under the backward pass, which hides it (2 x the number of BN channels: 0.2 MB
    beside 97 MB of gradients for a ResNet-50). Averaging only before a checkpoint would be equal to rounding, but a run
    that was stopped at another step would then differ in the last bits from one that was not.
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
        """Begin the average over the ranks; to be called after the step's last forward pass."""
        if self._norms:
            self._mean = torch.cat(self._buffers())
            self._handle = self._world.start_mean(self._mean, "batch_norm")

    def finish(self, skipped: torch.Tensor) -> None:
        """Put the average in place, or where `skipped` is 1 what was there before the step."""
        if self._norms:
            self._world.finish(self._handle)
            buffers = self._buffers()
            settled = torch.where(skipped > 0, self._before, self._mean)
            torch._foreach_copy_(buffers, list(torch.split(settled, [b.numel() for b in buffers])))

    def count(self, steps: int) -> None:
        """Let num_batches_tracked count updates of the weights: forward passes depend on the accumulation."""
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(steps)

    def _buffers(self) -> list[torch.Tensor]:
        both = [(norm.running_mean, norm.running_var) for norm in self._norms]
        return [buffer for pair in both for buffer in pair if buffer is not None]
