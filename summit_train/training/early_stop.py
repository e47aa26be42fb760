"""End a run whose validations no longer improve (schedule.early_stop)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from summit_train.spec.optimizer import EarlyStopSpec


class EarlyStop:
    """The best validation so far, and whether the last one came too long after it. The same on all ranks.

    It is part of each checkpoint; that of a validated epoch is from before its validation. spec: None where no run
    stops early.
    """

    def __init__(self, spec: EarlyStopSpec | None) -> None:
        self._spec, self._epoch, self.best_epoch, self._score = spec, 0, 0, -math.inf

    @property
    def is_reached(self) -> bool:
        return self._spec is not None and self._epoch - self.best_epoch >= self._spec.epochs

    @property
    def best(self) -> float:
        """The measure of the best validation; infinite before the first one that is known."""
        return self._sign * self._score

    def update(self, epoch: int, value: float | None) -> None:
        """Take in the measure after `epoch` finished epochs. One that is unknown or only equal is no improvement."""
        self._epoch = epoch
        if value is not None and self._sign * value > self._score:  # nor NaN
            self.best_epoch, self._score = epoch, self._sign * value

    @property
    def _sign(self) -> int:
        return -1 if self._spec is not None and self._spec.measure == "val_loss" else 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "best_epoch": self.best_epoch, "score": self._score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self.best_epoch, self._score = state["epoch"], state["best_epoch"], state["score"]
