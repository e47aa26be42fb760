"""The batch that grows where accuracy stops to (Cong et al., "Accelerating ... on a Cluster of GPUs", Algorithm 1).

Lines 13 to 21, with a the accuracy of the averaged network, a* the best so far, 0 at first, and B a learner's batch:

    if a < a* margin: B <- min(B factor, largest)        if a > a*: a* <- a

The comparison is strict, and the first decision never grows the batch. The learning rate stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from summit_train.plan import Rung
from summit_train.spec.optimizer import GrowBatchSpec


@dataclass(frozen=True)
class Decision:
    """One decision: the best accuracy before it, in percent, and the batch before and after."""

    best: float
    before: Rung
    after: Rung

    def __str__(self) -> str:
        before, after = self.before.clips_per_gpu, self.after
        if after == self.before:
            return f"batch of a learner stays at {before} clips"
        sizes = f"from {before} clips to {after.clips_per_gpu}"
        return f"batch of a learner grows {sizes}, {after.steps_per_epoch} steps an epoch"


class GrowingBatch:
    """The current batch, and what decides the next one. It is the same on all ranks, and part of a checkpoint.

    spec: None where the batch never grows. ladder: the batches, the first one first.
    """

    def __init__(self, spec: GrowBatchSpec | None, ladder: Sequence[Rung]) -> None:
        self._spec, self._ladder = spec, ladder
        self._place, self._best, self._validations = 0, 0.0, 0

    @property
    def rung(self) -> Rung:
        return self._ladder[self._place]

    def lacks(self, validations: int) -> bool:
        """Return whether the batch depends on this many validations, and one is still to come."""
        return self._spec is not None and self._validations < validations

    def decide(self, accuracy: float) -> Decision | None:
        """Take in a validation's accuracy; return the decision, None where the next one is not due."""
        self._validations += 1
        if self._spec is None or self._validations % self._spec.every:
            return None
        before, best = self.rung, self._best
        if accuracy < best * self._spec.margin:
            self._place = min(self._place + 1, len(self._ladder) - 1)
        self._best = max(best, accuracy)
        return Decision(best, before, self.rung)

    def state_dict(self) -> dict[str, Any]:
        return {"clips_per_gpu": self.rung.clips_per_gpu, "best": self._best, "validations": self._validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        reached = sum(rung.clips_per_gpu <= state["clips_per_gpu"] for rung in self._ladder)
        self._place, self._best, self._validations = max(0, reached - 1), state["best"], state["validations"]
