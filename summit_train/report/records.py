"""Read a run folder into checked records, also one that a killed or running job left behind."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from summit_train.core.errors import UserError
from summit_train.core.files import read_file, regular
from summit_train.core.text import from_json, mean_std
from summit_train.evaluation.measures import Measure, interval, measures_of
from summit_train.report.log_records import (
    KINDS,
    AverageRecord,
    BatchRecord,
    CheckpointRecord,
    EarlyStopRecord,
    EvalRecord,
    LogRecord,
    MoreEpochsRecord,
    RankTimesRecord,
    Record,
    SlowRankRecord,
    StartRecord,
    StepRecord,
    TrustRatioRecord,
    WarningRecord,
    WithMeasures,
    number,
)
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import parse_mapping

RecordType = TypeVar("RecordType", bound=Record)


class CheckpointScore(WithMeasures):
    """The measures of one checkpoint in the final evaluation."""

    path: str
    step: int | None = None


class CheckpointScores(WithMeasures):
    """The measures of the last checkpoints, with mean and standard deviation (n - 1), KEY_mean and KEY_std."""

    checkpoints: tuple[CheckpointScore, ...] = ()

    @model_validator(mode="after")
    def _deviate(self) -> CheckpointScores:
        """Compute the deviations again: in files of older versions they are the population's, of one checkpoint 0."""
        for name in (extra := self.model_extra or {}):
            if name.endswith("_std"):
                scores = (score.of(name.removesuffix("_std")) for score in self.checkpoints)
                if known := [score for score in scores if score is not None]:
                    extra[name] = stdev(known) if len(known) > 1 else None
        return self

    def best(self, key: str) -> float | None:
        """Return the highest of a measure over the checkpoints."""
        return max((value for score in self.checkpoints if (value := score.of(key)) is not None), default=None)

    def text(self, measure: Measure) -> str:
        """Return `73.81 ± 0.05 %`."""
        return mean_std(self.of(f"{measure.key}_mean"), self.of(f"{measure.key}_std"), measure.unit)


