"""Prepare a curve for drawing: positions on the axis, thinning, moving mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from summit_train.report.metrics import Run, StepRecord

MOST_POINTS = 1500  # of one curve; a long run has 250,000 steps
SMOOTH_SHARE = 1 / 30  # window of the moving mean / length of the curve

Floats = NDArray[np.float64]


def axis_name(runs: Sequence[Run]) -> str:
    """Return 'epoch' if the steps per epoch of every run are known, else 'step'."""
    return "step" if any(run.steps_per_epoch is None for run in runs) else "epoch"


def positions(run: Run, steps: Iterable[int], axis: str) -> Floats:
    """Return the positions of these updates (counted from 1) on the axis, (N,)."""
    per_epoch = (run.steps_per_epoch if axis == "epoch" else None) or 1.0
    return np.array(list(steps), dtype=np.float64) / per_epoch


def restarts(run: Run) -> list[int]:
    """Return the steps after which the run was resumed."""
    return [start.step for start in run.starts[1:]]


def wait_share(step: StepRecord) -> float:
    """Return the time waited for data / the time of the step, in percent."""
    return 100 * step.data_wait_s / step.step_s if step.step_s > 0 else float("nan")


def finite(values: Iterable[float | None]) -> Floats:
    """Return an array, (N,), with NaN for every value that is not finite."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def thinned(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return at most `most` points of a curve: the least and the greatest of each stretch, which keeps every spike."""
    if len(x) <= most:
        return x, y
    keep: set[int] = set()
    for stretch in np.array_split(np.arange(len(y)), most // 2):
        values = y[stretch]
        keep.add(int(stretch[np.argmin(np.where(np.isnan(values), np.inf, values))]))
        keep.add(int(stretch[np.argmax(np.where(np.isnan(values), -np.inf, values))]))
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def smoothed(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return the centred moving mean of a curve at up to `most` points, without the values that are not finite."""
    if len(x) > most:
        # Means of stretches first: a moving mean over all points of a long run takes minutes.
        stretches = np.array_split(np.arange(len(y)), most)
        x, y = (np.array([_mean(array[stretch]) for stretch in stretches]) for array in (x, y))
    return x, moving_mean(y, max(1, round(len(y) * SMOOTH_SHARE)) | 1)


def moving_mean(values: Floats, window: int) -> Floats:
    """Return the mean of the finite values in a centred odd window, shorter at both ends; NaN if there are none."""
    half = window // 2
    return np.array([_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
