"""The status of a sweep, read from the run directories and the scheduler: one row for each run, and the points.

A point is runs that differ in nothing but their seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from summit_train.cluster.site import Site, load_site
from summit_train.cluster.submit import job_states, submissions
from summit_train.core.errors import UserError
from summit_train.core.files import is_locked
from summit_train.core.result import TextTable
from summit_train.core.text import NONE, duration, has_top5, mean_std, percent, show
from summit_train.report.metrics import Run
from summit_train.report.noise import Measured, measured, measured_steps, pooled
from summit_train.report.records import number
from summit_train.report.tables import machine_of
from summit_train.spec import experiment_keys, spec_from_values
from summit_train.sweep.grid import Sweep, SweepRun

STATES = ("done", "running", "queued", "failed", "missing", "unknown", "changed")


class JobState(NamedTuple):
    """The scheduler's state of a run's last job: queued, running, gone or unknown."""

    id: str
    state: str


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One run of a sweep, a column for each field. A value is None while it is unknown.

    state: done (the final evaluation covers the last step), running, queued, failed (started and not done), missing
    (never started), unknown (the scheduler does not answer), changed (started with another spec; see `note`).
    top1, top1_std, top5: percent, of the final evaluation; while `final` is false, of the last validation in training.
    """

    name: str
    curve: str
    state: str
    nodes: int | None
    ranks: int | None = None
    virtual_gpus: int | None
    accumulation: int | None = None
    global_batch: int | None
    frames_per_batch: int | None
    peak_lr: float | None = None
    step: int = 0
    total_steps: int | None = None
    training_top1: float | None = None  # percent, mean over the batches of the last epoch
    top1: float | None = None
    top1_std: float | None = None
    top5: float | None = None
    final: bool = False
    noise_scale: float | None = None  # clips, over the measured steps; None where it was not measured or is unclear
    noise_scale_error: float | None = None  # its standard error
    gradient_square: float | None = None  # |G|^2, mean over these steps
    gradient_variance: float | None = None  # tr(Sigma), mean over these steps
    reference_top1: float | None = None
    reference_top1_std: float | None = None
    seconds: float | None = None  # recorded training time
    node_hours: float | None = None
    job: str | None
    run: str
    machine: str = ""
    note: str
    num_classes: int


# The columns that a run's recorded plan decides; its spec need not.
_PLANNED = ("ranks", "virtual_gpus", "accumulation", "global_batch", "frames_per_batch", "peak_lr", "total_steps")


@dataclass(frozen=True)
class Point:
    """Runs of one curve that differ in nothing but their seed: means over those that are done; None if none is.

    top1_std, training_top1_std: percent, standard deviation over the seeds (n - 1); None of fewer than two done runs.
    checkpoints_std: percent, mean over the runs of the standard deviation over their last checkpoints.
    noise_scale: over the done runs; None where it was not measured. Its value is None where it is unclear.
    """

    curve: str
    global_batch: int | None
    peak_lr: float | None
    total_steps: int | None
    runs: int
    done: int
    top1: float | None
    top1_std: float | None
    checkpoints_std: float | None
    training_top1: float | None
    training_top1_std: float | None
    noise_scale: Measured | None


def read_jobs(sweep: Sweep, site: Site | None, warn: Callable[[str], None]) -> dict[str, JobState]:
    """Return run name -> its last job.

    site: asked as well as the site of the submission. warn: called for each scheduler that does not answer.
    """
    saved = sweep.folder / "site.yaml"
    sites = [*([load_site(saved)] if saved.is_file() else []), *([site] if site else [])]
    jobs: dict[str, JobState] = {}
    for one in {site.scheduler: site for site in sites}.values():
        submitted = {
            run.name: [line["id"] for line in submissions(run.spec.run_path) if line["scheduler"] == one.scheduler]
            for run in sweep.runs
        }
        states: dict[str, str] = {}
        try:
            states = job_states(one, [job_id for ids in submitted.values() for job_id in ids])
        except UserError as error:
            warn(f"the state of the jobs is unknown: {error}")
        for name, ids in submitted.items():
            if ids:  # of a chain the job that waits or runs, else the last one
                chosen = next((job_id for job_id in ids if states.get(job_id) in ("running", "queued")), ids[-1])
                jobs[name] = JobState(chosen, states.get(chosen, "unknown"))
    return jobs


