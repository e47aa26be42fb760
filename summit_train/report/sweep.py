"""What became of a sweep: a row a run, read from the run directories, as a table, a CSV and a JSON file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from summit_train.files import is_locked
from summit_train.report.metrics import FinalEval, Run, RunError, number, read_run
from summit_train.report.tables import NONE, duration, machine_of, mean_std, percent, show
from summit_train.spec import SpecError, experiment_keys, spec_from_values
from summit_train.sweep import ReferencePoint, Sweep, SweepRun

STATES = ("done", "running", "queued", "failed", "missing", "unknown", "changed")


@dataclass(frozen=True)
class JobState:
    """What the scheduler says of a run's last job: queued, running, gone or unknown."""

    id: str
    state: str


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep. What is not known, as the run has not come so far, is None.

    state: done (the final evaluation covers the last step), running, queued, failed (started and not done), missing
    (never started), unknown (its job cannot be asked after), changed (begun with another spec than the sweep's, `note`
    says in what). Accuracies in percent: top1, top1_std, top5 of the final evaluation, and while that is missing
    (`final` false) of the last validation in training; training_top1 is the mean over the batches of the last epoch.
    seconds: recorded time of training. node_hours: of that time.
    """

    name: str
    curve: str
    state: str
    nodes: int | None
    ranks: int | None
    virtual_gpus: int | None
    accumulation: int | None
    global_batch: int | None
    frames_per_batch: int | None
    peak_lr: float | None
    step: int
    total_steps: int | None
    training_top1: float | None
    top1: float | None
    top1_std: float | None
    top5: float | None
    final: bool
    reference_top1: float | None
    reference_top1_std: float | None
    seconds: float | None
    node_hours: float | None
    job: str | None
    run: str
    machine: str
    note: str


def read_rows(sweep: Sweep, jobs: Mapping[str, JobState] | None = None) -> list[SweepRow]:
    """One row a run, in the sweep's order; `jobs`: name of a run -> what the scheduler says of its last job."""
    return [_row(sweep, run, (jobs or {}).get(run.name)) for run in sweep.runs]


def to_start(rows: Sequence[SweepRow]) -> list[str]:
    """Names of the runs that a start of the sweep starts: those that failed or were never begun.

    Raises SpecError where a run was begun with another spec: neither is its result the sweep's, nor may it be lost.
    """
    changed = [f"{row.run}: {row.note}" for row in rows if row.state == "changed"]
    if changed:
        mend = "give the sweep another name, or move the run away"
        raise SpecError("\n".join(f"{line}; {mend}" for line in changed))
    return [row.name for row in rows if row.state in ("failed", "missing")]


