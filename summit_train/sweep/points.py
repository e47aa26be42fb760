"""The points of a sweep: what runs that differ in nothing but their seed say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from summit_train.core.text import NONE, mean_std, show, text_table
from summit_train.report.noise import Measured, pooled
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import STATES, SweepRow, table


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


def sweep_points(sweep: Sweep, rows: Sequence[SweepRow]) -> list[Point]:
    """Return the points in the sweep's order. rows: one for each run, in the sweep's order."""
    groups: dict[tuple[str, str, int | None], list[SweepRow]] = {}
    for run, row in zip(sweep.runs, rows, strict=True):
        alike = run.spec.model_copy(update={"name": "any", "seed": 0})
        groups.setdefault((run.curve, alike.model_dump_json(), run.nodes), []).append(row)
    return [_point(group) for group in groups.values()]


def has_seeds(points: Sequence[Point]) -> bool:
    """Return whether some runs differ in nothing but their seed."""
    return any(point.runs > 1 for point in points)


def clear_noise(points: Sequence[Point]) -> tuple[int, Measured] | None:
    """Return the smallest batch of a curve at which its noise scale exceeds its standard error, and the noise scale.

    None where it does so at none.
    """
    found = [(point.global_batch, point.noise_scale) for point in points if point.global_batch and point.noise_scale]
    clear = [(batch, noise) for batch, noise in found if noise.value is not None and noise.value > (noise.error or 0.0)]
    return min(clear, default=None, key=itemgetter(0))


def _pooled(rows: Sequence[SweepRow]) -> Measured | None:
    """Return the noise scale over runs, each with the same weight; None where it was measured in none.

    Its standard error is that over the runs, of one run that over its steps.
    """
    # The runs' own ratios would not do: where the mean gradient is small beside its scatter, some are below 0.
    known = [row for row in rows if row.gradient_square is not None and row.gradient_variance is not None]
    if not known:
        return None
    noise = pooled([row.gradient_square or 0.0 for row in known], [row.gradient_variance or 0.0 for row in known])
    return noise if len(known) > 1 else replace(noise, error=known[0].noise_scale_error)


def tables(sweep: Sweep, rows: Sequence[SweepRow]) -> str:
    """Return the table of the runs and, where some differ in nothing but their seed, that of the points."""
    points = sweep_points(sweep, rows)
    return table(rows) + (f"\n\n{text_table([_cells(point) for point in points])}" if has_seeds(points) else "")


def as_values(sweep: Sweep, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return rows, points and the number of runs in each state as one JSON object."""
    count = {state: sum(row.state == state for row in rows) for state in STATES}
    return {
        "sweep": sweep.name,
        "folder": str(sweep.folder),
        "states": count,
        "runs": [asdict(row) for row in rows],
        "points": [asdict(point) for point in sweep_points(sweep, rows)],
    }


def _point(rows: Sequence[SweepRow]) -> Point:
    first, done = rows[0], [row for row in rows if row.state == "done"]
    top1, top1_std = _mean_std([row.top1 for row in done])
    training, training_std = _mean_std([row.training_top1 for row in done])
    checkpoints, _ = _mean_std([row.top1_std for row in done])
    return Point(
        curve=first.curve,
        global_batch=first.global_batch,
        peak_lr=next((row.peak_lr for row in rows if row.peak_lr is not None), None),
        total_steps=next((row.total_steps for row in rows if row.total_steps is not None), None),
        runs=len(rows),
        done=len(done),
        top1=top1,
        top1_std=top1_std,
        checkpoints_std=checkpoints,
        training_top1=training,
        training_top1_std=training_std,
        noise_scale=_pooled(done),
    )


def _mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)


def _cells(point: Point) -> dict[str, str]:
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
