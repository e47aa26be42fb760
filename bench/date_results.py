"""The table and the figure of all results of a task, for bench/date.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from date_tasks import Task
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from summit_train.report.bench import drawn, wrapped
from summit_train.report.figures import GREY, series
from summit_train.report.tables import machine_text
from summit_train.text import NONE, text_table

Result = Mapping[str, Any]
NAMES = {
    "baseline": "baseline",
    "linear": "linear scaling",
    "legw": "DATE without ratio",
    "lars": "DATE with LARS's ratio",
    "date": "DATE",
    "adam": "Adam",
    "grid": "tuned baseline",
}


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
        return NAMES[self.method] + ("" if self.bounds is None else " [{:g}, {:g}]".format(*self.bounds))


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
    """Draw the test figure against the batch (the paper's Figure 16) and, of a grid, against the LR (its Figure 17).

    Runs that are shorter than the longest are left out, and of several LRs all but the best in the first panel.
    """
    if not results:
        return
    longest = max(result["epochs"] for result in results)
    rows = [row for row in rows_of(results) if row.epochs == longest]
    tried = [row for row in rows if row.method == "grid"]
    with drawn(path, wrapped(_caption(task, results, rows)), (10.0, 4.8) if tried else (7.0, 4.8)) as figure:
        panels = figure.subplots(1, 2 if tried else 1, squeeze=False)[0]
        figure.suptitle(task.title, fontsize=12)
        _against_batches(panels[0], task, rows)
        if tried:
            _against_lrs(panels[1], task, rows, tried)
        for axes in panels:
            axes.set_ylabel(f"test {task.metric}" + ("" if task.is_loss else " (%)"))
            axes.legend(loc="best", fontsize=9)


def _caption(task: Task, results: Sequence[Result], rows: Sequence[Row]) -> str:
    machines = "; ".join(dict.fromkeys(machine_text(result["environment"]) for result in results))
    lost = [f"{row.name} at {row.batch:,}, LR {row.peak_lr:.3g}" for row in rows if row.mean is None]
    notes = [
        f"{rows[0].epochs} epochs each. Bars: one standard deviation over seeds. Adam: the best of its LRs.",
        f"Diverged: {'; '.join(lost)}." if lost else "",
        "Grey: published, You et al. 2019." if task.published else "",
        f"Machine: {machines}.",
    ]
    return " ".join(note for note in notes if note)


def _against_batches(axes: Axes, task: Task, rows: Sequence[Row]) -> None:
    curves = _curves(task, rows)
    for i, (name, points) in enumerate(curves.items()):
        style = {**series(i), "capsize": 3, "label": name}
        axes.errorbar([p.batch for p in points], [p.mean for p in points], [p.std or 0.0 for p in points], **style)
    for (method, batch), value in task.published.items():
        axes.plot(batch, value, marker="x", color=GREY, linestyle="", zorder=4)
        axes.annotate(
            f"{NAMES[method]} {value:g}", (batch, value), (-6, -3), textcoords="offset points", fontsize=8, color=GREY,
            ha="right",
        )  # fmt: skip
    _log_axis(axes, sorted({row.batch for row in rows}), "batch (samples a step)", base=2)
    _limit(axes, task, [(p.batch, p) for curve in curves.values() for p in curve])


def _curves(task: Task, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the points of each curve: of several LRs at a batch the best."""
    curves: dict[str, dict[int, Row]] = {}
    best = _best(task)
    for row in rows:
        if row.mean is not None:
            curve = curves.setdefault(row.name, {})
            curve[row.batch] = best(row, curve.get(row.batch, row))
    return {name: [curve[batch] for batch in sorted(curve)] for name, curve in curves.items()}


def _best(task: Task) -> Callable[[Row, Row], Row]:
    def better(one: Row, other: Row) -> Row:
        assert one.mean is not None and other.mean is not None
        return one if (one.mean < other.mean) == task.is_loss else other

    return better


def _against_lrs(axes: Axes, task: Task, rows: Sequence[Row], tried: Sequence[Row]) -> None:
    batch = max(row.batch for row in tried)
    points = sorted((row for row in tried if row.batch == batch and row.mean is not None), key=lambda row: row.lr or 0)
    lrs = [row.lr or task.optimizer.base_lr for row in points]
    axes.errorbar(lrs, [p.mean for p in points], [p.std or 0.0 for p in points], capsize=3, label="tuned baseline")
    others = [row for row in rows if row.batch == batch and row.method in ("date", "legw") and row.mean is not None]
    for i, row in enumerate(others, 1):
        axes.axhline(row.mean or 0.0, linestyle="--", color=series(i)["color"], label=row.name)
    _log_axis(axes, lrs, f"LR at a batch of {batch:,}", base=10)
    _limit(axes, task, [*zip(lrs, points, strict=True), *((lrs[0], row) for row in others)])


def _log_axis(axes: Axes, ticks: Sequence[float], label: str, base: int) -> None:
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}" if x < 1000 else f"{x:,.0f}"))
    axes.set_xlabel(label)


def _limit(axes: Axes, task: Task, places: Sequence[tuple[float, Row]]) -> None:
    """End the axis where the losses or errors are three times the median; write what lies beyond at its edge."""
    values = [row.mean for _, row in places if row.mean is not None]
    best = 0.0 if task.is_loss else 100.0
    edge = best + 3 * (statistics.median(values) - best)
    low, high = axes.get_ylim()
    axes.set_ylim((low, min(high, edge)) if task.is_loss else (max(low, edge), high))
    for x, row in places:
        if row.mean is not None and abs(row.mean - best) > abs(edge - best):
            text, style = f"{row.name} {row.mean:.4g}", {"arrowstyle": "->", "color": GREY}
            up = -1 if task.is_loss else 1
            axes.annotate(
                text, (x, edge), (-12, 24 * up), textcoords="offset points", ha="right", fontsize=8, arrowprops=style
            )
