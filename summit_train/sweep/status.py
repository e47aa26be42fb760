"""The status of a sweep, read from the run directories and the scheduler: one row for each run, and the points.

A point is runs that differ in nothing but their seed and their fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, stdev
from typing import Any

from summit_train.cluster.site import Site, load_site
from summit_train.cluster.submit import job_states, submissions
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import is_locked
from summit_train.core.result import TextTable
from summit_train.core.text import NONE, counted, duration, mean_std, percent, show
from summit_train.report.goodput import restarts
from summit_train.report.noise import Measured, measurements, pooled
from summit_train.report.records import RunRecord
from summit_train.report.tables import machine_of
from summit_train.spec import experiment_keys, spec_from_values
from summit_train.sweep.grid import Sweep, SweepRun

STATES = ("done", "running", "queued", "failed", "missing", "unknown", "changed")
STARTED = "started"  # the mark in RUN/job of a run that the sweep started on this machine
# What a run's recorded plan decides; its spec need not.
_PLANNED = ("ranks", "virtual_gpus", "accumulation", "global_batch", "frames_per_batch", "peak_lr")


# A run of the sweep by these keys, then by those of its measures and the main one's _std. A value is None while it is
# unknown.
#   state: done (the final evaluation covers the last step), running, queued, failed (started and not done), missing
#     (never started), unknown (the scheduler does not answer), changed (started with another spec; see note).
#   training_top1: percent, mean over the batches of the last epoch. baseline: percent, of `summit-train baseline`.
#   measures: percent, of the final evaluation; while final is false, of the last validation in training.
#   noise_scale, noise_scale_error: clips, over the measured steps. gradient_square, gradient_variance: |G|^2 and
#     tr(Sigma), means over them. seconds: recorded training time.
Row = dict[str, Any]
COLUMNS = (
    "name", "curve", "fold", "seed", "state", "nodes", *_PLANNED, "step", "total_steps", "training_top1", "top1",
    "top1_std", "top5", "baseline", "final", "noise_scale", "noise_scale_error", "gradient_square",
    "gradient_variance", "seconds", "node_hours", "job", "run", "machine", "note", "num_classes", "map", "map_std",
    "videos",
)  # fmt: skip
Point = dict[str, Any]  # by the keys of `sweep_points`


def read_jobs(sweep: Sweep, site: Site | None, warn: Callable[[str], None]) -> dict[str, tuple[str, str]]:
    """Return run name -> (id, state) of its last job on the site of the last submission, or on `site`.

    The state is queued, running, gone or unknown. warn: called for each scheduler that does not answer.
    """
    saved = sweep.folder / "site.yaml"
    sites = [*([load_site(saved)] if saved.is_file() else []), *([site] if site else [])]
    jobs: dict[str, list[tuple[str, str]]] = {run.name: [] for run in sweep.runs}
    for cluster in {site.scheduler: site for site in sites}.values():
        ids = {
            run.name: [line["id"] for line in submissions(run.spec.run_path) if line["scheduler"] == cluster.scheduler]
            for run in sweep.runs
        }
        states: dict[str, str] = {}
        try:
            states = job_states(cluster, [job_id for of_run in ids.values() for job_id in of_run])
        except (UserError, RunFailed) as error:
            warn(f"the state of the jobs is unknown: {error}")
        for name, of_run in ids.items():
            jobs[name] += [(job_id, states.get(job_id, "unknown")) for job_id in of_run]
    last = dict[str, tuple[str, str]]()
    for name, of_run in jobs.items():
        # The first that waits or runs, else the last that may, else the last.
        there = [job for job in of_run if job[1] in ("running", "queued")]
        unknown = [job for job in of_run if job[1] == "unknown"]
        if of_run:
            last[name] = there[0] if there else (unknown or of_run)[-1]
    return last


def read_rows(sweep: Sweep, jobs: Mapping[str, tuple[str, str]] | None = None) -> list[Row]:
    """Return one row for each run, in the sweep's order. jobs: run name -> (id, state) of its last job."""
    rows = []
    for run in sweep.runs:
        scale = run.spec.scale
        batch = scale.gpus and scale.gpus * scale.clips_per_gpu
        job, job_state = (jobs or {}).get(run.name, (None, None))
        try:
            record = RunRecord(run.spec.run_path)
        except UserError:
            record = None  # nothing there, or only the files of a submission
        state, note = _state(run, record, job_state)
        row: Row = dict.fromkeys((*COLUMNS, *(measure.key for measure in sweep.measures.every)))
        row |= {
            "name": run.name,
            "curve": run.curve,
            "fold": run.fold or None,
            "seed": run.spec.seed,
            "state": state,
            "nodes": run.nodes,
            "virtual_gpus": scale.gpus,
            "global_batch": batch,
            "frames_per_batch": batch and batch * run.spec.data.num_frames,
            "step": 0,
            "final": False,
            "job": job,
            "run": str(run.spec.run_path),
            "machine": "",
            "note": note,
            "num_classes": run.spec.model.num_classes,
        }
        if again := restarts(run.spec.run_path):
            add_note(row, counted(len(again), "restart"))
        if record:
            _add_results(row, record)
        rows.append(row)
    return rows


