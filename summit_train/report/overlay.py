"""The loss and accuracy curves of many runs in one figure, with one legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from summit_train.core.text import counted, percent
from summit_train.report import figures
from summit_train.report.figures import GREY, LINES, PALETTE, Picture, drawable, finite, smoothed
from summit_train.report.records import RunRecord

MOST_NAMED = len(PALETTE) * len(LINES)  # runs that can be told apart
_WIDTH, _HEIGHT = 13.0, 4.6  # inches


def overlay(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw loss and accuracy of the runs side by side, a row for each measure. None without a step or a validation.

    Of more than 21 runs those of the highest accuracy have a colour and a name, and the others are grey.
    """
    runs = [run for run in runs if run.steps or run.evals]
    if not runs:
        return None
    named = sorted(runs, key=lambda run: (run.measures.main.key, _accuracy(run)), reverse=True)[:MOST_NAMED]
    others = [run for run in runs if run not in named]
    axis = "step" if any(run.steps_per_epoch is None for run in runs) else "epoch"
    measures = list(dict.fromkeys(run.measures.main for run in [*named, *others]))
    with figures.house_style():
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(measures)), layout="constrained")
        rows = dict(zip(measures, figure.subplots(len(measures), 2, sharex=True, squeeze=False), strict=True))
        entries: list[tuple[Line2D, str]] = []
        for i, run in [*((None, run) for run in others), *enumerate(named)]:
            style, main = _style(i), run.measures.main
            losses, accuracies = rows[main]
            per_epoch = (run.steps_per_epoch if axis == "epoch" else None) or 1.0
            steps, validated = (np.array([one.step for one in of]) / per_epoch for of in (run.steps, run.evals))
            losses.plot(*smoothed(steps, finite(step.loss for step in run.steps)), **style)
            accuracies.plot(validated, finite(one.of(main.key) for one in run.evals), marker="o", markersize=3, **style)
            if run.final and (mean := run.final.of(f"{main.key}_mean")) is not None:
                accuracies.plot(run.last_step / per_epoch, mean, "*", markersize=9, **style | {"linestyle": "none"})
            if i is not None:
                line = Line2D([], [], **style | {"linewidth": 2.5})
                entries.append((line, f"{drawable(run.label, 34)}{_result(run)}"))
        if others:
            entries.append((Line2D([], [], **_style(None)), f"{len(others):,} others"))
        for main, panels in rows.items():
            losses, accuracies = panels
            losses.set(xlabel=axis, ylabel="training loss (nats), moving mean", xlim=(0, None))
            highest = min(103.0, 1.05 * accuracies.get_ylim()[1])
            accuracies.set(xlabel=axis, ylabel=f"validation {main.name} (%)", xlim=(0, None), ylim=(0, highest))
        columns = 3 if max(len(label) for _, label in entries) <= 45 else 2
        figures.add_legend(figure, entries, "outside lower left", columns)
        figure.set_size_inches(_WIDTH, _HEIGHT * len(rows) + figures.LEGEND_LINE * -(-len(entries) // columns))
        alt = f"Loss and accuracy by {axis} of {counted(len(runs), 'run')}"
        caption = "Star: final evaluation. Best runs first, by it or the last validation (in brackets)."
        return Picture("Loss and accuracy", caption, alt, figures.image(figure), third=False)


def _style(i: int | None) -> dict[str, Any]:
    """Return colour and line of the i-th named run, or of the others."""
    if i is None:
        return {"color": GREY, "linewidth": 0.6, "alpha": 0.4}
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": LINES[i // len(PALETTE)], "linewidth": 1.6}


def _accuracy(run: RunRecord) -> float:
    key = run.measures.main.key
    value = run.final.of(f"{key}_mean") if run.final else run.evals[-1].of(key) if run.evals else None
    return -1.0 if value is None else value


def _result(run: RunRecord) -> str:
    main = run.measures.main
    if run.final:
        return f": {main.name} {run.final.text(main)}"
    return f": {main.name} ({percent(run.evals[-1].of(main.key))})" if run.evals else ""
