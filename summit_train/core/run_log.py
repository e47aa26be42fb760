"""The records of a run's log, metrics.jsonl: what each kind has, how a line is written, and what a whole log says.

Units: losses in nats, learning rates as the optimizer gets them, accuracies in percent, times in seconds, throughput in
clips per second over all ranks. `step_s` is the whole step, including the wait for data.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from summit_train.core.files import regular
from summit_train.core.text import from_json, without_nan

METRICS_FILE = "metrics.jsonl"


def number(value: object) -> float | None:
    """Return the value as a finite float, or None."""
    if type(value) is float:  # nearly all are; checked first, as a long run has millions
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # an int may be larger than every float


def sparse(default: Any = None) -> Any:
    """Return a field that a line lacks where it has its default."""
    return field(default=default, metadata={"is_sparse": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of the log. time: when it was written, in seconds since 1970.

    kind: its name there. aside: the numbers that TensorBoard does not draw.
    """

    kind: ClassVar[str]
    aside: ClassVar[Sequence[str]] = ()
    time: float | str | None = None

    def numbers(self) -> dict[str, float]:
        """Return the finite numbers of the line by their names, those of a mapping last, without its step and time."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("step", "time")}
        for inner in [value for value in values.values() if isinstance(value, Mapping)]:
            values |= inner
        return {name: known for name, value in values.items() if (known := number(value)) is not None}

    def scalars(self) -> dict[str, float]:
        """Return the numbers for TensorBoard."""
        return {name: value for name, value in self.numbers().items() if name not in self.aside}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """One update. step: finished updates, from 1. epoch: from 0. top1: of the training batch.

    skipped: the gradient was not finite. bad_clips: unreadable clips that the run has replaced so far. noise_scale:
    clips, averaged up to this step, where it is measured and clear; gradient_variance, gradient_square: tr(Sigma) and
    |G|^2 of this step alone.
    """

    kind: ClassVar[str] = "step"
    aside: ClassVar[Sequence[str]] = ("epoch", "bad_clips", "gradient_variance", "gradient_square")
    step: int
    epoch: int
    loss: float = math.nan
    lr: float = math.nan
    clips_per_second: float = math.nan
    step_s: float = math.nan
    data_wait_s: float = math.nan
    top1: float | None = None
    skipped: bool = False
    bad_clips: int | None = None
    noise_scale: float | None = sparse()
    gradient_variance: float | None = sparse()
    gradient_square: float | None = sparse()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord(Record):
    """One validation during training, after `epoch` finished epochs.

    measures: by their keys (evaluation.measures), which are keys of the line. classes: the main measure of each.
    """

    kind: ClassVar[str] = "eval"
    aside: ClassVar[Sequence[str]] = ("epoch", "videos", "clips", "seconds")
    epoch: float
    step: int
    measures: Mapping[str, float | None] = field(default_factory=dict)
    val_loss: float | None = None
    classes: tuple[float | None, ...] = ()
    videos: int | None = None
    clips: int | None = None
    seconds: float | None = None

    def of(self, key: str) -> float | None:
        """Return a measure; None where it is unknown."""
        return self.measures.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningRecord(Record):
    """A warning of training after `step`."""

    kind: ClassVar[str] = "warning"
    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRatioRecord(Record):
    """The trust ratio of each parameter in one update."""

    kind: ClassVar[str] = "trust_ratio"
    step: int
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageRecord(Record):
    """An average of all learners' networks after `step`. bytes: what a rank gave to it."""

    kind: ClassVar[str] = "average"
    step: int
    epoch: int | None = None
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord(Record):
    """A decision on the batch after `epoch` finished epochs: the batch from then on, the accuracy, the best before."""

    kind: ClassVar[str] = "batch"
    epoch: int
    clips_per_gpu: int
    global_batch: int
    accuracy: float
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord(Record):
    """A start of the ranks at `step`. startup_s: from the first process until then.

    job: what all starts by one job script have in common; None outside. forced: by which keys it is another experiment,
    in older runs. steps_again: updates of the process before that are done again; counted by Replay.
    """

    kind: ClassVar[str] = "start"
    step: int
    ranks: int | None = None
    startup_s: float | None = None
    job: str | None = None
    forced: tuple[str, ...] = sparse(())
    steps_again: int = sparse(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreEpochsRecord(Record):
    """A run that continues after `step` updates to more epochs than its schedule had."""

    kind: ClassVar[str] = "more_epochs"
    before: int = field(metadata={"key": "from"})
    after: int = field(metadata={"key": "to"})
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopRecord(Record):
    """The end of a run after `epoch` epochs, `step` updates: its validations were no better than after best_epoch."""

    kind: ClassVar[str] = "early_stop"
    epoch: int
    step: int
    measure: str
    best: float | None = None
    best_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint after `step` updates, for which the steps waited `seconds`."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimesRecord(Record):
    """Each rank's seconds for a micro-batch without its waits for others, means over the steps of a window.

    The window ends with `step`.
    """

    kind: ClassVar[str] = "rank_times"
    step: int
    compute_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankRecord(Record):
    """A rank that was named as slow after `step`. part: compute or data_wait, whichever is most of the excess.

    seconds, median_s: of this rank and of the median one, for a micro-batch.
    """

    kind: ClassVar[str] = "slow_rank"
    step: int
    host: str
    rank: int
    part: str
    seconds: float | None = None
    median_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLostRecord(Record):
    """A line for people could not be printed; the run continues."""

    kind: ClassVar[str] = "log_lost"
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord(Record):
    """The run is trained, evaluated and reported."""

    kind: ClassVar[str] = "done"


KINDS = {
    record.kind: record
    for record in (
        StepRecord, EvalRecord, WarningRecord, TrustRatioRecord, AverageRecord, BatchRecord, StartRecord,
        MoreEpochsRecord, EarlyStopRecord, CheckpointRecord, RankTimesRecord, SlowRankRecord, LogLostRecord, DoneRecord,
    )
}  # fmt: skip


def line_of(record: Record) -> bytes:
    """Return a record as a line of the log; a number that is not finite becomes null, as JSON has no NaN."""
    line: dict[str, Any] = {"kind": record.kind}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name == "measures":
            line |= value
        elif not (each.metadata.get("is_sparse") and value == each.default):
            line[_key(each)] = int(value) if isinstance(value, bool) else value
    return json.dumps(without_nan(line)).encode() + b"\n"


def _key(each: Any) -> str:
    """Return a field's name in the file."""
    return str(each.metadata.get("key", each.name))


# A line becomes a record: the type of a field says how its value is read.


def _whole(value: object) -> int:
    if not isinstance(value, (int, float)) or value != value // 1:
        raise ValueError(f"must be a whole number, got {value!r:.60}")
    return int(value)


def _real(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, got {value!r:.60}")
    return float(value)


def _real_or_nan(value: object) -> float:
    return math.nan if value is None else _real(value)


def _flag(value: object) -> bool:
    if value not in (0, 1):
        raise ValueError(f"must be true or false, got {value!r:.60}")
    return bool(value)


def _must_be(kind: type[Any], name: str) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"must be {name}, got {value!r:.60}")
        return value

    return read


_text = _must_be(str, "a text")
_list = _must_be(list, "a list")
_object = _must_be(dict, "an object")


def _of_ranks(value: object) -> tuple[float, ...]:
    if not value:
        raise ValueError("must have a number for each rank")
    return tuple(map(_real_or_nan, _list(value)))


_READERS: Mapping[object, Callable[[object], Any]] = {
    int: _whole,
    int | None: _whole,
    float: _real,
    float | None: number,
    bool: _flag,
    str: _text,
    str | None: _text,
    float | str | None: lambda value: value if isinstance(value, str) else _real(value),
    tuple[str, ...]: lambda value: tuple(map(_text, _list(value))),
    tuple[float, ...]: _of_ranks,
    tuple[float | None, ...]: lambda value: tuple(map(number, _list(value))),
    Mapping[str, float]: lambda value: {name: _real_or_nan(ratio) for name, ratio in _object(value).items()},
}


@cache
def _fields(kind: type[Record]) -> Mapping[str, tuple[str, Callable[[object], Any], bool]]:
    """Return key in the file -> name, reader, whether it must be there, of each field that has a key."""
    types = get_type_hints(kind)
    keyed = [each for each in fields(kind) if each.name != "measures"]
    return {_key(each): (each.name, _READERS[types[each.name]], each.default is MISSING) for each in keyed}


def record_of(line: Mapping[str, Any]) -> Record | None:
    """Return the record of a line's object; None for a kind of another version, whose keys may also be others.

    A null is as if it were not there. Raises ValueError, which names the key.
    """
    if "kind" not in line:
        raise ValueError("no 'kind'")
    kind = KINDS.get(str(line["kind"]))
    if kind is None:
        return None
    known = _fields(kind)
    values: dict[str, Any] = {}
    if kind is EvalRecord:
        values["measures"] = {key: number(value) for key, value in line.items() if key not in (*known, "kind")}
    for key, value in line.items():
        if value is not None and key in known:
            name, read, _ = known[key]
            try:
                values[name] = read(value)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{key}: {error}") from error
    for key, (name, _, is_needed) in known.items():
        if is_needed and name not in values:
            raise ValueError(f"no {key!r}")
    return kind(**values)


def _records_in(text: str, where: str, problems: list[str]) -> Iterator[Record]:
    """Yield the record of a line, or say in `problems` why there is none."""
    try:
        line = from_json(text)
        if not isinstance(line, dict):
            raise ValueError("not a JSON object")
        if (record := record_of(line)) is not None:
            yield record
        return
    except ValueError as error:
        reason = str(error)
    # A run killed while it wrote leaves half a line. The next start may have appended its record to it.
    tail = text.rfind('{"kind"')
    is_torn = tail > 0 or not text.rstrip().endswith("}")
    why = "torn, the run was killed while it wrote, or is writing" if is_torn else f"unreadable, {reason}"
    problems.append(f"{where} is left out: {why}")
    if tail > 0:
        yield from _records_in(text[tail:], where, problems)


Kept = TypeVar("Kept", StepRecord, EvalRecord, WarningRecord, TrustRatioRecord, AverageRecord, RankTimesRecord)


class Replay:
    """The state of a run by its log: a later record of a step replaces the earlier, a resume drops what follows it.

    records: in the order of the file, with the repeated steps. problems: the lines that could not be read. early_stop:
    where the run ended, if it ended so.
    """

    def __init__(self, records: Sequence[Record], problems: Sequence[str] = ()) -> None:
        self.records = records
        self.problems = problems
        rare = [record for record in records if not isinstance(record, StepRecord)]
        self.steps = _current(StepRecord, records)
        self.evals = _current(EvalRecord, rare)
        self.warnings = _current(WarningRecord, rare)
        self.trust_ratios = _current(TrustRatioRecord, rare)
        self.averages = _current(AverageRecord, rare)
        self.rank_times = _current(RankTimesRecord, rare)
        self.slow_ranks = [record for record in rare if isinstance(record, SlowRankRecord)]
        self.checkpoints = [record for record in rare if isinstance(record, CheckpointRecord)]
        batches = {record.epoch: record for record in rare if isinstance(record, BatchRecord)}
        self.batches = [batches[epoch] for epoch in sorted(batches)]
        extensions = {record.step: record for record in rare if isinstance(record, MoreEpochsRecord)}
        self.extensions = [extensions[step] for step in sorted(extensions)]
        # A run that was extended has steps after its early stop.
        stops = [record for record in rare if isinstance(record, EarlyStopRecord)]
        self.early_stop = stops[-1] if stops and self.steps and stops[-1].step == self.steps[-1].step else None

    @classmethod
    def of(cls, run_path: Path) -> Replay:
        """Read the log of a run folder, also while the run writes it. A missing log has no records."""
        records: list[Record] = []
        problems: list[str] = []
        try:
            with open(run_path / METRICS_FILE, "rb", opener=regular) as lines:
                for i, line in enumerate(lines, start=1):
                    text = line.decode("utf-8", "replace")
                    if not text.isspace():
                        records += _records_in(text, f"{METRICS_FILE}, line {i}", problems)
        except FileNotFoundError:  # the run has not begun
            return cls(records, problems)
        except OSError as error:
            problems.append(f"{METRICS_FILE}: cannot be read to its end ({error.strerror})")
        return cls(records, problems)

    @cached_property
    def starts(self) -> list[StartRecord]:
        """The starts, each with the number of steps that are done again after it."""
        starts: list[StartRecord] = []
        done: set[int] = set()
        for record in self.records:
            if isinstance(record, StepRecord):
                done.add(record.step)
            elif isinstance(record, StartRecord):
                again = {step for step in done if step > record.step}
                done -= again
                starts.append(replace(record, steps_again=len(again)))
        return starts

    @property
    def last_step(self) -> int:
        """The number of finished updates."""
        records: Sequence[StepRecord | StartRecord] = self.steps or self.starts
        return records[-1].step if records else 0

    @cached_property
    def seconds(self) -> float:
        """The recorded time of all steps (repeated ones count again), checkpoints and timed validations."""
        seconds = 0.0
        for record in self.records:
            if isinstance(record, StepRecord):
                seconds += number(record.step_s) or 0.0
            elif isinstance(record, EvalRecord | CheckpointRecord):
                seconds += number(record.seconds) or 0.0
        return seconds

    @cached_property
    def skipped_steps(self) -> list[int]:
        """The updates that were not applied."""
        return [step.step for step in self.steps if step.skipped]


def _current(kind: type[Kept], records: Sequence[Record]) -> list[Kept]:
    """Return the last record of each step. What follows a checkpoint that was resumed is not in the weights."""
    found: dict[int, Kept] = {}
    for record in records:
        if isinstance(record, kind):
            found[record.step] = record
        elif isinstance(record, StartRecord):
            found = {step: kept for step, kept in found.items() if step <= record.step}
    return [found[step] for step in sorted(found)]
