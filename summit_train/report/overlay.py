"""The loss and accuracy curves of many runs in one figure, with one legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from summit_train.core.text import percent
from summit_train.report import figures
from summit_train.report.figures import GREY, LINES, PALETTE, Picture, drawable, finite, smoothed
from summit_train.report.records import Run

MOST_NAMED = len(PALETTE) * len(LINES)  # runs that can be told apart
_WIDTH, _HEIGHT = 13.0, 4.6  # inches


def overlay(runs: Sequence[Run]) -> Picture | None:
    """Draw loss and accuracy of the runs side by side. None where no run has a step or a validation.

    Of more than 21 runs those of the highest accuracy have a colour and a name, and the others are grey.
    """
    runs = [run for run in runs if run.steps or run.evals]
    if not runs:
        return None
    named = sorted(runs, key=lambda run: (run.measures.main.key, _accuracy(run)), reverse=True)[:MOST_NAMED]
    others = [run for run in runs if run not in named]
    axis = "step" if any(run.steps_per_epoch is None for run in runs) else "epoch"
    with figures.house_style():
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        losses, accuracies = figure.subplots(1, 2, sharex=True)
        entries: list[tuple[Line2D, str]] = []
        for i, run in [*((None, run) for run in others), *enumerate(named)]:
            style = _style(i)
            per_epoch = (run.steps_per_epoch if axis == "epoch" else None) or 1.0
            steps, validated = (np.array([one.step for one in of]) / per_epoch for of in (run.steps, run.evals))
            losses.plot(*smoothed(steps, finite(step.loss for step in run.steps)), **style)
            key = run.measures.main.key
            accuracies.plot(validated, finite(one.of(key) for one in run.evals), marker="o", markersize=3, **style)
            if run.final:
                end = run.last_step / per_epoch
                accuracies.plot(end, run.final.of(f"{key}_mean"), "*", markersize=9, **style | {"linestyle": "none"})
            if i is not None:
                line = Line2D([], [], **style | {"linewidth": 2.5})
                entries.append((line, f"{drawable(run.label, 40)}{_result(run)}"))
        if others:
            entries.append((Line2D([], [], **_style(None)), f"{len(others):,} others"))
        measures = ", ".join(dict.fromkeys(run.measures.main.name for run in runs))
        for axes, label in ((losses, "training loss (nats), moving mean"), (accuracies, f"validation {measures} (%)")):
            axes.set(xlabel=axis, ylabel=label, xlim=(0, None))
        accuracies.set_ylim(0, min(103.0, 1.05 * accuracies.get_ylim()[1]))
        columns = 3 if max(len(label) for _, label in entries) <= 45 else 2
        figures.add_legend(figure, entries, "outside lower left", columns)
        figure.set_size_inches(_WIDTH, _HEIGHT + figures.LEGEND_LINE * -(-len(entries) // columns))
        alt = f"Loss and accuracy by {axis} of {len(runs):,} runs"
        caption = "Star: final evaluation. Best runs first, by it or the last validation (in brackets)."
        return Picture("Loss and accuracy", caption, alt, figures.image(figure), third=False)


def _style(i: int | None) -> dict[str, Any]:
    """Return colour and line of the i-th named run, or of the others."""
    if i is None:
        return {"color": GREY, "linewidth": 0.6, "alpha": 0.4}
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": LINES[i // len(PALETTE)], "linewidth": 1.6}


def _accuracy(run: Run) -> float:
    key = run.measures.main.key
    value = run.final.of(f"{key}_mean") if run.final else run.evals[-1].of(key) if run.evals else None
    return -1.0 if value is None else value


def _result(run: Run) -> str:
    if run.final:
        return f": {run.final.text(run.measures.main)}"
    return f": ({percent(run.evals[-1].of(run.measures.main.key))})" if run.evals else ""