class FinalEval(CheckpointScores):
    """eval.json. mode: clips, or stream: of all frames. ema: of the averages of the weights. overrides: of the spec."""

    videos: int | None = None
    mode: str = "clips"
    clips: int | None = None
    crops: int | str | None = None
    ema: CheckpointScores | None = None
    classes_left_out: tuple[str, ...] = ()
    overrides: dict[str, Any] = Field(default={})

    def interval(self, main: Measure) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean top-1 over the videos; None of another measure."""
        top1 = self.of("top1_mean")
        if main.key != "top1" or top1 is None or not 0 <= top1 <= 100 or not self.videos or self.videos < 0:
            return None
        return interval(top1, self.videos)


class BestCheckpoint(Record):
    """checkpoints/best.json. value: of the measure in the validation after `step`, in percent."""

    step: int
    measure: str
    value: float


class ObservedPoint(WithMeasures):
    """Accuracies when this fraction of each video is seen."""

    fraction: float


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


ByStep = TypeVar("ByStep", StepRecord, EvalRecord, WarningRecord, TrustRatioRecord, AverageRecord, RankTimesRecord)
RUN_FILES = ("spec.yaml", "plan.json", "metrics.jsonl", "eval.json", "environment.json")
OBSERVED_FILE = "observed.json"  # of `eval --observed`; optional
RUN_MARKS = ("spec.yaml", "metrics.jsonl")  # of a run folder


class RunRecord:
    """The contents of a run folder, also of one that a killed or running job left behind.

    label: the run's name. final: eval.json. others: those of `evals`, by other keys or of other checkpoints, by name.
    best: the checkpoint that checkpoint.keep_best keeps. plan: plan.json without clips_per_class. log: metrics.jsonl,
    repeated steps included. early_stop: where the run ended, if it ended so. seconds: recorded time of all steps
    (repeated ones count again), checkpoints and timed validations. missing: names of absent files. notes: what could
    not be read.
    last_step: the number of finished updates. steps_per_epoch: the plan's value, else that of the records: epoch e
    begins with step e * steps_per_epoch + 1. skipped_steps: updates not applied as a gradient was not finite.
    clips_per_second: the median over the steps, which start-up and restarts do not change. data_wait_share: the wait
    for data, in percent of the time of the steps. measures: those of its loss.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read a run folder. Raises UserError if it has neither a spec.yaml nor a metrics.jsonl."""
        self.path = path = Path(directory)
        _check_is_run(path)
        self.notes: list[str] = []
        self.missing = [name for name in RUN_FILES if not (path / name).exists()]
        self.spec_text = self._text("spec.yaml")
        try:
            self.spec: dict[str, Any] = parse_mapping(self.spec_text, "spec.yaml").values if self.spec_text else {}
        except UserError as error:
            self.notes.append(f"{error}; shown as it is")
            self.spec = {}
        self.label = str(self.spec.get("name") or os.path.basename(os.path.realpath(path)))
        self.plan, self.environment = self._json("plan.json"), self._json("environment.json")
        counts = self.plan.pop("clips_per_class", None)
        self.clips_per_class = self._parsed(ClipsPerClass, counts, "plan.json: clips_per_class")
        kind = str(self.setting("loss", "kind"))
        kind = str(self.setting("loss", "like")) if is_foreign(kind) else kind
        parts = [one for one in self.setting("evaluate", "measures") or [] if isinstance(one, dict)]
        own = [str(one.get("kind")).rpartition(":")[2] for one in parts]
        self.measures = measures_of(kind, number(self.setting("model", "num_classes")), own)
        self.final = self._result("eval.json")
        names = sorted(file.parent.name for file in path.glob("evals/*/eval.json"))
        results = {name: self._result(f"evals/{name}/eval.json") for name in names}
        self.others = {name: result for name, result in results.items() if result is not None}
        self.best = self._parsed(BestCheckpoint, self._json("checkpoints/best.json"), "checkpoints/best.json")
        self.observed = self._parsed(Observed, self._json(OBSERVED_FILE), OBSERVED_FILE)
        self._replay_log()
        steps = self.steps
        records: Sequence[StepRecord | StartRecord] = steps or self.starts
        self.last_step = records[-1].step if records else 0
        self.skipped_steps = [step.step for step in steps if step.skipped]
        planned = number(self.plan.get("steps_per_epoch")) or 0
        recorded = next(((s.step - 1) / s.epoch for s in steps if s.epoch > 0 and s.step > 1), None)
        self.steps_per_epoch = planned if planned > 0 else recorded
        rates = [s.clips_per_second for s in steps if math.isfinite(s.clips_per_second)]
        self.clips_per_second = median(rates) if rates else None
        timed = [s for s in steps if math.isfinite(s.step_s) and math.isfinite(s.data_wait_s)]
        total, waits = sum(s.step_s for s in timed), sum(s.data_wait_s for s in timed)
        self.data_wait_share = 100 * waits / total if total > 0 else None

    @property
    def is_done(self) -> bool:
        """Return whether the final evaluation covers the last step: `eval` during training writes eval.json, too."""
        total = number(self.plan.get("total_steps")) if self.early_stop is None else self.early_stop.step
        scored = [score.step for score in self.final.checkpoints if score.step is not None] if self.final else []
        return total is not None and bool(scored) and max(scored) >= total

    def setting(self, section: str, key: str) -> Any:
        values = self.spec.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def settings(self) -> Iterator[tuple[str, str | int | float]]:
        """Yield the spec's dotted keys with values that CSV and JSON have; others as text, null as "null"."""
        open_sections = [("", self.spec)]
        while open_sections:
            prefix, section = open_sections.pop(0)
            for key, value in section.items():
                if isinstance(value, dict) and value:
                    open_sections.append((f"{prefix}{key}.", value))
                elif isinstance(value, str | int) or number(value) is not None:
                    yield f"{prefix}{key}", value
                else:
                    yield f"{prefix}{key}", "null" if value is None else str(value)

    def _replay_log(self) -> None:
        """Replay metrics.jsonl: a later record of a step replaces the earlier, a resume takes back what follows it."""
        self.log = list(self._log())
        rare = [record for record in self.log if not isinstance(record, StepRecord)]
        self.steps, self.evals = _last(StepRecord, self.log), _last(EvalRecord, rare)
        self.warnings = _last(WarningRecord, rare)
        self.trust_ratios, self.averages = _last(TrustRatioRecord, rare), _last(AverageRecord, rare)
        self.rank_times = _last(RankTimesRecord, rare)
        self.slow_ranks = [record for record in rare if isinstance(record, SlowRankRecord)]
        batches = {record.epoch: record for record in rare if isinstance(record, BatchRecord)}
        self.batches = [batches[epoch] for epoch in sorted(batches)]
        self.checkpoints = [record for record in rare if isinstance(record, CheckpointRecord)]
        stops = [record for record in rare if isinstance(record, EarlyStopRecord)]
        # A run that was told to continue has steps after it.
        self.early_stop = stops[-1] if stops and self.steps and stops[-1].step == self.steps[-1].step else None
        extensions = {record.step: record for record in rare if isinstance(record, MoreEpochsRecord)}
        self.extensions = [extensions[step] for step in sorted(extensions)]
        self.starts, self.seconds, done = list[StartRecord](), 0.0, set[int]()
        for record in self.log:
            match record:
                case StepRecord():
                    done.add(record.step)
                    self.seconds += number(record.step_s) or 0.0
                case EvalRecord() | CheckpointRecord():
                    self.seconds += number(record.seconds) or 0.0
                case StartRecord():
                    again = {step for step in done if step > record.step}
                    done -= again
                    self.starts.append(record.model_copy(update={"steps_again": len(again)}))

    def _log(self) -> Iterator[LogRecord | StepRecord]:
        """Yield the records of metrics.jsonl; note each line that cannot be read. A missing file is in `missing`."""
        name = "metrics.jsonl"
        if name in self.missing:
            return
        try:
            with open(self.path / name, "rb", opener=regular) as lines:
                for i, line in enumerate(lines, start=1):
                    text = line.decode("utf-8", "replace")
                    if not text.isspace():
                        yield from self._records_in(text, f"{name}, line {i}")
        except OSError as error:
            self.notes.append(f"{name}: cannot be read to its end ({error.strerror})")

    def _records_in(self, text: str, where: str) -> Iterator[LogRecord | StepRecord]:
        """Yield the record of a line; unknown kinds are ignored."""
        try:
            record = _object(text)
            if "kind" not in record:
                raise ValueError("no 'kind'")
            if kind := KINDS.get(str(record["kind"])):
                # JSON has no NaN: a null becomes the default, NaN.
                yield kind.validate_python({key: value for key, value in record.items() if value is not None})
            return
        except ValueError as error:
            reason = _reason(error)
        # A run killed while it wrote leaves half a line. The next start may have appended its record to it.
        tail = text.rfind('{"kind"')
        torn = tail > 0 or not text.rstrip().endswith("}")
        why = "torn, the run was killed while it wrote, or is writing" if torn else f"unreadable, {reason}"
        self.notes.append(f"{where} is left out: {why}")
        if tail > 0:
            yield from self._records_in(text[tail:], where)

    def _parsed(self, kind: type[RecordType], values: object, name: str) -> RecordType | None:
        try:
            return kind.model_validate(values) if values else None
        except ValidationError as error:
            self.notes.append(f"{name}: has wrong values, left out ({_reason(error)})")
            return None

    def _result(self, name: str) -> FinalEval | None:
        found = self._parsed(FinalEval, self._json(name), name)
        main = f"{self.measures.main.key}_mean"
        # null: the videos say nothing about the measure
        if found is not None and found.of(main) is None and (found.model_extra or {}).get(main, "") is not None:
            self.notes.append(f"{name}: has wrong values, left out (no {main!r})")
            return None
        return found

    def _text(self, name: str) -> str:
        try:
            return read_file(self.path / name).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.notes.append(f"{name}: cannot be read ({error.strerror})")
            return ""

    def _json(self, name: str) -> dict[str, Any]:
        text = self._text(name)
        try:
            return _object(text) if text else {}
        except ValueError as error:
            self.notes.append(f"{name}: unreadable, left out ({error})")
            return {}


