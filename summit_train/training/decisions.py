"""Decide by validations: which checkpoint is the best, when training ends, and how large a learner's batch is."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from summit_train.core.files import write_json
from summit_train.core.run_folder import best_path, checkpoint_path
from summit_train.plan import BatchSize
from summit_train.spec import MAIN_MEASURES, Spec, own_parts

Values = Mapping[str, Any]  # of the measures of a validation, by name; None where one is unknown


@dataclass(frozen=True)
class GrowthDecision:
    """A decision on a learner's batch: what it was, and what it is from here on.

    accuracy: of this validation. best: the highest one before it. In percent.
    """

    before: BatchSize
    after: BatchSize
    accuracy: float
    best: float


@dataclass(frozen=True)
class Decided:
    """Decisions of one validation. growth: None if no decision was due, or the accuracy is unknown."""

    is_best: bool
    stops: bool = False
    growth: GrowthDecision | None = None


class Decisions:
    """The decisions of a run so far: equal on all ranks, and part of each checkpoint.

    The checkpoint of a validated epoch is saved before that validation; a run that resumes calls `update` for it again.

    **The best checkpoint** (checkpoint.keep_best) is the one with the highest value, the first of equal ones. It is
    saved under the measure's name, so a change of measure starts over; so does a change to the options or the file of a
    measure of the user's own.

    **The end** (schedule.early_stop) comes when the last validation is too many epochs after the best one. Epochs in
    which optimizer.freeze still holds a part that is to be trained do not count, nor do those before the first known
    value.

    **The batch** (parallel.grow_batch) grows when accuracy stops rising (AAVG, Algorithm 1, lines 13 to 21). Let a be
    the accuracy, a* the highest accuracy so far (0 at first) and B a learner's batch:

        if a < a* margin: B <- min(B factor, largest)        if a > a*: a* <- a

    The comparison is strict, and the first decision never grows the batch. The learning rate stays.

    best_step: 0 without a best checkpoint. stop_best_epoch: the epoch of the best validation, 0 if no value is
    known. line: the step at which the run's line of checkpoints begins; the checkpoint of that step belongs to the
    previous line, so it is not the best of this one. own_measures: a digest of each measure of the user's own, by name.
    """

    def __init__(self, spec: Spec, ladder: Sequence[BatchSize]) -> None:
        """ladder: the batches, the first one first."""
        self._spec = spec
        self._ladder = ladder
        self.line = 0
        self.own_measures = _own_measures(spec)
        self._best_measure = spec.checkpoint.keep_best
        digest = self.own_measures.get(str(self._best_measure))
        self._best_name = f"best_{self._best_measure}" if digest is None else f"best_{self._best_measure}_{digest}"
        self.best_step = 0
        self.best_value = -math.inf
        self._stop = spec.schedule.early_stop
        self._stop_sign = -1 if self._stop is not None and self._stop.measure == "val_loss" else 1
        self._stop_from = max((part.until_epoch or 0 for part in spec.optimizer.freeze), default=0)
        self._stop_score = -math.inf  # the higher the better
        self.stop_best_epoch = 0
        self._last_validated = 0  # after which the last validation was
        self._grown = 0  # times that the batch has grown
        self._highest_accuracy = 0.0
        self._validations = 0  # that the batch has taken in

    @property
    def is_stop_reached(self) -> bool:
        """Compare the epochs without improvement with schedule.early_stop.epochs: True where training ends here."""
        if self._stop is None or self.stop_best_epoch == 0:
            return False
        return self._last_validated - max(self.stop_best_epoch, self._stop_from) >= self._stop.epochs

    @property
    def stop_best_value(self) -> float:
        """The measure of early_stop in its best validation."""
        return self._stop_sign * self._stop_score

    @property
    def batch_size(self) -> BatchSize:
        """The current batch."""
        return self._ladder[self._grown]

    @property
    def best_checkpoint(self) -> Path | None:
        return checkpoint_path(self._spec.run_path, self.best_step) if self.best_step else None

    def update(self, epoch: int, step: int, measures: Values) -> Decided:
        """Decide by the validation after `epoch` epochs and `step` updates; repeating it changes nothing.

        After the last epoch only the best checkpoint is left to decide.
        """
        is_best = self._is_new_best(step, measures)
        if is_best:
            self.best_step = step
            self.best_value = measures[str(self._best_measure)]
        if epoch == self._spec.schedule.epochs:
            return Decided(is_best)
        if self._stop is not None:
            self._last_validated = epoch
            value = measures.get(self._stop.measure)
            if value is not None and self._stop_sign * value > self._stop_score:
                self.stop_best_epoch = epoch
                self._stop_score = self._stop_sign * value
        growth = self._grow(epoch, measures.get(MAIN_MEASURES[self._spec.loss.base]))
        return Decided(is_best, self.is_stop_reached, growth)

    def _is_new_best(self, step: int, measures: Values) -> bool:
        value = None if self._best_measure is None else measures.get(self._best_measure)
        return value is not None and value > self.best_value and step > self.line  # NaN is not above any

    def _grow(self, epoch: int, accuracy: float | None) -> GrowthDecision | None:
        grow = self._spec.parallel.grow_batch
        if grow is None or self._validations >= epoch // self._spec.evaluate.every_epochs:
            return None
        self._validations += 1
        if accuracy is None or self._validations % grow.every:
            return None
        before = self.batch_size
        best = self._highest_accuracy
        if accuracy < best * grow.margin:
            self._grown = min(self._grown + 1, len(self._ladder) - 1)
        self._highest_accuracy = max(best, accuracy)
        return GrowthDecision(before, self.batch_size, accuracy, best)

    def state_dict(self) -> dict[str, Any]:
        """Return the parts of a checkpoint, by their names there."""
        batch = {"clips_per_gpu": self.batch_size.clips_per_gpu, "best": self._highest_accuracy}
        parts: dict[str, Any] = {
            "line": self.line,
            "growth": batch | {"validations": self._validations},
            "early_stop": {
                "epoch": self._last_validated,
                "best_epoch": self.stop_best_epoch,
                "score": self._stop_score,
            },
        }
        if self._spec.checkpoint.keep_best is not None:
            parts[self._best_name] = {"step": self.best_step, "value": self.best_value}
        return parts

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over the parts of a checkpoint that it has."""
        self.line = int(saved.get("line", 0))
        if growth := saved.get("growth"):
            reached = sum(size.clips_per_gpu <= growth["clips_per_gpu"] for size in self._ladder)
            self._grown = max(0, reached - 1)
            self._highest_accuracy = growth["best"]
            self._validations = growth["validations"]
        if stop := saved.get("early_stop"):
            self._last_validated = stop["epoch"]
            self.stop_best_epoch = stop["best_epoch"]
            self._stop_score = stop["score"]
        if best := saved.get(self._best_name):
            self.best_step = int(best["step"])
            self.best_value = float(best["value"])

    def forget_best(self) -> None:
        """Forget the best checkpoint, so that the next validation sets a new one."""
        self.best_step = 0
        self.best_value = -math.inf

    def write_best(self) -> None:
        """Write best.json, for other commands, or delete that of an earlier line or start of the run."""
        path = best_path(self._spec.run_path)
        if self.best_step:
            write_json(path, {"step": self.best_step, "measure": self._best_measure, "value": self.best_value})
        else:
            path.unlink(missing_ok=True)


def _own_measures(spec: Spec) -> dict[str, str]:
    """Return a digest of the options and the file of each measure of the user's own, by its name."""
    digests = {}
    for name, part in zip(spec.evaluate.own_names, own_parts(spec, "evaluate"), strict=True):
        content = json.dumps([Path(part.name).name, part.options, part.digest], sort_keys=True)
        digests[name] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return digests
