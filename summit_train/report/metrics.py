"""Read a run directory into plain records, also one that a killed or running job left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

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
    RecordType,
    StartRecord,
    StepRecord,
    TrustRatioRecord,
    number,
)
from summit_train.spec.source import parse_mapping

RUN_FILES = ("spec.yaml", "plan.json", "metrics.jsonl", "eval.json", "environment.json")
OBSERVED_FILE = "observed.json"  # of `eval --observed`, which need not be there


class Run:
    """The contents of a run directory, also of one that a killed or running job left behind.

    label: the run's name. plan: plan.json without clips_per_class. seconds: recorded time of all steps (repeated ones
    count again), checkpoints and timed validations. missing: names of absent files. notes: what could not be read.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read a run directory. Raises UserError if it has neither a spec.yaml nor a metrics.jsonl."""
        self.path = path = Path(directory)
        if not path.is_dir():
            what = "not a directory" if path.exists() else "no such directory"
            raise UserError(f"{path}: {what}; give the directory of a run, run_dir/name of its spec")
        if not _is_run(path):
            inside = [str(child) for child in sorted(path.iterdir()) if _is_run(child)][:8]
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
        self.starts: list[StartRecord] = []
        self.checkpoints: list[CheckpointRecord] = []
        self.seconds = 0.0
        self._steps: dict[int, StepRecord] = {}
        self._evals: dict[int, EvalRecord] = {}
        self._ratios: dict[int, TrustRatioRecord] = {}
        self._averages: dict[int, AverageRecord] = {}
        self._batches: dict[int, BatchRecord] = {}
        self._read_log()
        self.steps = [self._steps[step] for step in sorted(self._steps)]
        self.evals = [self._evals[step] for step in sorted(self._evals)]
        self.trust_ratios = [self._ratios[step] for step in sorted(self._ratios)]
        self.averages, self.batches = list(self._averages.values()), list(self._batches.values())

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the spec, None where it has none."""
        values = self.spec.get(section)
        return values.get(key) if isinstance(values, dict) else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, label 0 first, as far as the plan has them."""
        return tuple(self.clips_per_class.train) if self.clips_per_class else ()

    @property
    def shows_top5(self) -> bool:
        """Return whether top-5 is shown: the run has more than five classes."""
        return has_top5(number(self.setting("model", "num_classes")))

    @property
    def last_step(self) -> int:
        """Return the number of finished updates."""
        records: Sequence[StepRecord | StartRecord] = self.steps or self.starts
        return records[-1].step if records else 0

    @property
    def steps_per_epoch(self) -> float | None:
        """Return the plan's value, else that of the records: epoch e begins with step e * steps_per_epoch + 1."""
        planned = number(self.plan.get("steps_per_epoch"))
        if planned is not None and planned > 0:
            return planned
        return next(((s.step - 1) / s.epoch for s in self.steps if s.epoch > 0 and s.step > 1), None)

    @property
    def skipped_steps(self) -> list[int]:
        """Return the updates that were not applied because a gradient was not finite."""
        return [step.step for step in self.steps if step.skipped]

    @property
    def clips_per_second(self) -> float | None:
        """Return the median over the steps, which start-up and restarts do not change."""
        rates = [s.clips_per_second for s in self.steps if math.isfinite(s.clips_per_second)]
        return median(rates) if rates else None

    @property
    def data_wait_share(self) -> float | None:
        """Return the time spent waiting for data / the time of the steps, in percent."""
        timed = [s for s in self.steps if math.isfinite(s.step_s) and math.isfinite(s.data_wait_s)]
        total = sum(s.step_s for s in timed)
        return 100 * sum(s.data_wait_s for s in timed) / total if total > 0 else None

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
        try:
            self._add(_object(text))
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

    def _add(self, record: dict[str, Any]) -> None:
        """Add one record; a later one of a step replaces the earlier. Unknown kinds are ignored.

        Raises ValueError for a record with missing or wrong values.
        """
        seconds = 0.0
        match record.get("kind"):
            case None:
                raise ValueError("no 'kind'")
            case "step":
                # JSON has no NaN: a null becomes the default, NaN.
                step = StepRecord.model_validate({key: value for key, value in record.items() if value is not None})
                self._steps[step.step], seconds = step, step.step_s
            case "eval":
                validation = EvalRecord.model_validate(record)
                self._evals[validation.step], seconds = validation, validation.seconds or 0.0
            case "trust_ratio":
                ratios = TrustRatioRecord.model_validate(record)
                self._ratios[ratios.step] = ratios
            case "average":
                average = AverageRecord.model_validate(record)
                self._averages[average.step] = average
            case "batch":
                batch = BatchRecord.model_validate(record)
                self._batches[batch.epoch] = batch
            case "checkpoint":
                self.checkpoints.append(CheckpointRecord.model_validate(record))
                seconds = self.checkpoints[-1].seconds
            case "start":
                start = StartRecord.model_validate(record)
                # Updates of the process before that lie beyond this checkpoint are not in the weights.
                again = sum(step > start.step for step in self._steps)
                by_step: tuple[dict[int, Any], ...] = (self._steps, self._evals, self._ratios, self._averages)
                for records in by_step:
                    for step_beyond in [step for step in records if step > start.step]:
                        del records[step_beyond]
                self.starts.append(start.model_copy(update={"steps_again": again}))
        self.seconds += seconds if math.isfinite(seconds) else 0.0

    def _parsed(self, kind: type[RecordType], values: object, name: str) -> RecordType | None:
        try:
            return kind.model_validate(values) if values else None
        except ValidationError as error:
            self.notes.append(f"{name}: not as it should be, left out ({_reason(error)})")
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


def _is_run(path: Path) -> bool:
    return (path / "spec.yaml").is_file() or (path / "metrics.jsonl").is_file()
