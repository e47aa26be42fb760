"""The status of a sweep: one row for each run, read from the run directories and the scheduler."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from summit_train.cluster.site import Site, load_site
from summit_train.cluster.submit import SubmitError, job_states, submissions
from summit_train.core.files import is_locked
from summit_train.core.text import NONE, duration, has_top5, mean_std, percent, show, text_table
from summit_train.report.metrics import Run, RunError
from summit_train.report.noise import measured, measured_steps
from summit_train.report.records import number
from summit_train.report.tables import machine_of
from summit_train.spec import experiment_keys, spec_from_values
from summit_train.spec.source import SpecError
from summit_train.sweep.grid import Sweep, SweepRun

STATES = ("done", "running", "queued", "failed", "missing", "unknown", "changed")


@dataclass(frozen=True)
class JobState:
    """The scheduler's state of a run's last job: queued, running, gone or unknown."""

    id: str
    state: str


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep. A value is None while it is unknown.

    state: done (the final evaluation covers the last step), running, queued, failed (started and not done), missing
    (never started), unknown (the scheduler does not answer), changed (started with another spec; see `note`).
    top1, top1_std, top5: percent, of the final evaluation; while `final` is false, of the last validation in training.
    training_top1: percent, mean over the batches of the last epoch.
    noise_scale, noise_scale_error: clips, over the measured steps of the run, and its standard error; None where it was
    not measured or is unclear.
    gradient_square, gradient_variance: |G|^2 and tr(Sigma), means over these steps.
    seconds: recorded training time. node_hours: nodes times this time.
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
    noise_scale: float | None
    noise_scale_error: float | None
    gradient_square: float | None
    gradient_variance: float | None
    reference_top1: float | None
    reference_top1_std: float | None
    seconds: float | None
    node_hours: float | None
    job: str | None
    run: str
    machine: str
    note: str
    num_classes: int


def read_jobs(sweep: Sweep, site: Site | None) -> tuple[dict[str, JobState], list[str]]:
    """Return run name -> its last job, as `site` and the site of the submission say; and a note for each that fails."""
    saved = sweep.folder / "site.yaml"
    sites = [*([load_site(saved)] if saved.is_file() else []), *([site] if site else [])]
    jobs: dict[str, JobState] = {}
    notes = []
    for one in {site.scheduler: site for site in sites}.values():
        submitted = {
            run.name: [line["id"] for line in submissions(run.spec.run_path) if line["scheduler"] == one.scheduler]
            for run in sweep.runs
        }
        states: dict[str, str] = {}
        try:
            states = job_states(one, [job_id for ids in submitted.values() for job_id in ids])
        except SubmitError as error:
            notes.append(f"what became of the jobs is unknown: {error}")
        jobs |= {name: _last_job(ids, states) for name, ids in submitted.items() if ids}
    return jobs, notes


def read_rows(sweep: Sweep, jobs: Mapping[str, JobState] | None = None) -> list[SweepRow]:
    """Return one row for each run, in the sweep's order. jobs: run name -> its last job."""
    return [_row(sweep, run, (jobs or {}).get(run.name)) for run in sweep.runs]


