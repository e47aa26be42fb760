"""The loss and accuracy curves of many runs in one figure, with one legend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from summit_train.core.text import counted, percent
from summit_train.evaluation.measures import Measure
from summit_train.report import figures
from summit_train.report.figures import GREY, LINES, PALETTE, Floats, Picture, drawable, finite, smoothed, stretches
from summit_train.report.records import RunRecord

MOST_NAMED = len(PALETTE) * len(LINES)  # runs that can be told apart
_WIDTH = 13.0  # inches
_HEIGHT = 4.6


@dataclass
class RunCurves:
    """The curves of a run in at most 1,500 points, as the records of hundreds of long runs fit in no memory.

    main: the measure. losses, accuracies: (steps, values), of training and of validation. mean: of the final
    evaluation. result: the mean, or in brackets the last validation. score: by which the best runs come first.
    """

    main: Measure
    losses: tuple[Floats, Floats]
    accuracies: tuple[Floats, Floats]
    last_step: int
    steps_per_epoch: float | None
    mean: float | None = None
    result: str = ""
    score: float = -1.0

    @classmethod
    def of(cls, run: RunRecord) -> RunCurves:
        log = run.log
        main = run.measures.main
        losses = stretches(finite(one.step for one in log.steps), finite(one.loss for one in log.steps))
        accuracies = finite(one.step for one in log.evals), finite(one.of(main.key) for one in log.evals)
        curves = cls(main, losses, accuracies, log.last_step, run.steps_per_epoch)
        score = None
        if run.final:
            score = curves.mean = run.final.of(f"{main.key}_mean")
            curves.result = f": {main.name} {run.final.text(main)}"
        elif log.evals:
            score = log.evals[-1].of(main.key)
            curves.result = f": {main.name} ({percent(score)})"
        if score is not None:
            curves.score = score
        return curves


def overlay(runs: Mapping[str, RunCurves]) -> Picture | None:
    """Draw loss and accuracy of the runs side by side, a row for each measure. None without a step or a validation.

    runs: by their names. Of more than 21 those of the highest accuracy have a colour and a name, the others are grey.
    """
    known = {name: run for name, run in runs.items() if len(run.losses[0]) or len(run.accuracies[0])}
    if not known:
        return None
    ranked = sorted(known, key=lambda name: (known[name].main.key, known[name].score), reverse=True)
    named = ranked[:MOST_NAMED]
    others = [name for name in known if name not in named]
    axis = "step" if any(run.steps_per_epoch is None for run in known.values()) else "epoch"
    measures = list(dict.fromkeys(known[name].main for name in [*named, *others]))
    with figures.house_style():
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(measures)), layout="constrained")
        rows = dict(zip(measures, figure.subplots(len(measures), 2, sharex=True, squeeze=False), strict=True))
        entries: list[tuple[Line2D, str]] = []
        for i, name in [*((None, name) for name in others), *enumerate(named)]:
            run = known[name]
            style = _style(i)
            losses, accuracies = rows[run.main]
            per_epoch = (run.steps_per_epoch if axis == "epoch" else None) or 1.0
            steps, values = run.losses
            losses.plot(*smoothed(steps / per_epoch, values), **style)
            steps, values = run.accuracies
            accuracies.plot(steps / per_epoch, values, marker="o", markersize=3, **style)
            if run.mean is not None:
                star = style | {"linestyle": "none"}
                accuracies.plot(run.last_step / per_epoch, run.mean, "*", markersize=9, **star)
            if i is not None:
                line = Line2D([], [], **style | {"linewidth": 2.5})
                entries.append((line, f"{drawable(name, 34)}{run.result}"))
        if others:
            entries.append((Line2D([], [], **_style(None)), f"{len(others):,} others"))
        for main, (losses, accuracies) in rows.items():
            losses.set(xlabel=axis, ylabel="training loss (nats), moving mean", xlim=(0, None))
            highest = min(103.0, 1.05 * accuracies.get_ylim()[1])
            accuracies.set(xlabel=axis, ylabel=f"validation {main.name} (%)", xlim=(0, None), ylim=(0, highest))
        columns = 3 if max(len(label) for _, label in entries) <= 45 else 2
        figures.add_legend(figure, entries, "outside lower left", columns)
        figure.set_size_inches(_WIDTH, _HEIGHT * len(rows) + figures.LEGEND_LINE * -(-len(entries) // columns))
        alt = f"Loss and accuracy by {axis} of {counted(len(known), 'run')}"
        caption = "Star: final evaluation. Best runs first, by it or the last validation (in brackets)."
        return Picture("Loss and accuracy", caption, alt, figures.image(figure), third=False)


def _style(i: int | None) -> dict[str, Any]:
    """Return colour and line of the i-th named run, or of the others."""
    if i is None:
        return {"color": GREY, "linewidth": 0.6, "alpha": 0.4}
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": LINES[i // len(PALETTE)], "linewidth": 1.6}