def read_runs(directories: Sequence[str | Path]) -> list[RunRecord]:
    """Read each directory once and make the labels unique. Raises UserError for a directory that is not a run."""
    paths: dict[str, Path] = {}
    for directory in directories:
        paths.setdefault(os.path.realpath(directory), Path(directory))
    runs = [RunRecord(path) for path in paths.values()]
    tell_apart(runs)
    return runs


def tell_apart(runs: Sequence[RunRecord]) -> None:
    """Add the path to the labels that several runs have."""
    names = Counter(run.label for run in runs)
    for run in runs:
        if names[run.label] > 1:
            run.label += f" ({run.path})"


def read_observed(run_path: Path) -> Observed:
    """Read a run's curves. Raises UserError where there are none."""
    path = run_path / OBSERVED_FILE
    try:
        return Observed.model_validate(from_json(read_file(path)))
    except OSError as error:
        why = f"{path}: {error.strerror}; `summit-train eval SPEC --observed` writes it into its run folder"
        raise UserError(why) from error
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path}: is not what `summit-train eval SPEC --observed` writes") from error


def _check_is_run(path: Path) -> None:
    """Raise UserError for what is not a run folder, with what would be right."""
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise UserError(f"{path}: {what}; give a run folder, run_dir/name of its spec")
    runs = [one for one in (path, *sorted(path.iterdir())) if any((one / name).is_file() for name in RUN_MARKS)]
    if path not in runs:
        hint = f"give the runs within it: {' '.join(map(str, runs[:8]))}" if runs else "give run_dir/name of a spec"
        raise UserError(f"{path}: not a run, it has neither spec.yaml nor metrics.jsonl; {hint}")


def _last(kind: type[ByStep], log: Sequence[LogRecord | StepRecord]) -> list[ByStep]:
    """Return the last record of each step. What follows a checkpoint that was resumed is not in the weights."""
    found: dict[int, ByStep] = {}
    for record in log:
        if isinstance(record, kind):
            found[record.step] = record
        elif isinstance(record, StartRecord):
            found = {step: one for step, one in found.items() if step <= record.step}
    return [found[step] for step in sorted(found)]


def _object(text: str) -> dict[str, Any]:
    value = from_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"no {key!r}" if first["type"] == "missing" else f"{key}: {first['msg']}"