def as_values(sweep: Sweep, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """The rows as one JSON object, with how many there are of each state."""
    count = {state: sum(row.state == state for row in rows) for state in STATES}
    return {"sweep": sweep.name, "folder": str(sweep.folder), "states": count, "runs": [asdict(row) for row in rows]}


def as_csv(rows: Sequence[SweepRow]) -> str:
    """The rows with every column; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in asdict(row).items()} for row in rows)
    return text.getvalue()


def table(rows: Sequence[SweepRow]) -> str:
    """The rows for people, without the columns that nothing is known for."""
    header = (
        "run", "state", "nodes", "GPUs", "batch", "frames", "peak LR", "step",
        "train top-1", "top-1", "top-5", "published", "time", "job", "note",
    )  # fmt: skip
    return text_table(header, [_cells(row) for row in rows])


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, text to the left and numbers to the right; none where all is a dash."""
    kept = [i for i in range(len(header)) if any(row[i] not in ("", NONE) for row in rows)]
    lines = [[line[i] for i in kept] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [all(not cell or cell == NONE or cell[0].isdigit() for cell in column[1:]) for column in
               zip(*lines, strict=True)]  # fmt: skip
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    )


def _row(sweep: Sweep, run: SweepRun, job: JobState | None) -> SweepRow:
    found = _read(run.spec.run_path)
    plan = _plan(run, found)
    state, note = _state(run, found, job)
    accuracy = _accuracy(found)
    published = _published(sweep, plan["global_batch"])
    seconds = found.seconds or None if found else None
    return SweepRow(
        name=run.name,
        curve=run.curve,
        state=state,
        nodes=run.nodes,
        **plan,
        step=found.last_step if found else 0,
        training_top1=_training_top1(found) if found else None,
        top1=accuracy.top1_mean if accuracy else None,
        top1_std=accuracy.top1_std if accuracy else None,
        top5=accuracy.top5_mean if accuracy else None,
        final=found is not None and found.final is not None,
        reference_top1=published.top1 if published else None,
        reference_top1_std=published.top1_std if published else None,
        seconds=seconds,
        node_hours=run.nodes * seconds / 3600 if run.nodes and seconds else None,
        job=job.id if job else None,
        run=str(run.spec.run_path),
        machine=machine_of(found.environment) if found else "",
        note=note,
    )


def _read(path: Path) -> Run | None:
    try:
        return read_run(path)
    except RunError:
        return None  # nothing there, or only what a submission wrote


def _plan(run: SweepRun, found: Run | None) -> dict[str, Any]:
    """The plan's figures: those that the run recorded, else what the spec alone tells."""
    scale = run.spec.scale
    batch = None if scale.gpus is None else scale.gpus * scale.clips_per_gpu
    known: dict[str, Any] = dict.fromkeys(("ranks", "accumulation", "peak_lr", "total_steps"))
    known |= {"virtual_gpus": scale.gpus, "global_batch": batch}
    known["frames_per_batch"] = None if batch is None else batch * run.spec.data.num_frames
    recorded = found.plan if found else {}
    return {key: recorded.get(key, value) for key, value in known.items()}


def _state(run: SweepRun, found: Run | None, job: JobState | None) -> tuple[str, str]:
    """(state, note); what is done stays so, whatever the scheduler still says of its job."""
    if found and (differing := _differing(run, found)):
        return "changed", differing
    if found and _is_done(found):
        return "done", ""
    if job and job.state in ("running", "queued", "unknown"):
        return job.state, ""
    if is_locked(run.spec.run_path / "lock"):
        return "running", ""
    stopped = "stopped on request" if (run.spec.run_path / "stopped").exists() else ""
    # A run that fails at once leaves nothing but what it was started with.
    begun = found or job or (run.spec.run_path / "job/spec.yaml").exists()
    return ("failed", stopped) if begun else ("missing", "")


def _is_done(found: Run) -> bool:
    """The final evaluation has the last step among its checkpoints: `eval` in mid-training writes eval.json too."""
    total = number(found.plan.get("total_steps"))
    steps = [score.step for score in found.final.checkpoints if score.step is not None] if found.final else []
    return total is not None and bool(steps) and max(steps) >= total


def _differing(run: SweepRun, found: Run) -> str:
    """What the run was begun with and the sweep has another value for; a spec that cannot be read says nothing."""
    try:
        begun = experiment_keys(spec_from_values(dict(found.spec), str(found.path / "spec.yaml")))
    except SpecError:
        return ""
    pairs = {key: (begun[key], value) for key, value in experiment_keys(run.spec).items() if begun[key] != value}
    return "; ".join(f"{key} was {old}, the sweep has {new}" for key, (old, new) in pairs.items())


def _accuracy(found: Run | None) -> FinalEval | None:
    """The final evaluation, else the last validation in training in its form."""
    if found is None or found.final is not None or not found.evals:
        return found.final if found else None
    last = found.evals[-1]
    return FinalEval(last.top1, None, last.top5, None, last.videos, last.clips, None, ())


def _training_top1(found: Run) -> float | None:
    """Mean over the batches of the last epoch that was begun."""
    epoch = found.steps[-1].epoch if found.steps else 0
    known = [step.top1 for step in found.steps if step.epoch == epoch and step.top1 is not None]
    return fmean(known) if known else None


def _published(sweep: Sweep, batch: int | None) -> ReferencePoint | None:
    points = sweep.reference.points if sweep.reference else ()
    return next((point for point in points if point.global_batch == batch), None)


def _cells(row: SweepRow) -> list[str]:
    """The row as `table` prints it."""
    accumulated = f" = {row.ranks} x {row.accumulation}" if row.ranks else ""
    return [
        row.name,
        row.state,
        show(row.nodes),
        show(row.virtual_gpus) + accumulated,
        show(row.global_batch),
        show(row.frames_per_batch),
        show(row.peak_lr),
        f"{row.step:,} of {row.total_steps:,}" if row.total_steps else NONE,
        percent(row.training_top1),
        mean_std(row.top1, row.top1_std) + ("" if row.final or row.top1 is None else " (in training)"),
        percent(row.top5),
        mean_std(row.reference_top1, row.reference_top1_std),
        duration(row.seconds) if row.seconds else NONE,
        row.job or NONE,
        row.note,
    ]


def _cell(value: object) -> object:
    return "" if value is None else value
