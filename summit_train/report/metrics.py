"""Read a run directory into plain records, also one that a killed or running job left behind.

Units: losses in nats, learning rates as the optimizer gets them, accuracies in percent, times in seconds, throughput in
clips per second over all ranks. `step_s` is the whole step, including the wait for data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from summit_train.errors import UserError
from summit_train.source import SpecError, parse_mapping
from summit_train.text import has_top5

RUN_FILES = ("spec.yaml", "plan.json", "metrics.jsonl", "eval.json", "environment.json")


class RunError(UserError):
    """The given directory holds no run."""


def number(value: object) -> float | None:
    """Return the value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


Known = Annotated[float | None, BeforeValidator(number)]


class Record(BaseModel):
    """A JSON object of a run. Keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True)


class StepRecord(Record):
    """One update. step: finished updates, from 1. epoch: from 0. top1: of the training batch.

    bad_clips: unreadable clips that the run has replaced so far.
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


class EvalRecord(Record):
    """One validation during training, after `epoch` finished epochs."""

    epoch: float
    step: int
    top1: float
    top5: Known = None
    videos: int | None = None
    clips: int | None = None
    seconds: Known = None


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

    @property
    def name(self) -> str:
        """Return the checkpoint's file name."""
        return Path(self.path).name or self.path


class FinalEval(Record):
    """eval.json: many clips of each video, mean and standard deviation over the last checkpoints."""

    top1_mean: float
    top1_std: Known = None
    top5_mean: Known = None
    top5_std: Known = None
    videos: int | None = None
    clips: int | None = None
    crops: int | str | None = None
    checkpoints: tuple[CheckpointScore, ...] = ()


class ClipsPerClass(Record):
    """Class name -> number of clips, of the training and the validation set."""

    train: dict[str, int]
    val: dict[str, int]

    @property
    def names(self) -> list[str]:
        """Return the names of all classes, those of the training set first."""
        return list(dict.fromkeys((*self.train, *self.val)))


@dataclass
class Log:
    """metrics.jsonl. A later record of a step replaces the earlier one."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    starts: list[StartRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record. Unknown kinds are ignored. Raises ValueError for a record with missing or wrong values."""
        match record.get("kind"):
            case None:
                raise ValueError("no 'kind'")
            case "step":
                # JSON has no NaN: a null becomes the default, NaN.
                step = StepRecord.model_validate({key: value for key, value in record.items() if value is not None})
                self.steps[step.step] = step
                self._add_time(step.step_s)
            case "eval":
                validation = EvalRecord.model_validate(record)
                self.evals[validation.step] = validation
                self._add_time(validation.seconds or 0.0)
            case "start":
                self._add_start(StartRecord.model_validate(record))
            case "checkpoint":
                self.checkpoints.append(CheckpointRecord.model_validate(record))
                self._add_time(self.checkpoints[-1].seconds)

    def _add_time(self, seconds: float) -> None:
        self.seconds += seconds if math.isfinite(seconds) else 0.0

    def _add_start(self, start: StartRecord) -> None:
        # Updates of the process before that lie beyond this checkpoint are not in the weights.
        lost = [step for step in self.steps if step > start.step]
        for step in lost:
            del self.steps[step]
        self.evals = {step: validation for step, validation in self.evals.items() if step <= start.step}
        self.starts.append(start.model_copy(update={"steps_again": len(lost)}))


