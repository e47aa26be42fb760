"""The lines of metrics.jsonl, checked: each kind of record.

Units: losses in nats, learning rates as the optimizer gets them, accuracies in percent, times in seconds, throughput in
clips per second over all ranks. `step_s` is the whole step, including the wait for data.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass


def number(value: object) -> float | None:
    """Return the value as a finite float, or None."""
    if type(value) is float:  # nearly all are; asked first, as a long run has millions
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # an int may be larger than every float


Known = Annotated[float | None, BeforeValidator(number)]


class Record(BaseModel):
    """A JSON object of a run. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True)


class WithMeasures(Record):
    """A record with measures (evaluation.measures) under their keys."""

    model_config = ConfigDict(extra="allow")

    def of(self, key: str) -> float | None:
        return number((self.model_extra or {}).get(key))


class LogRecord(Record):
    """A line of metrics.jsonl. time: when it was written, in seconds since 1970."""

    time: float | str | None = None


@dataclass(frozen=True, slots=True)  # a fifth of the memory of a model: a run may have 500,000
class StepRecord:
    """One update. time: as of a LogRecord. step: finished updates, from 1. epoch: from 0. top1: of the training batch.

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
    bad_clips: int | None = None
    noise_scale: Known = None
    gradient_variance: Known = None
    gradient_square: Known = None
    time: float | str | None = None


class EvalRecord(WithMeasures, LogRecord):
    """One validation during training, after `epoch` finished epochs. classes: the main measure of each."""

    epoch: float
    step: int
    val_loss: Known = None
    classes: tuple[Known, ...] = ()
    videos: int | None = None
    clips: int | None = None
    seconds: Known = None


class WarningRecord(LogRecord):
    """What training found wrong after `step`."""

    step: int
    text: str


class TrustRatioRecord(LogRecord):
    """The trust ratio of each parameter in one update."""

    step: int
    ratios: dict[str, float]


class AverageRecord(LogRecord):
    """An average of all learners' networks after `step`. bytes: what a rank gave to it."""

    step: int
    seconds: float
    bytes: int


class BatchRecord(LogRecord):
    """A decision on the batch after `epoch` finished epochs: the batch from then on, the accuracy, the best before."""

    epoch: int
    clips_per_gpu: int
    global_batch: int
    accuracy: float
    best: float


class StartRecord(LogRecord):
    """A start (step 0) or a resume (step > 0). startup_s: of the process until then.

    steps_again: updates of the process before that are done again. forced: by which keys it is another experiment, in
    older runs. job: what all starts by one job script have in common; None outside.
    """

    step: int
    job: str | None = None
    ranks: int | None = None
    startup_s: Known = None
    steps_again: int = 0
    forced: tuple[str, ...] = ()


class MoreEpochsRecord(LogRecord):
    """A run that continues after `step` updates to more epochs than its schedule had."""

    step: int
    before: int = Field(alias="from")
    after: int = Field(alias="to")


class EarlyStopRecord(LogRecord):
    """The end of a run after `epoch` epochs, `step` updates: its validations were no better than after best_epoch."""

    epoch: int
    step: int
    measure: str
    best: Known = None
    best_epoch: int


class CheckpointRecord(LogRecord):
    """A checkpoint after `step` updates, for which the steps waited `seconds`."""

    step: int
    seconds: float


class RankTimesRecord(LogRecord):
    """Each rank's own seconds for a micro-batch, means over the steps of a window, which ends with `step`."""

    step: int
    compute_s: tuple[float, ...] = Field(min_length=1)
    data_wait_s: tuple[float, ...] = Field(min_length=1)


class SlowRankRecord(LogRecord):
    """A rank that was named as slow after `step`. part: compute or data_wait, whichever is most of the excess."""

    step: int
    rank: int
    host: str
    part: str


KINDS: dict[str, TypeAdapter[Any]] = {
    "step": TypeAdapter(StepRecord),
    "eval": TypeAdapter(EvalRecord),
    "warning": TypeAdapter(WarningRecord),
    "trust_ratio": TypeAdapter(TrustRatioRecord),
    "average": TypeAdapter(AverageRecord),
    "batch": TypeAdapter(BatchRecord),
    "checkpoint": TypeAdapter(CheckpointRecord),
    "early_stop": TypeAdapter(EarlyStopRecord),
    "start": TypeAdapter(StartRecord),
    "rank_times": TypeAdapter(RankTimesRecord),
    "slow_rank": TypeAdapter(SlowRankRecord),
    "more_epochs": TypeAdapter(MoreEpochsRecord),
}