def read_rows(sweep: Sweep, jobs: Mapping[str, JobState] | None = None) -> list[SweepRow]:
    """Return one row for each run, in the sweep's order. jobs: run name -> its last job."""
    rows = []
    for run in sweep.runs:
        job, scale = (jobs or {}).get(run.name), run.spec.scale
        try:
            found = Run(run.spec.run_path)
        except UserError:
            found = None  # nothing there, or only the files of a submission
        state, note = _state(run, found, job)
        batch = scale.gpus and scale.gpus * scale.clips_per_gpu
        row = SweepRow(
            name=run.name,
            curve=run.curve,
            state=state,
            nodes=run.nodes,
            virtual_gpus=scale.gpus,
            global_batch=batch,
            frames_per_batch=batch and batch * run.spec.data.num_frames,
            job=job.id if job else None,
            run=str(run.spec.run_path),
            note=note,
            num_classes=run.spec.model.num_classes,
        )
        row = _with_results(row, found) if found else row
        points = sweep.reference.points if sweep.reference else ()
        if published := next((point for point in points if point.global_batch == row.global_batch), None):
            row = replace(row, reference_top1=published.top1, reference_top1_std=published.top1_std)
        rows.append(row)
    return rows


def _with_results(row: SweepRow, found: Run) -> SweepRow:
    """Return the row with what the run has recorded."""
    planned: dict[str, Any] = {key: found.plan[key] for key in _PLANNED if key in found.plan}
    training = [step.top1 for step in found.steps if step.epoch == found.steps[-1].epoch and step.top1 is not None]
    last, final, gradients = found.evals[-1] if found.evals else None, found.final, measured_steps(found)
    noise = measured(gradients) if gradients else None
    return replace(
        row,
        **planned,
        step=found.last_step,
        training_top1=fmean(training) if training else None,
        top1=final.top1_mean if final else last.top1 if last else None,
        top1_std=final.top1_std if final else None,
        top5=final.top5_mean if final else last.top5 if last else None,
        final=final is not None,
        noise_scale=noise.value if noise else None,
        noise_scale_error=noise.error if noise else None,
        gradient_square=fmean(step.gradient_square or 0.0 for step in gradients) if gradients else None,
        gradient_variance=fmean(step.gradient_variance or 0.0 for step in gradients) if gradients else None,
        seconds=found.seconds or None,
        node_hours=row.nodes * found.seconds / 3600 if row.nodes and found.seconds else None,
        machine=machine_of(found.environment),
    )


def _state(run: SweepRun, found: Run | None, job: JobState | None) -> tuple[str, str]:
    """Return (state, note). A run that is done stays done, whatever the scheduler says of its job."""
    path = run.spec.run_path
    if found:
        if difference := _difference(run, found):
            return "changed", difference
        # The final evaluation must cover the last step: `eval` during training writes eval.json too.
        total = number(found.plan.get("total_steps"))
        scored = [score.step for score in found.final.checkpoints if score.step is not None] if found.final else []
        if total is not None and scored and max(scored) >= total:
            return "done", ""
    if job and job.state in ("running", "queued", "unknown"):
        return job.state, ""
    if is_locked(path / "lock"):
        return "running", ""
    # A run that fails at once leaves only the spec that it was started with.
    if found or job or (path / "job/spec.yaml").exists():
        return "failed", "stopped on request" if (path / "stopped").exists() else ""
    return "missing", ""


def _difference(run: SweepRun, found: Run) -> str:
    """Name the keys of the experiment that differ between run and sweep; empty if the run's spec cannot be read."""
    try:
        begun = experiment_keys(spec_from_values(dict(found.spec), str(found.path / "spec.yaml")))
    except UserError:
        return ""
    # A key on one side only follows from another one that differs: evaluate.every_epochs from grow_batch.
    both = [(key, begun[key], value) for key, value in experiment_keys(run.spec).items() if key in begun]
    return "; ".join(f"{key} was {old}, the sweep has {new}" for key, old, new in both if old != new)


