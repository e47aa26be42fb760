"""A run directory, read into plain dataclasses. Whatever a killed or running job left behind can be read.

Units: losses in nats, learning rates as the optimizer gets them, accuracies in percent, times in seconds,
throughput in clips per second over all ranks. `step_s` is the whole step, the wait for data included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

RUN_FILES = ("spec.yaml", "plan.json", "metrics.jsonl", "eval.json", "environment.json")


class RunError(ValueError):
    """The given directory holds no run."""


@dataclass(frozen=True)
class StepRecord:
    """One update: `step` counts finished updates from 1, `epoch` from 0; `top1` is of the training batch.

    bad_clips: clips of the run so far that could not be read, and were replaced.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    clips_per_second: float
    step_s: float
    data_wait_s: float
    top1: float | None = None
    skipped: bool = False
    bad_clips: int = 0


@dataclass(frozen=True)
class EvalRecord:
    """One validation during training, after `epoch` finished epochs; `seconds` where it was recorded."""

    epoch: float
    step: int
    top1: float
    top5: float | None
    videos: int | None
    clips: int | None
    seconds: float | None


@dataclass(frozen=True)
class StartRecord:
    """A start (step 0) or a resume (step > 0); `steps_again` updates of the process before were in vain."""

    step: int
    ranks: int | None
    time: float | str | None
    steps_again: int = 0


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint written after `step` updates, in `seconds`."""

    step: int
    seconds: float


@dataclass(frozen=True)
class CheckpointScore:
    """One row of the final evaluation."""

    path: str
    step: int | None
    top1: float
    top5: float | None

    @property
    def name(self) -> str:
        """The checkpoint's file name."""
        return Path(self.path).name or self.path


@dataclass(frozen=True)
class FinalEval:
    """eval.json: many clips a video, mean and standard deviation over the last checkpoints."""

    top1_mean: float
    top1_std: float | None
    top5_mean: float | None
    top5_std: float | None
    videos: int | None
    clips: int | None
    crops: int | str | None
    checkpoints: tuple[CheckpointScore, ...]


@dataclass
class Log:
    """metrics.jsonl: a later record of a step replaces the earlier; a resume drops what it will do again."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    starts: list[StartRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record in; kinds unknown to this version are left alone."""
        match record["kind"]:
            case "step":
                self._add_step(_step(record))
            case "eval":
                validation = _validation(record)
                self.evals[validation.step] = validation
                self.seconds += validation.seconds or 0.0
            case "start":
                self._add_start(record)
            case "checkpoint":
                written = CheckpointRecord(int(record["step"]), float(record["seconds"]))
                self.checkpoints.append(written)
                self.seconds += _finite_or_zero(written.seconds)

    def _add_step(self, step: StepRecord) -> None:
        self.steps[step.step] = step
        self.seconds += _finite_or_zero(step.step_s)

    def _add_start(self, record: Mapping[str, Any]) -> None:
        # The process before this one may have gone past the checkpoint from which this one goes on: what it
        # did there is no part of the weights any more, even while this process has not come as far yet.
        at = int(record["step"])
        lost = [step for step in self.steps if step > at]
        for step in lost:
            del self.steps[step]
        self.evals = {step: validation for step, validation in self.evals.items() if step <= at}
        self.starts.append(StartRecord(at, _int(record.get("ranks")), record.get("time"), len(lost)))


@dataclass(frozen=True)
class Run:
    """Everything a run directory says. `label` is the name, made unique among the runs of one report.

    `missing` names the files that are not there, `notes` what else the reader of the report should know.
    `seconds` is the recorded time of all steps (those done twice count twice), checkpoints and, where it was
    recorded, validations.
    """

    path: Path
    label: str
    spec: Mapping[str, Any]
    spec_text: str
    plan: Mapping[str, Any]
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
    def last_step(self) -> int:
        """Finished updates."""
        if self.steps:
            return self.steps[-1].step
        return self.starts[-1].step if self.starts else 0

    @property
    def steps_per_epoch(self) -> float | None:
        """From the plan, else from the records: the first step of epoch e is e * steps_per_epoch + 1."""
        planned = number(self.plan.get("steps_per_epoch"))
        if planned is not None and planned > 0:
            return planned
        return next(((s.step - 1) / s.epoch for s in self.steps if s.epoch > 0 and s.step > 1), None)

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """Updates that were not applied since a gradient was not finite."""
        return tuple(step.step for step in self.steps if step.skipped)

    @property
    def clips_per_second(self) -> float | None:
        """Median over the steps, so that start-up and a restart do not count."""
        rates = [s.clips_per_second for s in self.steps if math.isfinite(s.clips_per_second)]
        return median(rates) if rates else None

    @property
    def data_wait_share(self) -> float | None:
        """Time spent waiting for data / time of the steps, in percent."""
        timed = [s for s in self.steps if math.isfinite(s.step_s) and math.isfinite(s.data_wait_s)]
        total = sum(s.step_s for s in timed)
        return 100 * sum(s.data_wait_s for s in timed) / total if total > 0 else None


