"""The best validation of a run so far, whose checkpoint is kept beyond checkpoint.keep (checkpoint.keep_best)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from summit_train.core.files import write_json
from summit_train.core.saved import best_path, checkpoint_path
from summit_train.spec import Spec


class Best:
    """The step and the value of the best validation by the spec's measure; of equal ones the first.

    It is part of each checkpoint, so a resumed run knows the best until then. best.json is for other commands.
    """

    def __init__(self, spec: Spec) -> None:
        self._run_path, self._measure = spec.run_path, spec.checkpoint.keep_best
        self._step, self._value = 0, -math.inf

    @property
    def part(self) -> str:
        """The name of its part of a checkpoint. Another measure has another part, and so begins with none."""
        return f"best_{self._measure}"

    @property
    def checkpoint(self) -> Path | None:
        return checkpoint_path(self._run_path, self._step) if self._step else None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the best of a checkpoint, unless it was deleted for a better one, which then must be damaged."""
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
