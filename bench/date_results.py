"""The table and the figure of all results of a task, for bench/date.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from date_tasks import Task
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from summit_train.core.text import NONE, text_table
from summit_train.report.caption import drawn, wrapped
from summit_train.report.figures import GREY, series
from summit_train.report.tables import machine_text
from summit_train.spec.optimizer import TrustRatioSpec

Result = Mapping[str, Any]
_USUAL = TrustRatioSpec(kind="bounded")
NAMES = {
    "baseline": "baseline",
    "linear": "linear scaling",
    "legw": "DATE without ratio",
    "lars": "DATE with LARS's ratio",
    "date": "DATE",
    "adam": "Adam",
    "grid": "tuned baseline",
}
USUAL_BOUNDS = (_USUAL.lower, _USUAL.upper)


@dataclass(frozen=True)
class Row:
    """The runs that differ in the seed alone. mean, std: of the test figure, None where a run diverged or is alone."""

    method: str
    batch: int
    lr: float | None
    bounds: tuple[float, float] | None
    epochs: int
    precision: str
    peak_lr: float
    tests: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """Return the mean over the seeds."""
        known = [test for test in self.tests if test is not None]
        return statistics.fmean(known) if len(known) == len(self.tests) else None

    @property
    def std(self) -> float | None:
        """Return the standard deviation over the seeds."""
        known = [test for test in self.tests if test is not None]
        return statistics.stdev(known) if len(known) == len(self.tests) > 1 else None

    @property
    def name(self) -> str:
        """Return what the figure and the table call it."""
        bounds = " [{:g}, {:g}]".format(*(self.bounds or USUAL_BOUNDS)) if self.method == "date" else ""
        return NAMES[self.method] + bounds


def read_results(folder: Path, task: str) -> list[Result]:
    """Return the results of a task, in the order of methods, batches, LRs and seeds."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}_*_seed*.json"))]
    return sorted((result for result in results if result["task"] == task), key=lambda r: (*_place(r), r["seed"]))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Put the seeds together; `results` in the order of `read_results`."""
    rows = []
    for _, same in groupby(results, _place):
        runs = list(same)
        first = {key: runs[0][key] for key in ("method", "batch", "lr", "epochs", "precision", "peak_lr")}
        bounds = runs[0]["bounds"] and (runs[0]["bounds"][0], runs[0]["bounds"][1])
        rows.append(Row(**first, bounds=bounds, tests=tuple(None if r["diverged"] else r["test"] for r in runs)))
    return rows


def _place(result: Result) -> tuple[Any, ...]:
    order = list(NAMES).index(result["method"])
    return (order, result["bounds"] or [], result["epochs"], result["precision"], result["batch"], result["lr"] or 0.0)


def show_figure(value: float | None, std: float | None = None) -> str:
    """Return a test figure with its deviation for people."""
    if value is None:
        return "diverged"
    return f"{value:.2f}" if std is None else f"{value:.2f} \N{PLUS-MINUS SIGN} {std:.2f}"


def table_text(task: Task, results: Sequence[Result]) -> str:
    """Return the table: a row for each method, batch and LR, with what the paper has for it."""
    if not results:
        return "no results"
    rows = []
    for row in rows_of(results):
        published = task.published.get((row.method, row.batch)) if row.bounds is None else None
        rows.append(
            {
                "method": row.name,
                "batch": f"{row.batch:,}",
                "peak LR": f"{row.peak_lr:.4g}",
                "epochs": str(row.epochs),
                "precision": row.precision,
                "seeds": str(len(row.tests)),
                f"test {task.metric}": show_figure(row.mean, row.std),
                "published": NONE if published is None else f"{published:g}",
            }
        )
    return f"{task.title}\n{text_table(rows)}"


# --- the figure


def write_figure(path: Path, task: Task, results: Sequence[Result]) -> None:
    """Draw the test error or perplexity against the batch (the paper's Figure 16) and, of a grid, the LR (Figure 17).

    Runs that are shorter than the longest are left out, and of several LRs all but the best in the first panel.
    """
    if not results:
        return
    longest = max(result["epochs"] for result in results)
    rows = [row for row in rows_of(results) if row.epochs == longest]
    finished = [row for row in rows if row.mean is not None]
    tried = [row for row in finished if row.method == "grid"]
    with drawn(path, wrapped(_caption(task, results, rows)), (12.0 if tried else 10.0, 4.8)) as figure:
        panels = figure.subplots(1, 2 if tried else 1, squeeze=False)[0]
        figure.suptitle(task.title, fontsize=12)
        colours = {name: series(i) for i, name in enumerate(dict.fromkeys(row.name for row in finished))}
        _against_batches(panels[0], task, finished, colours)
        if tried:
            _against_lrs(panels[1], task, finished, colours)
        for axes in panels:
            _log_y(axes, "test perplexity" if task.is_loss else "test error (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)


def _caption(task: Task, results: Sequence[Result], rows: Sequence[Row]) -> str:
    machines = "; ".join(dict.fromkeys(machine_text(result["environment"]) for result in results))
    lost = [f"{row.name} at {row.batch:,}, LR {row.peak_lr:.3g}" for row in rows if row.mean is None]
    notes = [
        f"{rows[0].epochs} epochs each. Bars: one standard deviation over seeds. Adam, tuned baseline: the best LR.",
        f"Diverged: {'; '.join(lost)}." if lost else "",
        "Grey crosses: You et al. 2019." if task.published else "",
        f"Machine: {machines}.",
    ]
    return " ".join(note for note in notes if note)


def _y(task: Task, value: float) -> float:
    """Return a test figure as it is drawn, less being better: the error of an accuracy."""
    return value if task.is_loss else max(100 - value, 0.01)


def _points(axes: Axes, task: Task, xs: Sequence[float], rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    means = [_y(task, row.mean) for row in rows if row.mean is not None]
    axes.errorbar(xs, means, [row.std or 0.0 for row in rows], capsize=3, **style)


def _against_batches(axes: Axes, task: Task, rows: Sequence[Row], colours: Mapping[str, Mapping[str, Any]]) -> None:
    for name, points in _curves(task, rows).items():
        _points(axes, task, [point.batch for point in points], points, {**colours[name], "label": name})
    for (method, batch), value in task.published.items():
        label = "published" if method == next(iter(task.published))[0] else None
        axes.plot(batch, _y(task, value), "x", color=GREY, markersize=8, zorder=4, label=label)
        right = batch == task.batches[0]
        axes.annotate(
            NAMES[method], (batch, _y(task, value)), (9 if right else -9, 5), textcoords="offset points", fontsize=8,
            color=GREY, ha="left" if right else "right",
        )  # fmt: skip
    _log_x(axes, sorted({row.batch for row in rows}), "batch (samples a step)")


def _curves(task: Task, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the points of each curve: of several LRs at a batch the best."""
    curves: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.mean is not None:
            curve = curves.setdefault(row.name, {})
            curve[row.batch] = min(row, curve.get(row.batch, row), key=lambda one: _y(task, one.mean or 0.0))
    return {name: [curve[batch] for batch in sorted(curve)] for name, curve in curves.items()}


def _against_lrs(axes: Axes, task: Task, rows: Sequence[Row], colours: Mapping[str, Mapping[str, Any]]) -> None:
    batch = max(row.batch for row in rows if row.method == "grid")
    points = sorted((row for row in rows if row.method == "grid" and row.batch == batch), key=lambda row: row.lr or 0)
    lrs = [row.lr or task.optimizer.base_lr for row in points]
    _points(axes, task, lrs, points, colours[NAMES["grid"]])
    for row in rows:
        if row.batch == batch and row.method in ("date", "legw") and row.mean is not None:
            axes.axhline(_y(task, row.mean), linestyle="--", color=colours[row.name]["color"])
    _log_x(axes, lrs, f"baseline's LR at a batch of {batch:,}")


def _log_x(axes: Axes, ticks: Sequence[float], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(min(ticks) / 1.5, max(ticks) * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1000 else f"{x:,.0f}"))
    axes.set_xlabel(label)


def _log_y(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}" if y < 1000 else f"{y:,.0f}"))
    axes.set_ylabel(label)