def add_note(row: Row, text: str) -> None:
    row["note"] = f"{row['note']}; {text}".removeprefix("; ")


def _add_results(row: Row, record: RunRecord) -> None:
    log = record.log
    final = record.final
    measures = record.measures
    row |= {key: record.plan[key] for key in (*_PLANNED, "total_steps") if key in record.plan}
    row["step"] = log.last_step
    row["machine"] = machine_of(record.environment)
    row["training_top1"], _ = _mean_std([step.top1 for step in log.steps if step.epoch == log.steps[-1].epoch])
    if log.seconds:
        row["seconds"] = log.seconds
        row["node_hours"] = row["nodes"] and row["nodes"] * log.seconds / 3600
    for key in (measure.key for measure in measures.every):
        if final:
            row[key] = final.of(f"{key}_mean")
        elif log.evals:
            row[key] = log.evals[-1].of(key)
    row["final"] = final is not None
    row[f"{measures.main.key}_std"] = final and final.of(f"{measures.main.key}_std")
    row["videos"] = final and final.videos
    row["baseline"] = record.baseline and record.baseline.top1
    if pairs := [pair for _, *pair in measurements(record)]:
        noise = pooled(pairs)
        row["noise_scale"] = noise.value
        row["noise_scale_error"] = noise.error
        row["gradient_square"], row["gradient_variance"] = map(fmean, zip(*pairs, strict=True))


def _state(run: SweepRun, record: RunRecord | None, job_state: str | None) -> tuple[str, str]:
    """Return (state, note). A run that is done stays done, whatever the scheduler says of its job."""
    path = run.spec.run_path
    if record:
        if difference := _difference(run, record):
            return "changed", difference
        if record.is_done:
            return "done", ""
    if job_state in ("running", "queued", "unknown"):
        return job_state, ""
    if is_locked(path / "lock"):
        return "running", ""
    # A run that fails at once leaves nothing else.
    if record or job_state or (path / "job" / STARTED).exists():
        return "failed", "stopped on request" if (path / "stopped").exists() else ""
    return "missing", ""


def _difference(run: SweepRun, record: RunRecord) -> str:
    """Name the keys of the experiment that differ between run and sweep; empty if the run's spec cannot be read."""
    try:
        begun = experiment_keys(spec_from_values(dict(record.spec), str(record.path / "spec.yaml")))
    except UserError:
        return ""
    # A key on one side only follows from another one that differs: evaluate.every_epochs from grow_batch.
    both = [(key, begun[key], value) for key, value in experiment_keys(run.spec).items() if key in begun]
    return "; ".join(f"{key} was {old}, the sweep has {new}" for key, old, new in both if old != new)


def to_start(rows: Sequence[Row]) -> list[str]:
    """Return the names of the runs that failed or were never started.

    Raises UserError where a run was started with another spec: its result is not the sweep's and must not be lost.
    """
    changed = [f"{row['run']}: {row['note']}" for row in rows if row["state"] == "changed"]
    if changed:
        raise UserError(*(f"{line}; give the sweep another name, or move the run away" for line in changed))
    return [row["name"] for row in rows if row["state"] in ("failed", "missing")]


def by_setting(sweep: Sweep, rows: Sequence[Row]) -> list[list[tuple[SweepRun, Row]]]:
    """Group runs that differ in nothing but seed and fold. rows: one for each run, in the sweep's order."""
    groups: dict[tuple[str, str, int | None], list[tuple[SweepRun, Row]]] = {}
    for run, row in zip(sweep.runs, rows, strict=True):
        alike = run.spec.model_copy(update={"name": "any", "seed": 0})
        if run.fold:
            alike = alike.model_copy(update={"data": alike.data.model_copy(update={"train": "", "val": ""})})
        groups.setdefault((run.curve, alike.model_dump_json(), run.nodes), []).append((run, row))
    return list(groups.values())


def sweep_points(sweep: Sweep, rows: Sequence[Row]) -> list[Point]:
    """Return the points in the sweep's order.

    A point has means over those of its runs that are done; None if none is. Of each measure, training_top1 and
    baseline KEY_std is the standard deviation (n - 1) over the seeds, or over the folds, each the mean over its seeds;
    None of fewer than two. top1_by_clips: the mean weighted by the folds' clips; only once every fold is done.
    checkpoints_std: percent, mean over the runs of the standard deviation over their last checkpoints. noise_scale:
    None where it was not measured. x: the value on the figure's axis.
    """
    return [_point(sweep, group) for group in by_setting(sweep, rows)]