@dataclass(frozen=True)
class Run:
    """The contents of a run directory.

    label: the run's name, unique among the runs of one report.
    plan: plan.json without clips_per_class.
    seconds: recorded time of all steps (repeated ones count again), checkpoints and timed validations.
    missing: names of absent files. notes: what could not be read.
    """

    path: Path
    label: str
    spec: Mapping[str, Any]
    spec_text: str
    plan: Mapping[str, Any]
    clips_per_class: ClipsPerClass | None
    environment: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    starts: tuple[StartRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    final: FinalEval | None
    seconds: float
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def shows_top5(self) -> bool:
        """Return whether the run has so many classes that top-5 is shown."""
        model = self.spec.get("model")
        return has_top5(number(model.get("num_classes")) if isinstance(model, Mapping) else None)

    @property
    def last_step(self) -> int:
        """Return the number of finished updates."""
        if self.steps:
            return self.steps[-1].step
        return self.starts[-1].step if self.starts else 0

    @property
    def steps_per_epoch(self) -> float | None:
        """Return the plan's value, else that of the records: epoch e begins with step e * steps_per_epoch + 1."""
        planned = number(self.plan.get("steps_per_epoch"))
        if planned is not None and planned > 0:
            return planned
        return next(((s.step - 1) / s.epoch for s in self.steps if s.epoch > 0 and s.step > 1), None)

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """Return the updates that were not applied because a gradient was not finite."""
        return tuple(step.step for step in self.steps if step.skipped)

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


def read_runs(directories: Sequence[str | Path]) -> tuple[Run, ...]:
    """Read each directory once and make the labels unique. Raises RunError for a directory that is no run."""
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(Path(directory).resolve(), Path(directory))
    runs = [read_run(path) for path in paths.values()]
    names = [run.label for run in runs]
    return tuple(replace(run, label=f"{run.label} ({run.path})") if names.count(run.label) > 1 else run for run in runs)


def read_run(directory: str | Path) -> Run:
    """Read one run directory. Raises RunError if it holds neither a spec.yaml nor a metrics.jsonl."""
    path = Path(directory)
    _require_run(path)
    notes: list[str] = []
    spec_text = _text(path / "spec.yaml", notes)
    spec = _yaml(spec_text, notes)
    plan = _json(path / "plan.json", notes)
    classes = plan.pop("clips_per_class", None)
    result = _json(path / "eval.json", notes)
    log = read_log(path / "metrics.jsonl")
    return Run(
        path=path,
        label=str(spec.get("name") or path.resolve().name),
        spec=spec,
        spec_text=spec_text,
        plan=plan,
        clips_per_class=_parsed(ClipsPerClass, classes, "plan.json: clips_per_class", notes) if classes else None,
        environment=_json(path / "environment.json", notes),
        steps=tuple(log.steps[step] for step in sorted(log.steps)),
        evals=tuple(log.evals[step] for step in sorted(log.evals)),
        starts=tuple(log.starts),
        checkpoints=tuple(log.checkpoints),
        final=_parsed(FinalEval, result, "eval.json", notes) if result else None,
        seconds=log.seconds,
        missing=tuple(name for name in RUN_FILES if not (path / name).exists()),
        notes=(*notes, *log.notes),
    )


def read_log(path: Path) -> Log:
    """Read metrics.jsonl and note the lines that cannot be read. An absent file is an empty log."""
    log = Log()
    if not path.is_file():
        return log
    try:
        with path.open("rb") as lines:
            for i, line in enumerate(lines, start=1):
                text = line.decode("utf-8", "replace")
                if text.strip():
                    _add_line(log, text, f"{path.name}, line {i}")
    except OSError as error:
        log.notes.append(f"{path.name}: cannot be read to its end ({error.strerror})")
    return log


def _add_line(log: Log, text: str, where: str) -> None:
    try:
        log.add(_object(text))
        return
    except ValueError as error:
        reason = _reason(error)
    # A run killed while it wrote leaves half a line. The next start may have appended its record to it.
    tail = text.rfind('{"kind"')
    torn = tail > 0 or not text.rstrip().endswith("}")
    why = "torn, the run was killed while it wrote, or writes now" if torn else f"unreadable, {reason}"
    log.notes.append(f"{where} is left out: {why}")
    if tail > 0:
        _add_line(log, text[tail:], where)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


RecordType = TypeVar("RecordType", bound=Record)


def _parsed(kind: type[RecordType], values: object, name: str, notes: list[str]) -> RecordType | None:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        notes.append(f"{name}: not as it should be, left out ({_reason(error)})")
        return None


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"no {key!r}" if first["type"] == "missing" else f"{key}: {first['msg']}"


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path.name}: cannot be read ({error.strerror})")
        return ""


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path, notes)
    try:
        return _object(text) if text else {}
    except ValueError as error:
        notes.append(f"{path.name}: unreadable, left out ({error})")
        return {}


def _yaml(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        return parse_mapping(text, "spec.yaml").values if text else {}
    except SpecError as error:
        notes.append(f"{error}; shown as it is")
        return {}


def _is_run(path: Path) -> bool:
    return (path / "spec.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _require_run(path: Path) -> None:
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise RunError(f"{path}: {what}; give the directory of a run, run_dir/name of its spec")
    if not _is_run(path):
        inside = [str(child) for child in sorted(path.iterdir()) if _is_run(child)][:8]
        hint = f"it has runs in it, give those: {' '.join(inside)}" if inside else "give run_dir/name of a spec"
        raise RunError(f"{path}: not a run, neither spec.yaml nor metrics.jsonl is in it; {hint}")
