"""BN's running statistics: those of a step are the mean over all virtual GPUs, however often a network runs a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from summit_train.core.comm import World
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.models.video import norm_momentum, trained_norms


class RunningStatistics:
    """Average the micro-batches' statistics of one step over the rank's virtual GPUs, then over the ranks.

    One step of V virtual GPUs with micro-batch statistics s_1 .. s_V is defined as

        r <- (1 - m) r + m / V * sum_i s_i

    BN itself updates r once per forward pass, r <- (1 - q) r + q s. With q_i = 1 / (A / m - A + i) in the i-th of a
    rank's A passes (i = 1 .. A) every s_i gets the weight m / A and r gets 1 - m: the product of the (1 - q_j)
    telescopes. With r_0 from before the step, the rank brings r_0 + c (r - r_0) to the mean over the R ranks, where
    c = A R / V is 1 for equal shares. So each s_i has the weight m R / V, and as the A add up to V, the mean is the r
    of all V virtual GPUs. (In the passes q_i = w / (1 - (A - i) w), w = m R / V, would do the same. But it can be 2
    where m is near 1, and CountedStatistics divides by k - q.)

    The ranks average in every step, hidden under the backward pass (for a ResNet-50 0.2 MB beside 97 MB of gradients).
    Averaging only before a checkpoint would make a run that was stopped differ in the last bits from one that was not.
    """

    def __init__(self, model: nn.Module, virtual_gpus: int, world: World) -> None:
        self._norms = trained_norms(model)
        self._momenta = [norm.momentum for norm in self._norms]
        self._accumulation, self._world = len(virtual_gpus_of(world.rank, world.size, virtual_gpus)), world
        self._share = self._accumulation * world.size / virtual_gpus  # over the mean share
        self._before = self._mean = torch.empty(0)
        self._wait: Callable[[], None] = lambda: None
        self._hooks = list[RemovableHandle]()

    def close(self) -> None:
        """Leave the normalisations as they were found: to others of which more are trained."""
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            norm.momentum = momentum
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        if self._norms:
            self._before = torch.cat(self._buffers())  # a step that is skipped must leave them as they were

    def begin_pass(self, micro_batch: int, step: int) -> None:
        """Set the weight of the forward pass number `micro_batch` (from 0) of the step number `step` of the run."""
        if self._accumulation > 1:
            for norm, momentum in zip(self._norms, self._momenta, strict=True):
                norm.momentum = self._weight(momentum or 0.0, micro_batch)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the statistics as they are in the block: a backward pass that runs norms again sees no new batch."""
        with norm_momentum(self._norms, 0.0):
            yield

    def start_mean(self) -> None:
        if self._norms:
            self._mean = torch.cat(self._buffers())
            if self._share != 1:  # on all ranks; in doubles, as the r_0 of the ranks cancel out
                self._mean = self._before.double().lerp(self._mean.double(), self._share)
            self._wait = self._world.start_mean(self._mean, "batch_norm")

    def finish(self, skipped: torch.Tensor) -> None:
        """Put the average in place or, if `skipped` is 1, the statistics from before the step."""
        if self._norms:
            self._wait()
            settled = torch.where(skipped > 0, self._before, self._mean.to(self._before.dtype))
            torch._foreach_copy_(self._buffers(), self._split(settled))

    def _weight(self, momentum: float, index: int) -> float:
        """Return q of the pass number `index` (from 0)."""
        if self._accumulation == 1 or momentum == 0:
            return momentum
        return 1 / (self._accumulation / momentum - self._accumulation + index + 1)

    def _buffers(self) -> list[torch.Tensor]:
        return [norm.get_buffer(name) for norm in self._norms for name in ("running_mean", "running_var")]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(flat, [buffer.numel() for buffer in self._buffers()]))


class CountedStatistics(RunningStatistics):
    """Those of a foreign network, which may run a normalisation any number of times in a pass, or average over steps.

    The s_i of a pass is the mean over its calls, of the means and of the variances. With r_0 from before the pass, the
    k-th call leaves

        r_k = (1 - q) r_0 + q/k (s_i1 + .. + s_ik) = (1 - 1/k) r_(k-1) + (1 - q)/k r_0 + q/k s_ik

    which is BN's own update, with momentum q/k, of r_(k-1) + (1 - q)/(k - q) (r_0 - r_(k-1)). A pass without a call
    leaves r: where c of the A passes call it, q is q_1 .. q_c, and from the step's first r_0 the step moves r by
    1 - m (1 - c/A) of that, so each s_i has the weight m / A. Momentum None, the mean over all steps, is m = 1/(n + 1)
    after n steps.
    """

    def __init__(self, model: nn.Module, virtual_gpus: int, world: World) -> None:
        super().__init__(model, virtual_gpus, world)
        self._calls = self._passes = [0] * len(self._norms)  # calls in this pass; passes of the step with a call
        self._step, self._first = 0, list[torch.Tensor]()  # the statistics from before the pass
        self._is_forward = False
        self._hooks = [
            norm.register_forward_pre_hook(partial(self._weigh, number)) for number, norm in enumerate(self._norms)
        ]

    def begin_pass(self, micro_batch: int, step: int) -> None:
        if micro_batch == 0:
            self._passes = [0] * len(self._norms)
        self._calls, self._step, self._is_forward = [0] * len(self._norms), step, True
        if self._norms:
            self._first = self._split(self._before if micro_batch == 0 else torch.cat(self._buffers()))

    @contextmanager
    def kept(self) -> Iterator[None]:
        self._is_forward = False
        with super().kept():
            yield

    def start_mean(self) -> None:
        before = self._split(self._before) if self._norms else []
        for place, buffer in enumerate(self._buffers()):
            if 0 < (passes := self._passes[place // 2]) < self._accumulation:
                moved = 1 - self._momentum(place // 2) * (1 - passes / self._accumulation)
                buffer.data.copy_(before[place].lerp(buffer, moved))
        super().start_mean()

    def _weigh(self, number: int, norm: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        if not (self._is_forward and norm.training):
            return
        self._calls[number] += 1
        calls = self._calls[number]
        self._passes[number] += calls == 1
        q = self._weight(self._momentum(number), self._passes[number] - 1)
        if calls > 1:
            for name, first in zip(("running_mean", "running_var"), self._first[2 * number :], strict=False):
                # By .data, as BN's own update does: the backward pass must not take it for a change of its inputs.
                norm.get_buffer(name).data.lerp_(first, (1 - q) / (calls - q))
        norm.momentum = q / calls

    def _momentum(self, number: int) -> float:
        own = self._momenta[number]
        return 1 / (self._step + 1) if own is None else own
