"""The records of a run's files: each line of metrics.jsonl and each JSON file, checked.

Units: losses in nats, learning rates as the optimizer gets them, accuracies in percent, times in seconds, throughput in
clips per second over all ranks. `step_s` is the whole step, including the wait for data.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict


def number(value: object) -> float | None:
    """Return the value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


Known = Annotated[float | None, BeforeValidator(number)]


class Record(BaseModel):
    """A JSON object of a run. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True)


RecordType = TypeVar("RecordType", bound=Record)


class StepRecord(Record):
    """One update. step: finished updates, from 1. epoch: from 0. top1: of the training batch.

    bad_clips: unreadable clips that the run has replaced so far. noise_scale: clips, averaged up to this step, where it
    is measured and clear; gradient_variance, gradient_square: tr(Sigma) and |G|^2 of this step alone.
    """

    step: int
    epoch: int
    loss: float = math.nan
    lr: float = math.nan
    clips_per_second: float = math.nan
    step_s: float = math.nan
    data_wait_s: float = math.nan
    top1: Known = None
    skipped: bool = False
    bad_clips: int = 0
    noise_scale: Known = None
    gradient_variance: Known = None
    gradient_square: Known = None


class EvalRecord(Record):
    """One validation during training, after `epoch` finished epochs."""

    epoch: float
    step: int
    top1: float
    top5: Known = None
    videos: int | None = None
    clips: int | None = None
    seconds: Known = None


class TrustRatioRecord(Record):
    """The trust ratio of each parameter in one update."""

    step: int
    ratios: dict[str, float]


class AverageRecord(Record):
    """An average of all learners' networks after `step`: its seconds, and the bytes that a rank gave to it."""

    step: int
    seconds: float
    bytes: int


class BatchRecord(Record):
    """A decision on the batch after `epoch` finished epochs: the batch from then on, the accuracy, the best before."""

    epoch: int
    clips_per_gpu: int
    global_batch: int
    accuracy: float
    best: float


class StartRecord(Record):
    """A start (step 0) or a resume (step > 0). steps_again: updates of the process before that are done again."""

    step: int
    ranks: int | None = None
    time: float | str | None = None
    steps_again: int = 0


class CheckpointRecord(Record):
    """A checkpoint after `step` updates, written in `seconds`."""

    step: int
    seconds: float


class CheckpointScore(Record):
    """The accuracy of one checkpoint in the final evaluation."""

    path: str
    step: int | None = None
    top1: float
    top5: Known = None


class CheckpointScores(Record):
    """The accuracies of the last checkpoints, with mean and standard deviation."""

    top1_mean: float
    top1_std: Known = None
    top5_mean: Known = None
    top5_std: Known = None
    checkpoints: tuple[CheckpointScore, ...] = ()


class FinalEval(CheckpointScores):
    """eval.json. mode: clips, or stream: of all frames. ema: of the averages of the weights."""

    videos: int | None = None
    mode: str = "clips"
    clips: int | None = None
    crops: int | str | None = None
    ema: CheckpointScores | None = None


class ObservedPoint(Record):
    """Accuracies when this fraction of each video is seen."""

    fraction: float
    top1: float
    top5: Known = None


class Observed(Record):
    """observed.json: early recognition. observed: by a clip of `frames` frames. anytime: by a stream, where it can."""

    name: str
    frames: int | None = None
    videos: int | None = None
    crops: int | str | None = None
    observed: tuple[ObservedPoint, ...]
    anytime: tuple[ObservedPoint, ...] = ()


class ClipsPerClass(Record):
    """Class name -> number of clips, of the training and the validation set."""

    train: dict[str, int]
    val: dict[str, int]

    def sides(self) -> dict[str, dict[str, int]]:
        """Return 'training' and 'validation' -> the number of clips of every class of either."""
        names = dict.fromkeys((*self.train, *self.val))
        sides = {"training": self.train, "validation": self.val}
        return {side: {name: counts.get(name, 0) for name in names} for side, counts in sides.items()}
