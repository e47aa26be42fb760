"""The vote after a step: what each rank brings to it, and what all ranks decide by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from summit_train.optim.trust import Ratios
from summit_train.training.noise import Squares
from summit_train.training.timer import Mark


class Requests(NamedTuple):
    """A rank's part in the vote besides its numbers: requests to stop or to save, and its wait for data."""

    stop: bool = False
    checkpoint: bool = False
    data_wait_s: float = 0.0


NO_REQUESTS = Requests()
# A vote is read a step later, so two can be in flight, and Horovod matches messages by name.
VOTES = ("votes.0", "votes.1")


class VoteRow(NamedTuple):
    """The row of numbers that each rank brings to the vote of a step, and the sum of all ranks' rows; see Vote.

    pass_squares, mean_square: squared gradient norms, unscaled: the sum of the passes', NaN where unmeasured, and that
    of their mean.
    """

    loss: Any = 0.0
    correct: Any = 0.0
    skipped: Any = 0.0
    broken: Any = 0.0
    pass_squares: Any = 0.0
    mean_square: Any = 0.0
    bad_clips: Any = 0
    stop: Any = False
    checkpoint: Any = False
    data_wait_s: Any = 0.0

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the row in double precision on `device`."""
        # full() launches a kernel; tensor() would copy and wait.
        tensors = [x if isinstance(x, torch.Tensor) else torch.full((), x, device=device) for x in self]
        return torch.stack([tensor.double() for tensor in tensors])


@dataclass(frozen=True)
class Vote:
    """Numbers by which all ranks decide after a step, the same on each.

    loss: mean over the global batch. top1: `num_correct` of the training batch, in percent. skipped: the gradient
    was not finite and no weight changed. broken: a loss or the gradient was not, and no loss scale explains it.
    data_wait_s: mean over the ranks, in seconds. squares: of the gradients, where the step measured them and was not
    skipped.
    """

    loss: float
    top1: float
    skipped: bool
    broken: bool
    stop: bool
    checkpoint: bool
    data_wait_s: float
    bad_clips: int
    squares: Squares | None


@dataclass(frozen=True)
class Averaging:
    """An average of all learners' networks: when it began and ended, and the bytes that a rank gave to it."""

    start: Mark
    end: Mark
    num_bytes: int


@dataclass
class StepResult:
    """The sums of all VoteRows, on the device and valid once `wait` returns, and this rank's own loss.

    ratios: the layers' trust ratios, if there are any. averaging: of the networks, where the step ended with one.
    """

    votes: torch.Tensor
    local_loss: torch.Tensor
    ratios: Ratios | None
    wait: Callable[[], None]
    averaging: Averaging | None = None

    def read(self, global_batch: int, virtual_gpus: int, ranks: int) -> Vote:
        """Wait for the vote that the step began, and return it. Collective."""
        self.wait()
        sums = VoteRow(*self.votes.tolist())
        skipped = sums.skipped > 0
        squares = None
        if not skipped and math.isfinite(sums.pass_squares):
            squares = Squares(sums.pass_squares / virtual_gpus, sums.mean_square / ranks)
        return Vote(
            loss=sums.loss / virtual_gpus,
            top1=100 * sums.correct / global_batch,
            skipped=skipped,
            broken=sums.broken > 0,
            stop=sums.stop > 0,
            checkpoint=sums.checkpoint > 0,
            data_wait_s=sums.data_wait_s / ranks,
            bad_clips=round(sums.bad_clips),
            squares=squares,
        )