def _point(sweep: Sweep, group: Sequence[tuple[SweepRun, Row]]) -> Point:
    rows = [row for _, row in group]
    done = [row for row in rows if row["state"] == "done"]
    main = sweep.measures.main.key
    planned = ("curve", "global_batch", "peak_lr", "total_steps", "num_classes")
    point = {key: next((row[key] for row in rows if row[key] is not None), None) for key in planned}
    point |= {"runs": len(rows), "done": len(done), "noise_scale": _noise_scale(done)}
    point["folds"] = len({row["fold"] for row in rows if row["fold"]})
    point["x"] = group[0][0].changes.get(sweep.x) if sweep.x else point["global_batch"]
    named = sorted({row["fold"] for row in done if row["fold"]})
    for key in (*(measure.key for measure in sweep.measures.every), "training_top1", "baseline"):
        of_folds = [_mean_std([row[key] for row in done if row["fold"] == fold])[0] for fold in named]
        if key == "baseline" and None in of_folds:  # its mean would be of other folds than the accuracy
            of_folds = []
        point[key], point[f"{key}_std"] = _mean_std(of_folds if named else [row[key] for row in done])
    is_whole = len(done) == len(rows) and point["folds"] == len({run.fold for run in sweep.runs if run.fold}) > 0
    weights = [row["videos"] or 0 for row in done]
    if is_whole and main == "top1" and all(weights):
        rights = sum((row["top1"] or 0.0) * weight for row, weight in zip(done, weights, strict=True))
        point["top1_by_clips"] = rights / sum(weights)
    point["checkpoints_std"], _ = _mean_std([row[f"{main}_std"] for row in done])
    return point


def _mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)


def _noise_scale(rows: Sequence[Row]) -> Measured | None:
    """Return the noise scale over runs, each with the same weight; None where no run measured it.

    Its standard error is that over the runs, of one run that over its steps.
    """
    # The ratio of the means, not the mean of the runs' ratios: some of those are below 0 where gradients scatter.
    known = [row for row in rows if row["gradient_square"] is not None]
    if not known:
        return None
    noise = pooled([(row["gradient_square"], row["gradient_variance"]) for row in known])
    return noise if len(known) > 1 else replace(noise, error=known[0]["noise_scale_error"])


def has_repeats(points: Sequence[Point]) -> bool:
    """True if some runs differ in nothing but their seed and their fold."""
    return any(point["runs"] > 1 for point in points)


def as_values(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows, points, these as text, and the number of runs in each state as one JSON object."""
    points = sweep_points(sweep, rows)
    return {
        "sweep": sweep.name,
        "folder": str(sweep.folder),
        "states": {state: sum(row["state"] == state for row in rows) for state in STATES},
        "runs": list(rows),
        "points": [one | {"noise_scale": one["noise_scale"] and asdict(one["noise_scale"])} for one in points],
        "table": _table_of_points(sweep, points),
    }


def tables(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the table of the runs and, if some differ in nothing but seed and fold, of the points."""
    main = sweep.measures.main
    of_runs = []
    for row in rows:
        # The mean accumulation, as shares may be uneven.
        ranks = row["ranks"]
        share = f" = {ranks} x {round((row['virtual_gpus'] or 0) / ranks, 2):,g}" if ranks else ""
        measured = _measured(sweep, row)
        if not row["final"] and row[main.key] is not None:
            measured[main.name] += " (in training)"
        cells = {
            "run": row["name"],
            "state": row["state"],
            "nodes": show(row["nodes"]),
            "GPUs": show(row["virtual_gpus"]) + share,
            "batch": show(row["global_batch"]),
            "frames": show(row["frames_per_batch"]),
            "peak LR": show(row["peak_lr"]),
            "step": f"{row['step']:,} of {row['total_steps']:,}" if row["total_steps"] else NONE,
            **measured,
            "time": duration(row["seconds"]) if row["seconds"] else NONE,
            "job": row["job"] or NONE,
            "note": row["note"],
        }
        of_runs.append(cells)
    of_points = _table_of_points(sweep, sweep_points(sweep, rows))
    return "\n\n".join(str(TextTable.of_records(table)) for table in (of_runs, of_points) if table)


def _table_of_points(sweep: Sweep, points: Sequence[Point]) -> list[dict[str, str]]:
    """Return the points for people; none unless some have several runs."""
    if not has_repeats(points):
        return []
    return [
        {
            "curve": point["curve"],
            **({sweep.x: show(point["x"])} if sweep.x else {}),
            "batch": show(point["global_batch"]),
            "done": f"{point['done']} of {point['runs']}",
            "steps": show(point["total_steps"]),
            "peak LR": show(point["peak_lr"]),
            **_measured(sweep, point),
            f"{sweep.measures.main.name}, by clips": percent(point.get("top1_by_clips")),
            "noise scale": NONE if point["noise_scale"] is None else point["noise_scale"].text,
        }
        for point in points
    ]


def _measured(sweep: Sweep, row: Row | Point) -> dict[str, str]:
    """Return the measures as text, with deviations where they are known; a dash for one that says nothing."""
    shown = replace(sweep.measures, num_classes=row["num_classes"]).shown
    known = [("training_top1", "train top-1", "%"), *((one.key, one.name, one.unit) for one in shown)]
    texts = dict.fromkeys(("train top-1", *(one.name for one in sweep.measures.every)), NONE)
    for key, name, unit in (*known, ("baseline", "baseline", "%")):
        texts[name] = mean_std(row[key], row.get(f"{key}_std"), unit)
    return texts
