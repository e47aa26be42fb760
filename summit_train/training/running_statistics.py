"""BN's running statistics: those of a step are the mean over all virtual GPUs, however often a network runs a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.core.comm import World
from summit_train.models.video import norm_momentum, trained_norms


class RunningStatistics:
    """Average the micro-batches' statistics of one step over all virtual GPUs.

    One step of V virtual GPUs with micro-batch statistics s_1 .. s_V, and momentum m, is defined as

        r <- r_0 + m / V * sum_i (s_i - r_0)

    Within a step the norms have momentum 1, so that after a call their buffers hold the statistics of its input. It is
    one value for all passes, so torch.compile compiles a network once. s_i is the mean over a norm's calls in pass i,
    of the means and of the variances; a pass without a call adds nothing. Momentum None, the mean over all steps, is
    m = 1 / (n + 1) after n steps.

    The ranks add up in every step, hidden under the backward pass (for a ResNet-50 0.2 MB beside 97 MB of gradients).
    Only before a checkpoint, it would make a run that was stopped differ in the last bits from one that was not.
    """

    def __init__(self, model: nn.Module, virtual_gpus: int, world: World) -> None:
        self._norms = trained_norms(model)
        self._virtual_gpus = virtual_gpus
        self._world = world
        self._momenta = [norm.momentum for norm in self._norms]
        self._before = torch.empty(0)  # the buffers at the step's begin
        self._moved = torch.empty(0)  # the sum over the passes of what each added to them
        self._wait: Callable[[], None] = lambda: None
        # A foreign network may run a norm any number of times in a pass: hooks, which torch.compile would not see in
        # the others, note each call.
        self._calls: list[list[torch.Tensor]] = [[] for _ in self._norms]
        self._hooks = []
        if not getattr(model, "replaceable", True):
            pairs = zip(self._norms, self._calls, strict=True)
            self._hooks = [norm.register_forward_hook(partial(_note, calls)) for norm, calls in pairs]

    def close(self) -> None:
        """Leave the normalisations to others of which more are trained."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        if self._norms:
            self._before = torch.cat(self._buffers())  # a step that is skipped must leave them as they were
            self._moved = torch.zeros_like(self._before)
            for norm in self._norms:
                norm.momentum = 1.0
            for calls in self._calls:
                calls.clear()  # of a norm whose momentum is 1, outside of a step

    def end_pass(self) -> None:
        """Take in what the norms have seen in a forward pass."""
        if not self._norms:
            return
        if not self._hooks:
            self._moved += torch.cat(self._buffers()) - self._before
            return
        for moved, before, calls in zip(
            self._by_norm(self._moved), self._by_norm(self._before), self._calls, strict=True
        ):
            if calls:
                moved += torch.stack(calls).mean(0) - before
            calls.clear()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the statistics as they are in the block: a backward pass that runs norms again sees no new batch."""
        with norm_momentum(self._norms, 0.0):
            yield

    def start_mean(self) -> None:
        """Begin to add up the ranks' sums; the last pass has ended."""
        if self._norms:
            self._wait = self._world.start_total(self._moved, "batch_norm")

    def finish(self, skipped: torch.Tensor, step: int) -> None:
        """Put the average in place or, if `skipped` is 1, the statistics from before step number `step`, from 0."""
        if not self._norms:
            return
        self._wait()
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            norm.momentum = momentum
        momenta = [1 / (step + 1) if momentum is None else momentum for momentum in self._momenta]
        torch._foreach_mul_(self._by_norm(self._moved), [momentum / self._virtual_gpus for momentum in momenta])
        settled = torch.where(skipped > 0, self._before, self._before + self._moved)
        sizes = [buffer.numel() for buffer in self._buffers()]
        torch._foreach_copy_(self._buffers(), list(torch.split(settled, sizes)))

    def _buffers(self) -> list[torch.Tensor]:
        return [norm.get_buffer(name) for norm in self._norms for name in ("running_mean", "running_var")]

    def _by_norm(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the views of each norm's mean and variance, one behind the other."""
        return torch.split(flat, [2 * norm.num_features for norm in self._norms])


def _note(calls: list[torch.Tensor], norm: _BatchNorm, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    if norm.training and norm.momentum == 1.0:  # in a step's forward pass
        calls.append(torch.cat([norm.get_buffer("running_mean"), norm.get_buffer("running_var")]))
