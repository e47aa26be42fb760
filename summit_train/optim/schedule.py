"""The learning rate as a pure function of the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from summit_train.core.own_parts import OwnPart

LR_FLOOR = 1e-6  # DATE, section 3.4
_TRIALS = 10_000  # steps that a decay of the user's own is tried at, if there are more


def peak_learning_rate(base_lr: float, base_batch: int, global_batch: int, rule: str) -> float:
    """Return the LR at the end of the warm-up.

    linear: base_lr * global_batch / base_batch (paper, section 4.1: 0.00125 for every 8 clips); sqrt: the root of that
    factor (LEGW); none: base_lr.
    """
    factor = global_batch / base_batch
    if rule == "linear":
        return base_lr * factor
    if rule == "sqrt":
        return base_lr * math.sqrt(factor)
    assert rule == "none"
    return base_lr


def cosine(progress: float, epoch: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def polynomial(progress: float, epoch: float, power: float = 2.0) -> float:
    return math.pow(max(0.0, 1 - progress), power)


@dataclass(frozen=True)
class Schedule:
    """The course of the LR over the updates 0 .. total_steps - 1: a warm-up, then a decay.

    warmup: linear or squared. decay: cosine, linear, polynomial, steps, none, or one of the user's own
    (docs/own_parts.md). power: of polynomial. milestones: of steps, the updates from which on the LR is another
    `factor` times lower.
    """

    peak_lr: float
    total_steps: int
    warmup_steps: float
    warmup: str = "linear"
    decay: str | OwnPart = "cosine"
    power: float = 2.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    steps_per_epoch: int = 1

    def learning_rate(self, step: float) -> float:
        """Return the LR of update number `step`, counted from 0.

        Warm-up as Goyal et al., section 2.2: the first update moves already, the warm-up's last one has the peak;
        squared is the alternative in line 6 of DATE's Algorithm 1. Decay: cosine is half a cosine to 0 at total_steps;
        linear is peak * (T - i) / (T - W), i counted from 1, at least 1e-6 (DATE, section 3.4 and line 8 of Algorithm
        1, with E the epochs of the run and w the scaled warm-up); polynomial is peak * (1 - progress)^power (power 2:
        LARS).
        """
        if step + 1 <= self.warmup_steps:
            if self.warmup == "linear":
                return self.peak_lr * (step + 1) / self.warmup_steps
            assert self.warmup == "squared"
            return self.peak_lr * ((step + 1) / self.warmup_steps) ** 2
        after_warmup = max(1, self.total_steps - self.warmup_steps)
        progress = (step - self.warmup_steps) / after_warmup
        epoch = step / self.steps_per_epoch
        if isinstance(self.decay, OwnPart):
            factor = self._decay_function(progress, epoch)
            if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
                raise self.decay.wrong("a finite factor, 0 or more", f"{factor!r:.60} at epoch {epoch:g}")
            return self.peak_lr * float(factor)
        if self.decay == "none":
            return self.peak_lr
        if self.decay == "cosine":
            return self.peak_lr * cosine(progress, epoch)
        if self.decay == "linear":
            left = (self.total_steps - step - 1) / after_warmup
            return max(self.peak_lr * left, min(LR_FLOOR, self.peak_lr))
        if self.decay == "polynomial":
            return self.peak_lr * polynomial(progress, epoch, self.power)
        assert self.decay == "steps"
        return float(self.peak_lr * self.factor ** sum(step >= milestone for milestone in self.milestones))

    @cached_property
    def _decay_function(self) -> Callable[..., Any]:
        assert isinstance(self.decay, OwnPart)
        return self.decay.make("progress", "epoch")

    def check(self) -> str | None:
        """Try a decay of the user's own; return a digest of its LRs, which all ranks must share, or None.

        Raises UserError where it depends on more than its input, or does not return an LR.
        """
        if not isinstance(self.decay, OwnPart):
            return None
        steps = [*range(0, self.total_steps, max(1, self.total_steps // _TRIALS)), self.total_steps - 1]
        rates = [f"{self.learning_rate(step):.9e}" for step in steps]  # libraries of other nodes may round otherwise
        if rates != [f"{self.learning_rate(step):.9e}" for step in reversed(steps)][::-1]:
            right = "draw nothing, and keep no state between calls"
            raise self.decay.wrong("the same for the same input", f"other factors; {right}")
        return hashlib.sha256(" ".join(rates).encode()).hexdigest()