def to_start(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names of the runs that failed or were never started.

    Raises SpecError where a run was started with another spec: its result is not the sweep's and must not be lost.
    """
    changed = [f"{row.run}: {row.note}" for row in rows if row.state == "changed"]
    if changed:
        mend = "give the sweep another name, or move the run away"
        raise SpecError("\n".join(f"{line}; {mend}" for line in changed))
    return [row.name for row in rows if row.state in ("failed", "missing")]


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the rows as CSV with every column; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def table(rows: Sequence[SweepRow]) -> str:
    """Return the rows as a table for people, without the columns in which nothing is known."""
    return text_table([_cells(row) for row in rows])


def _last_job(ids: Sequence[str], states: Mapping[str, str]) -> JobState:
    """Return the job of a chain that still waits or runs, else the last one."""
    present = [job_id for job_id in ids if states.get(job_id) in ("running", "queued")]
    chosen = present[0] if present else ids[-1]
    return JobState(chosen, states.get(chosen, "unknown"))


def _row(sweep: Sweep, run: SweepRun, job: JobState | None) -> SweepRow:
    try:
        found = Run(run.spec.run_path)
    except RunError:
        found = None  # nothing there, or only the files of a submission
    plan = _plan(run, found)
    state, note = _state(run, found, job)
    points = sweep.reference.points if sweep.reference else ()
    published = next((point for point in points if point.global_batch == plan["global_batch"]), None)
    seconds = found.seconds or None if found else None
    return SweepRow(
        name=run.name,
        curve=run.curve,
        state=state,
        nodes=run.nodes,
        **plan,
        **_accuracy(found),
        step=found.last_step if found else 0,
        training_top1=_training_top1(found) if found else None,
        **_noise(found),
        reference_top1=published.top1 if published else None,
        reference_top1_std=published.top1_std if published else None,
        seconds=seconds,
        node_hours=run.nodes * seconds / 3600 if run.nodes and seconds else None,
        job=job.id if job else None,
        run=str(run.spec.run_path),
        machine=machine_of(found.environment) if found else "",
        note=note,
        num_classes=run.spec.model.num_classes,
    )


def _plan(run: SweepRun, found: Run | None) -> dict[str, Any]:
    """Return the numbers of the recorded plan; where there is none, those that follow from the spec."""
    scale = run.spec.scale
    batch = None if scale.gpus is None else scale.gpus * scale.clips_per_gpu
    known: dict[str, Any] = dict.fromkeys(("ranks", "accumulation", "peak_lr", "total_steps"))
    known |= {"virtual_gpus": scale.gpus, "global_batch": batch}
    known["frames_per_batch"] = None if batch is None else batch * run.spec.data.num_frames
    recorded = found.plan if found else {}
    return {key: recorded.get(key, value) for key, value in known.items()}


def _state(run: SweepRun, found: Run | None, job: JobState | None) -> tuple[str, str]:
    """Return (state, note). A run that is done stays done, whatever the scheduler says of its job."""
    if found and (difference := _difference(run, found)):
        return "changed", difference
    if found and _is_done(found):
        return "done", ""
    if job and job.state in ("running", "queued", "unknown"):
        return job.state, ""
    if is_locked(run.spec.run_path / "lock"):
        return "running", ""
    stopped = "stopped on request" if (run.spec.run_path / "stopped").exists() else ""
    # A run that fails at once leaves only the spec that it was started with.
    begun = found or job or (run.spec.run_path / "job/spec.yaml").exists()
    return ("failed", stopped) if begun else ("missing", "")


def _is_done(found: Run) -> bool:
    """Return whether the final evaluation covers the last step: `eval` during training writes eval.json too."""
    total = number(found.plan.get("total_steps"))
    steps = [score.step for score in found.final.checkpoints if score.step is not None] if found.final else []
    return total is not None and bool(steps) and max(steps) >= total


def _difference(run: SweepRun, found: Run) -> str:
    """Name the keys of the experiment that differ between run and sweep; empty if the run's spec cannot be read."""
    try:
        begun = experiment_keys(spec_from_values(dict(found.spec), str(found.path / "spec.yaml")))
    except SpecError:
        return ""
    # A key on one side only follows from another one that differs: evaluate.every_epochs from grow_batch.
    both = [(key, begun[key], value) for key, value in experiment_keys(run.spec).items() if key in begun]
    return "; ".join(f"{key} was {old}, the sweep has {new}" for key, old, new in both if old != new)


def _accuracy(found: Run | None) -> dict[str, Any]:
    """Return the accuracies of the final evaluation, else of the last validation in training."""
    if found and found.final:
        final = found.final
        return {"top1": final.top1_mean, "top1_std": final.top1_std, "top5": final.top5_mean, "final": True}
    last = found.evals[-1] if found and found.evals else None
    return {"top1": last and last.top1, "top1_std": None, "top5": last and last.top5, "final": False}


def _training_top1(found: Run) -> float | None:
    """Return the mean over the batches of the last epoch, which may be unfinished."""
    epoch = found.steps[-1].epoch if found.steps else 0
    known = [step.top1 for step in found.steps if step.epoch == epoch and step.top1 is not None]
    return fmean(known) if known else None


def _noise(found: Run | None) -> dict[str, Any]:
    """Return the noise scale with its error, and the two means that it is the ratio of."""
    steps = measured_steps(found) if found else []
    if not steps:
        return dict.fromkeys(("noise_scale", "noise_scale_error", "gradient_square", "gradient_variance"))
    noise = measured(steps)
    return {
        "noise_scale": noise.value,
        "noise_scale_error": noise.error,
        "gradient_square": fmean(step.gradient_square or 0.0 for step in steps),
        "gradient_variance": fmean(step.gradient_variance or 0.0 for step in steps),
    }


def _cells(row: SweepRow) -> dict[str, str]:
    accumulated = f" = {row.ranks} x {row.accumulation}" if row.ranks else ""
    return {
        "run": row.name,
        "state": row.state,
        "nodes": show(row.nodes),
        "GPUs": show(row.virtual_gpus) + accumulated,
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