def to_start(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names of the runs that failed or were never started.

    Raises UserError where a run was started with another spec: its result is not the sweep's and must not be lost.
    """
    changed = [f"{row.run}: {row.note}" for row in rows if row.state == "changed"]
    if changed:
        raise UserError("\n".join(f"{line}; give the sweep another name, or move the run away" for line in changed))
    return [row.name for row in rows if row.state in ("failed", "missing")]


def sweep_points(sweep: Sweep, rows: Sequence[SweepRow]) -> list[Point]:
    """Return the points in the sweep's order. rows: one for each run, in the sweep's order."""
    groups: dict[tuple[str, str, int | None], list[SweepRow]] = {}
    for run, row in zip(sweep.runs, rows, strict=True):
        alike = run.spec.model_copy(update={"name": "any", "seed": 0})
        groups.setdefault((run.curve, alike.model_dump_json(), run.nodes), []).append(row)
    points = []
    for group in groups.values():
        done = [row for row in group if row.state == "done"]
        top1, top1_std = _mean_std([row.top1 for row in done])
        training, training_std = _mean_std([row.training_top1 for row in done])
        points.append(
            Point(
                curve=group[0].curve,
                global_batch=group[0].global_batch,
                peak_lr=next((row.peak_lr for row in group if row.peak_lr is not None), None),
                total_steps=next((row.total_steps for row in group if row.total_steps is not None), None),
                runs=len(group),
                done=len(done),
                top1=top1,
                top1_std=top1_std,
                checkpoints_std=_mean_std([row.top1_std for row in done])[0],
                training_top1=training,
                training_top1_std=training_std,
                noise_scale=_noise_scale(done),
            )
        )
    return points


def _mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)


def _noise_scale(rows: Sequence[SweepRow]) -> Measured | None:
    """Return the noise scale over runs, each with the same weight; None where no run measured it.

    Its standard error is that over the runs, of one run that over its steps.
    """
    # The ratio of the means, not the mean of the runs' ratios: where the mean gradient is small beside its scatter,
    # some ratios are below 0.
    known = [row for row in rows if row.gradient_square is not None and row.gradient_variance is not None]
    if not known:
        return None
    noise = pooled([(row.gradient_square or 0.0, row.gradient_variance or 0.0) for row in known])
    return noise if len(known) > 1 else replace(noise, error=known[0].noise_scale_error)


def has_seeds(points: Sequence[Point]) -> bool:
    """Return whether some runs differ in nothing but their seed."""
    return any(point.runs > 1 for point in points)


def as_values(sweep: Sweep, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return rows, points and the number of runs in each state as one JSON object."""
    return {
        "sweep": sweep.name,
        "folder": str(sweep.folder),
        "states": {state: sum(row.state == state for row in rows) for state in STATES},
        "runs": [asdict(row) for row in rows],
        "points": [asdict(point) for point in sweep_points(sweep, rows)],
    }


def tables(sweep: Sweep, rows: Sequence[SweepRow]) -> str:
    """Return the table of the runs and, where some differ in nothing but their seed, that of the points.

    Columns in which nothing is known are left out.
    """
    of_runs, points = str(TextTable.of_records([_row_cells(row) for row in rows])), sweep_points(sweep, rows)
    if not has_seeds(points):
        return of_runs
    return f"{of_runs}\n\n{TextTable.of_records([_point_cells(point) for point in points])}"


def _row_cells(row: SweepRow) -> dict[str, str]:
    return {
        "run": row.name,
        "state": row.state,
        "nodes": show(row.nodes),
        "GPUs": show(row.virtual_gpus) + (f" = {row.ranks} x {row.accumulation}" if row.ranks else ""),
        "batch": show(row.global_batch),
        "frames": show(row.frames_per_batch),
        "peak LR": show(row.peak_lr),
        "step": f"{row.step:,} of {row.total_steps:,}" if row.total_steps else NONE,
        "train top-1": percent(row.training_top1),
        "top-1": mean_std(row.top1, row.top1_std) + ("" if row.final or row.top1 is None else " (in training)"),
        "top-5": percent(row.top5) if has_top5(row.num_classes) else NONE,
        "published": mean_std(row.reference_top1, row.reference_top1_std),
        "time": duration(row.seconds) if row.seconds else NONE,
        "job": row.job or NONE,
        "note": row.note,
    }


def _point_cells(point: Point) -> dict[str, str]:
    return {
        "curve": point.curve,
        "batch": show(point.global_batch),
        "done": f"{point.done} of {point.runs}",
        "steps": show(point.total_steps),
        "peak LR": show(point.peak_lr),
        "train top-1": mean_std(point.training_top1, point.training_top1_std),
        "top-1": mean_std(point.top1, point.top1_std),
        "noise scale": NONE if point.noise_scale is None else point.noise_scale.text,
    }
