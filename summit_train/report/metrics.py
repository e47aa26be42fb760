"""Read a run directory into plain records, also one that a killed or running job left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from pydantic import ValidationError

from summit_train.core.errors import UserError
from summit_train.core.text import has_top5
from summit_train.report.records import (
    AverageRecord,
    BatchRecord,
    CheckpointRecord,
    ClipsPerClass,
    EvalRecord,
    FinalEval,
    Observed,
    Record,
    RecordType,
    StartRecord,
    StepRecord,
    TrustRatioRecord,
    number,
)
from summit_train.spec.source import parse_mapping

RUN_FILES = ("spec.yaml", "plan.json", "metrics.jsonl", "eval.json", "environment.json")
OBSERVED_FILE = "observed.json"  # of `eval --observed`; optional
_MARKS = ("spec.yaml", "metrics.jsonl")  # of a run directory
_KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "trust_ratio": TrustRatioRecord,
    "average": AverageRecord,
    "batch": BatchRecord,
    "checkpoint": CheckpointRecord,
    "start": StartRecord,
}
_SECONDS = {"step": "step_s", "eval": "seconds", "checkpoint": "seconds"}


class Run:
    """The contents of a run directory, also of one that a killed or running job left behind.

    label: the run's name. plan: plan.json without clips_per_class. seconds: recorded time of all steps (repeated ones
    count again), checkpoints and timed validations. missing: names of absent files. notes: what could not be read.
    last_step: the number of finished updates. steps_per_epoch: the plan's value, else that of the records: epoch e
    begins with step e * steps_per_epoch + 1. skipped_steps: updates not applied as a gradient was not finite.
    clips_per_second: the median over the steps, which start-up and restarts do not change. data_wait_share: the wait
    for data, in percent of the time of the steps. shows_top5: the run has more than five classes.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read a run directory. Raises UserError if it has neither a spec.yaml nor a metrics.jsonl."""
        self.path = path = Path(directory)
        if not path.is_dir():
            what = "not a directory" if path.exists() else "no such directory"
            raise UserError(f"{path}: {what}; give the directory of a run, run_dir/name of its spec")
        runs = [one for one in (path, *sorted(path.iterdir())) if any((one / name).is_file() for name in _MARKS)]
        if path not in runs:
            inside = [str(child) for child in runs][:8]
            hint = f"give the runs within it: {' '.join(inside)}" if inside else "give run_dir/name of a spec"
            raise UserError(f"{path}: not a run, it has neither spec.yaml nor metrics.jsonl; {hint}")
        self.notes: list[str] = []
        self.missing = [name for name in RUN_FILES if not (path / name).exists()]
        self.spec_text = self._text("spec.yaml")
        try:
            self.spec: dict[str, Any] = parse_mapping(self.spec_text, "spec.yaml").values if self.spec_text else {}
        except UserError as error:
            self.notes.append(f"{error}; shown as it is")
            self.spec = {}
        self.label = str(self.spec.get("name") or path.resolve().name)
        self.plan, self.environment = self._json("plan.json"), self._json("environment.json")
        counts = self.plan.pop("clips_per_class", None)
        self.clips_per_class = self._parsed(ClipsPerClass, counts, "plan.json: clips_per_class")
        self.final = self._parsed(FinalEval, self._json("eval.json"), "eval.json")
        self.observed = self._parsed(Observed, self._json(OBSERVED_FILE), OBSERVED_FILE)
        self.starts, self.checkpoints, self.seconds = list[StartRecord](), list[CheckpointRecord](), 0.0
        self._records: dict[type[Record], dict[int, Any]] = {kind: {} for kind in _KINDS.values()}  # by step or epoch
        self._read_log()
        self.steps, self.evals = self._sorted(StepRecord), self._sorted(EvalRecord)
        self.trust_ratios, self.averages = self._sorted(TrustRatioRecord), self._sorted(AverageRecord)
        self.batches = self._sorted(BatchRecord)
        self._summarise()

    def setting(self, section: str, key: str) -> Any:
        values = self.spec.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def _sorted(self, kind: type[RecordType]) -> list[RecordType]:
        return [cast(RecordType, one) for _, one in sorted(self._records[kind].items())]

    def _summarise(self) -> None:
        steps = self.steps
        records: Sequence[StepRecord | StartRecord] = steps or self.starts
        self.last_step = records[-1].step if records else 0
        self.skipped_steps = [step.step for step in steps if step.skipped]
        self.shows_top5 = has_top5(number(self.setting("model", "num_classes")))
        planned = number(self.plan.get("steps_per_epoch")) or 0
        recorded = next(((s.step - 1) / s.epoch for s in steps if s.epoch > 0 and s.step > 1), None)
        self.steps_per_epoch = planned if planned > 0 else recorded
        rates = [s.clips_per_second for s in steps if math.isfinite(s.clips_per_second)]
        self.clips_per_second = median(rates) if rates else None
        timed = [s for s in steps if math.isfinite(s.step_s) and math.isfinite(s.data_wait_s)]
        total, waits = sum(s.step_s for s in timed), sum(s.data_wait_s for s in timed)
        self.data_wait_share = 100 * waits / total if total > 0 else None

    def _read_log(self) -> None:
        """Read metrics.jsonl; note each line that cannot be read. A missing file is in `missing`."""
        name = "metrics.jsonl"
        if name in self.missing:
            return
        try:
            with (self.path / name).open("rb") as lines:
                for i, line in enumerate(lines, start=1):
                    text = line.decode("utf-8", "replace")
                    if text.strip():
                        self._add_line(text, f"{name}, line {i}")
        except OSError as error:
            self.notes.append(f"{name}: cannot be read to its end ({error.strerror})")

    def _add_line(self, text: str, where: str) -> None:
        """Add the record of a line; a later one of a step replaces the earlier. Unknown kinds are ignored."""
        try:
            record = _object(text)
            if "kind" not in record:
                raise ValueError("no 'kind'")
            kind = _KINDS.get(record["kind"])
            if kind is not None:
                # JSON has no NaN: a null becomes the default, NaN.
                self._add(kind.model_validate({key: v for key, v in record.items() if v is not None}))
                self.seconds += number(record.get(_SECONDS.get(record["kind"], ""))) or 0.0
            return
        except ValueError as error:
            reason = _reason(error)
        # A run killed while it wrote leaves half a line. The next start may have appended its record to it.
        tail = text.rfind('{"kind"')
        torn = tail > 0 or not text.rstrip().endswith("}")
        why = "torn, the run was killed while it wrote, or is writing" if torn else f"unreadable, {reason}"
        self.notes.append(f"{where} is left out: {why}")
        if tail > 0:
            self._add_line(text[tail:], where)

    def _add(self, record: Record) -> None:
        match record:
            case BatchRecord():
                self._records[BatchRecord][record.epoch] = record
            case CheckpointRecord():
                self.checkpoints.append(record)
            case StartRecord():
                # Updates of the process before that lie beyond this checkpoint are not in the weights.
                again = sum(step > record.step for step in self._records[StepRecord])
                for kind in (StepRecord, EvalRecord, TrustRatioRecord, AverageRecord):
                    kept = {step: one for step, one in self._records[kind].items() if step <= record.step}
                    self._records[kind] = kept
                self.starts.append(record.model_copy(update={"steps_again": again}))
            case StepRecord() | EvalRecord() | TrustRatioRecord() | AverageRecord():
                self._records[type(record)][record.step] = record

    def _parsed(self, kind: type[RecordType], values: object, name: str) -> RecordType | None:
        try:
            return kind.model_validate(values) if values else None
        except ValidationError as error:
            self.notes.append(f"{name}: has wrong values, left out ({_reason(error)})")
            return None

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_bytes().decode("utf-8", "replace")
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


def read_runs(directories: Sequence[str | Path]) -> list[Run]:
    """Read each directory once and make the labels unique. Raises UserError for a directory that is not a run."""
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(Path(directory).resolve(), Path(directory))
    runs = [Run(path) for path in paths.values()]
    names = [run.label for run in runs]
    for run in runs:
        if names.count(run.label) > 1:
            run.label += f" ({run.path})"
    return runs


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"no {key!r}" if first["type"] == "missing" else f"{key}: {first['msg']}"
