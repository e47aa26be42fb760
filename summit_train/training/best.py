"""The best validation of a run so far: its checkpoint is kept (checkpoint.keep_best), and the run may end after it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from summit_train.core.checkpoints import best_path, checkpoint_path
from summit_train.core.files import write_json
from summit_train.spec import Spec, own_parts
from summit_train.spec.optimizer import EarlyStopSpec, FreezeSpec


class Best:
    """The step and the value of the best validation by the spec's measure; of equal ones the first.

    It is part of each checkpoint, so a resumed run knows the best until then. best.json is for other commands.

    part: its name in a checkpoint. Another measure, also one of the user's own with other options or another file, has
    another name, and so begins with none. is_new: by a measure of the user's own that the checkpoint does not know.
    """

    def __init__(self, spec: Spec) -> None:
        self._run_path, self._measure, own = spec.run_path, spec.checkpoint.keep_best, spec.evaluate.own_names
        self.is_new, self.part = self._measure in own, f"best_{self._measure}"
        if self._measure in own:
            measure = own_parts(spec, "evaluate")[own.index(self._measure)]
            what = json.dumps([Path(measure.name).name, measure.options, measure.digest], sort_keys=True)
            self.part += f"_{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        self._step, self._value = 0, -math.inf

    @property
    def checkpoint(self) -> Path | None:
        return checkpoint_path(self._run_path, self._step) if self._step else None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the best of a checkpoint, unless it was deleted for a better one, which then must be damaged."""
        self.is_new = False
        if checkpoint_path(self._run_path, int(state["step"])).exists():
            self._step, self._value = int(state["step"]), float(state["value"])

    def update(self, step: int, measures: Mapping[str, Any]) -> bool:
        """Take in the validation after `step`; return whether it is the best so far."""
        value = measures.get(str(self._measure))
        if value is None or not value > self._value:  # nor NaN
            return False
        self._step, self._value = step, value
        return True

    def write(self) -> None:
        """Write best.json, or delete that of an earlier line or start of the run."""
        path = best_path(self._run_path)
        if self._step:
            write_json(path, {"step": self._step, "measure": self._measure, "value": self._value})
        else:
            path.unlink(missing_ok=True)


class EarlyStop:
    """Whether the last validation came too long after the best one (schedule.early_stop). The same on all ranks.

    It is part of each checkpoint; that of a validated epoch is from before its validation. spec: None where no run
    stops early. freeze: the frozen parts; the epochs count from when the last of them that is to be trained is.
    """

    def __init__(self, spec: EarlyStopSpec | None, freeze: Sequence[FreezeSpec] = ()) -> None:
        self._begins = max((part.until_epoch or 0 for part in freeze), default=0)
        self._spec, self._epoch, self.best_epoch, self._score = spec, 0, 0, -math.inf
        self._sign = -1 if spec is not None and spec.measure == "val_loss" else 1

    @property
    def is_reached(self) -> bool:
        if self._spec is None or not self.best_epoch:  # nothing is worse than a value that is not known
            return False
        return self._epoch - max(self.best_epoch, self._begins) >= self._spec.epochs

    @property
    def best(self) -> float:
        """The measure of the best validation; infinite before the first one that is known."""
        return self._sign * self._score

    def update(self, epoch: int, value: float | None) -> None:
        """Take in the measure after `epoch` finished epochs. An unknown or equal one does not count as better."""
        self._epoch = epoch
        if value is not None and self._sign * value > self._score:  # nor NaN
            self.best_epoch, self._score = epoch, self._sign * value

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "best_epoch": self.best_epoch, "score": self._score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self.best_epoch, self._score = state["epoch"], state["best_epoch"], state["score"]