def read_runs(directories: Sequence[str | Path]) -> tuple[Run, ...]:
    """Read each directory once, with labels that differ. Raises RunError for a directory that is no run."""
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
    log = read_log(path / "metrics.jsonl")
    return Run(
        path=path,
        label=str(spec.get("name") or path.resolve().name),
        spec=spec,
        spec_text=spec_text,
        plan=_json(path / "plan.json", notes),
        environment=_json(path / "environment.json", notes),
        steps=tuple(log.steps[step] for step in sorted(log.steps)),
        evals=tuple(log.evals[step] for step in sorted(log.evals)),
        starts=tuple(log.starts),
        checkpoints=tuple(log.checkpoints),
        final=_final(_json(path / "eval.json", notes), notes),
        seconds=log.seconds,
        missing=tuple(name for name in RUN_FILES if not (path / name).exists()),
        notes=(*notes, *log.notes),
    )


def read_log(path: Path) -> Log:
    """Read metrics.jsonl; an absent file is an empty log. Lines that cannot be read are noted."""
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


def number(value: object) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _add_line(log: Log, text: str, where: str) -> None:
    try:
        log.add(_object(text))
        return
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
    # A run killed while it wrote leaves half a line, and the next start may have appended its record to that.
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


def _step(record: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(record["step"]),
        epoch=int(record["epoch"]),
        loss=_float(record["loss"]),
        lr=_float(record["lr"]),
        clips_per_second=_float(record["clips_per_second"]),
        step_s=_float(record["step_s"]),
        data_wait_s=_float(record["data_wait_s"]),
        top1=number(record.get("top1")),
        skipped=bool(record.get("skipped", False)),
        bad_clips=int(record.get("bad_clips", 0)),
    )


def _validation(record: Mapping[str, Any]) -> EvalRecord:
    return EvalRecord(
        epoch=float(record["epoch"]),
        step=int(record["step"]),
        top1=float(record["top1"]),
        top5=number(record.get("top5")),
        videos=_int(record.get("videos")),
        clips=_int(record.get("clips")),
        seconds=number(record.get("seconds")),
    )


def _final(record: Mapping[str, Any], notes: list[str]) -> FinalEval | None:
    if not record:
        return None
    try:
        crops = record.get("crops")
        return FinalEval(
            top1_mean=float(record["top1_mean"]),
            top1_std=number(record.get("top1_std")),
            top5_mean=number(record.get("top5_mean")),
            top5_std=number(record.get("top5_std")),
            videos=_int(record.get("videos")),
            clips=_int(record.get("clips")),
            crops=crops if isinstance(crops, str) else _int(crops),
            checkpoints=tuple(_score(score) for score in record.get("checkpoints", ())),
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        notes.append(f"eval.json: not as it should be, left out ({type(error).__name__}: {error})")
        return None


def _score(record: Mapping[str, Any]) -> CheckpointScore:
    step = _int(record.get("step"))
    return CheckpointScore(str(record["path"]), step, float(record["top1"]), number(record.get("top5")))


def _float(value: Any) -> float:
    """JSON has no NaN: some writers put null for it."""
    return math.nan if value is None else float(value)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


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
        value = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        notes.append(f"spec.yaml: no YAML, shown as it is ({str(error).splitlines()[0]})")
        return {}
    return value if isinstance(value, dict) else {}


def _is_run(path: Path) -> bool:
    return (path / "spec.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _require_run(path: Path) -> None:
    if not path.exists():
        raise RunError(f"{path}: no such directory; give the directory of a run, run_dir/name of its spec")
    if not path.is_dir():
        raise RunError(f"{path}: not a directory; give the directory of a run, run_dir/name of its spec")
    if not _is_run(path):
        inside = [str(child) for child in sorted(path.iterdir()) if _is_run(child)][:8]
        hint = f"it has runs in it, give those: {' '.join(inside)}" if inside else "give run_dir/name of a spec"
        raise RunError(f"{path}: not a run, neither spec.yaml nor metrics.jsonl is in it; {hint}")
