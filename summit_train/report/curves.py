"""The figures of a run's page, or of several runs overlaid: a table of curves, and the figures that are more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from summit_train.core.run_log import EvalRecord, StepRecord, number
from summit_train.evaluation.confusion import MOST_CLASSES
from summit_train.report import figures
from summit_train.report.figures import Floats, Picture
from summit_train.report.observed import observed_picture
from summit_train.report.records import RunRecord
from summit_train.report.tables import machine_of, views_of

TWICE = "Thin: every step. Thick: moving mean."
# Line styles of the accuracies: of training, validation in training, final evaluation.
KINDS: tuple[dict[str, Any], ...] = ({"linewidth": 1.0}, {"marker": "o", "markersize": 4.0}, {"linestyle": "--"})


_MOST_CELLS = 300  # of an axis; of more, each cell shows the slowest of several
_MOST_NAMED = 6
_DARKEST = 2.0  # times the median
_MARK: dict[str, Any] = {"marker": ">", "markersize": 8, "markeredgecolor": "white", "linestyle": "none"}


class Canvas:
    """A figure being drawn: its axes, the runs on it, and the entries of its legend, which names several runs.

    axis: 'epoch' if the steps per epoch of every run are known, else 'step'. lines: the line style of each run.
    """

    def __init__(self, runs: Sequence[RunRecord], y_label: str, third: bool = False) -> None:
        self.runs = runs
        self.third = third
        self.axis = "step" if any(run.steps_per_epoch is None for run in runs) else "epoch"
        self.width = figures.THIRD if third else figures.WIDTH  # inches, without the legend
        self.height = figures.HEIGHT
        self.lines = [figures.LINES[i // len(figures.PALETTE) % len(figures.LINES)] for i in range(len(runs))]
        self.entries = [
            (Line2D([], [], color=self.colour(i), linestyle=self.lines[i], linewidth=2.5), run.label)
            for i, run in enumerate(runs)
            if len(runs) > 1
        ]
        self.figure = Figure(figsize=(self.width, figures.HEIGHT), layout="constrained")
        self.axes: Axes = self.figure.subplots()
        self.axes.set(xlabel=self.axis, ylabel=y_label)
        for i, run in enumerate(runs):
            for x in self.positions(run, (start.step for start in run.log.starts[1:])):
                self.axes.axvline(x, color=self.colour(i), linewidth=0.9, linestyle=(0, (2, 3)))

    def colour(self, i: int, kind: int = 0) -> str:
        """Return the colour of run i. A single run has a colour for each kind of line."""
        return figures.PALETTE[kind if len(self.runs) == 1 else i % len(figures.PALETTE)]

    def positions(self, run: RunRecord, steps: Iterable[int]) -> Floats:
        """Return the positions of these updates (counted from 1) on the axis, (N,)."""
        per_epoch = (run.steps_per_epoch if self.axis == "epoch" else None) or 1.0
        return np.array(list(steps), dtype=np.float64) / per_epoch

    def picture(self, title: str, caption: str) -> Picture:
        """Write the legend and the SVG."""
        self.axes.set_xlim(left=0)
        figures.add_legend(self.figure, self.entries, "outside lower left")
        self.figure.set_size_inches(self.width, self.height + figures.LEGEND_LINE * len(self.entries))
        machines = dict.fromkeys(machine for run in self.runs if (machine := machine_of(run.environment)))
        dotted = " Dotted vertical: resumed there." if any(run.log.starts[1:] for run in self.runs) else ""
        made_on = f" Machine: {'; '.join(machines)}." if machines else ""
        alt = f"{title} by {self.axis}: {', '.join(run.label for run in self.runs)}"
        return Picture(title, caption + dotted + made_on, alt, figures.image(self.figure), self.third)


@dataclass(frozen=True)
class StepCurve:
    """A figure of one value by step.

    value: of a step; None where the step has none, NaN for a gap. smooth: each step thin, and the moving mean thick.
    least: the vertical axis begins at 0 and reaches this; None: it has the limits of the curve. log: that axis is
    logarithmic. is_stacked: earlier runs have wider lines, which show below equal ones. mark_skipped: a cross at each
    step without an update. validated: the value of a validation, a circle. level: of a run, a dashed line.
    """

    title: str
    unit: str
    value: Callable[[StepRecord], float | None]
    caption: str = TWICE
    smooth: bool = True
    least: float | None = 0.0
    log: bool = False
    is_third: bool = True
    is_stacked: bool = False
    mark_skipped: bool = False
    validated: Callable[[EvalRecord], float | None] | None = None
    level: Callable[[RunRecord], float | None] | None = None

    def draw(self, runs: Sequence[RunRecord]) -> Picture | None:
        """Draw the curves of the runs; None if none has a finite value."""
        canvas = Canvas(runs, self.unit, self.is_third)
        drawn = [self._draw_run(canvas, i, run) for i, run in enumerate(runs)]
        if not any(drawn):
            return None
        caption = self.caption
        if self.validated and any(self.validated(one) is not None for run in runs for one in run.log.evals):
            caption += " Circles: on the validation videos."
        if self.mark_skipped and any(run.log.skipped_steps for run in runs):
            caption += " Cross: step without an update."
        if self.log:
            log_axis(canvas.axes)
        elif self.least is not None:
            canvas.axes.set_ylim(0, max(self.least, 1.04 * canvas.axes.get_ylim()[1]))
        return canvas.picture(self.title, caption)

    def _draw_run(self, canvas: Canvas, i: int, run: RunRecord) -> bool:
        """Draw the curve of run i; return whether it has a finite value."""
        axes = canvas.axes
        colour = canvas.colour(i)
        points = [(step.step, value) for step in run.log.steps if (value := self.value(step)) is not None]
        x = canvas.positions(run, [step for step, _ in points])
        y = figures.finite(value for _, value in points)
        if self.smooth:
            axes.plot(*figures.thinned(x, y), color=colour, linewidth=0.7, alpha=0.35)
        curve = figures.smoothed(x, y) if self.smooth else figures.thinned(x, y)
        wider = 1.2 * min(len(canvas.runs) - 1 - i, 3) if self.is_stacked else 0.0
        axes.plot(*curve, canvas.lines[i], color=colour, linewidth=1.6 + wider)
        if self.validated is not None:
            validated = canvas.positions(run, (one.step for one in run.log.evals))
            axes.plot(
                validated, figures.finite(map(self.validated, run.log.evals)), color=canvas.colour(i, 1), **KINDS[1]
            )
        if self.mark_skipped:
            crosses = canvas.positions(run, run.log.skipped_steps)
            low = np.full_like(crosses, 0.03)
            axes.plot(crosses, low, "x", color=canvas.colour(i, 2), transform=axes.get_xaxis_transform())
        if self.level is not None and (level := self.level(run)) is not None:
            axes.axhline(level, color=canvas.colour(i, 1), linestyle="--", linewidth=1.0)
        return bool(np.isfinite(y).any())


def log_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with few ticks in plain numbers, also within one decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def accuracy(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw the main measure: of training batches (moving mean), validation in training, final evaluation with one std.

    Training batches have top-1 only.
    """
    names_of = dict.fromkeys(run.measures.main.name for run in runs)
    canvas = Canvas(runs, f"{' or '.join(names_of)} (%)")
    kinds: dict[str, int] = {}
    names = list(canvas.entries)
    for i, run in enumerate(runs):
        kinds |= _accuracy_curves(canvas, i, run)
    if not kinds:
        return None
    canvas.axes.set_ylim(0, min(103.0, max(10.0, canvas.axes.get_ylim()[1])))
    if len(runs) > 1:
        finals = [f": {run.final.text(run.measures.main)}" if run.final else "" for run in runs]
        canvas.entries = [(line, label + final) for (line, label), final in zip(names, finals, strict=True)]
        canvas.entries += [(Line2D([], [], color=figures.GREY, **KINDS[kind]), label) for label, kind in kinds.items()]
    has_band = any(run.final is not None and run.final.of(f"{run.measures.main.key}_std") for run in runs)
    band = " Band: one standard deviation (n - 1) over the last checkpoints." if has_band else ""
    trained = "Training: moving mean over the batches." if "training" in kinds else ""
    return canvas.picture("Accuracy", trained + band)


def _accuracy_curves(canvas: Canvas, i: int, run: RunRecord) -> dict[str, int]:
    """Draw the accuracies that run i has; return label -> index into KINDS."""
    kinds: dict[str, int] = {}
    axes = canvas.axes
    colours = [canvas.colour(i, kind) for kind in range(len(KINDS))]
    main = run.measures.main
    top1 = figures.finite(step.top1 for step in run.log.steps)
    if main.key == "top1" and np.isfinite(top1).any():
        curve = figures.smoothed(canvas.positions(run, (step.step for step in run.log.steps)), top1)
        canvas.entries.append((axes.plot(*curve, color=colours[0], **KINDS[0])[0], "training"))
        kinds["training"] = 0
    if run.log.evals:
        x = canvas.positions(run, (validation.step for validation in run.log.evals))
        y = figures.finite(validation.of(main.key) for validation in run.log.evals)
        canvas.entries.append((axes.plot(x, y, color=colours[1], **KINDS[1])[0], "validation"))
        kinds["validation"] = 1
    if run.final is not None and (mean := run.final.of(f"{main.key}_mean")) is not None:
        label = f"final, {views}" if (views := views_of(run.final)) else "final"
        canvas.entries.append((axes.axhline(mean, color=colours[2], **KINDS[2]), f"{label}: {run.final.text(main)}"))
        if std := run.final.of(f"{main.key}_std"):
            axes.axhspan(mean - std, mean + std, color=colours[2], alpha=0.2, linewidth=0)
        kinds[label] = 2
    return kinds


def trust_ratios(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw each layer's trust ratio, thin, and the median of a run's, thick, as Figure 12 of You et al. (2019)."""
    if not any(run.log.trust_ratios for run in runs):
        return None
    canvas = Canvas(runs, "trust ratio")
    canvas.axes.set_yscale("log")
    for i, run in enumerate(runs):
        if run.log.trust_ratios:
            x = canvas.positions(run, (record.step for record in run.log.trust_ratios))
            names = run.log.trust_ratios[-1].ratios
            layers = np.array([[r.ratios.get(name, np.nan) for name in names] for r in run.log.trust_ratios])
            canvas.axes.plot(x, layers, color=canvas.colour(i), linewidth=0.5, alpha=0.35)
            canvas.axes.plot(x, np.median(layers, axis=1), canvas.lines[i], color=canvas.colour(i, 1), linewidth=1.8)
    return canvas.picture("Trust ratio", "Thin: each layer. Thick: the median of the layers.")


def classes(run: RunRecord) -> Picture | None:
    """Shade the main measure of each class by the epoch of the validation; of more than 30, the lowest at the end."""
    evals = [one for one in run.log.evals if one.classes and len(one.classes) == len(run.log.evals[-1].classes)]
    if not evals:
        return None
    values = np.array([figures.finite(one.classes) for one in evals]).T
    names = dict(enumerate(run.clips_per_class.sides()["training"] if run.clips_per_class else ()))
    known = [row for row in np.argsort(values[:, -1], kind="stable").tolist() if np.isfinite(values[row]).any()]
    shown = known[:MOST_CLASSES]
    canvas = Canvas([run], "")
    canvas.height = 1.0 + 0.23 * max(len(shown), 10)
    before = [0, *(one.step for one in run.log.evals[: run.log.evals.index(evals[0])])][-1]
    x = canvas.positions(run, [before, *(one.step for one in evals)])
    y = np.arange(len(shown) + 1)
    mesh = canvas.axes.pcolormesh(x, y, values[shown], cmap="Blues", vmin=0, vmax=100, rasterized=True)
    canvas.figure.colorbar(mesh, ax=canvas.axes).set_label(f"{run.measures.main.name} (%)")
    labels = [figures.drawable(names.get(row, str(row)), 24) for row in shown]
    canvas.axes.set_yticks(np.arange(len(shown)) + 0.5, labels, parse_math=False)
    canvas.axes.invert_yaxis()
    canvas.axes.grid(visible=False)
    some = "" if len(shown) == len(known) else f" The {len(shown)} lowest of {len(known):,} are shown."
    each = "A cell is a validation and spans the epochs since the one before."
    return canvas.picture("Classes", f"{each} Sorted by the last, lowest first.{some}")


def ranks(run: RunRecord) -> Picture | None:
    """Draw each rank's own time over the median of the ranks, by window, and mark those that were named as slow.

    None of a run of fewer than three ranks, or of less than a window.
    """
    if not run.log.rank_times:
        return None
    canvas = Canvas([run], "rank")
    num_ranks = max(len(one.compute_s) for one in run.log.rank_times)
    edges, ratios = _cells(run)
    colours = LinearSegmentedColormap.from_list("slow", ["#ffffff", figures.PALETTE[1], "#5c2a00"])
    rows = np.linspace(-0.5, num_ranks - 0.5, len(ratios) + 1)
    x = canvas.positions(run, edges)
    mesh = canvas.axes.pcolormesh(x, rows, ratios, cmap=colours, vmin=1, vmax=_DARKEST, rasterized=True)
    canvas.figure.colorbar(mesh, ax=canvas.axes, extend="max", ticks=[1, 1.3, 1.6, 2]).set_label("times the median")
    named = {slow.rank: slow for slow in run.log.slow_ranks if slow.rank < num_ranks}  # again after a resume
    for slow in named.values():
        step = canvas.positions(run, [slow.step])
        canvas.axes.plot(step, [slow.rank], clip_on=False, color=figures.PALETTE[0], **_MARK)
    labels = [
        f"rank {slow.rank} on {slow.host}: {slow.part.replace('_', ' ')}, named at step {slow.step:,}"
        for slow in list(named.values())[:_MOST_NAMED]
    ]
    if (more := len(named) - _MOST_NAMED) > 0:
        labels.append(f"{more:,} more")
    canvas.entries += [(Line2D([], [], color=figures.PALETTE[0], **_MARK), label) for label in labels]
    canvas.axes.grid(visible=False)
    canvas.axes.set_ylim(rows[0], rows[-1])
    canvas.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    own = "Own time of each rank: data wait, forward, backward and update, without the wait for others."
    return canvas.picture("Ranks", own)


def _cells(run: RunRecord) -> tuple[list[int], Floats]:
    """Return the edges of the windows, in steps, and the ratios to the median, (ranks, windows)."""
    steps = [one.step for one in run.log.rank_times]
    num_ranks = max(len(one.compute_s) for one in run.log.rank_times)
    ratios = np.full((num_ranks, len(steps)), np.nan)  # a run that was resumed may have had fewer ranks
    for i, one in enumerate(run.log.rank_times):
        own = np.array([sum(parts) for parts in zip(one.compute_s, one.data_wait_s, strict=False)])
        if middle := np.median(own):
            ratios[: len(own), i] = own / middle
    length = min((b - a for a, b in pairwise(steps)), default=steps[0])
    starts = _starts(len(steps))
    ratios = np.fmax.reduceat(np.fmax.reduceat(ratios, starts, axis=1), _starts(num_ranks), axis=0)
    return [max(0, steps[0] - length), *(steps[start - 1] for start in starts[1:]), steps[-1]], ratios


def _starts(count: int) -> Sequence[int]:
    """Return the first index of each of at most _MOST_CELLS cells."""
    cells = min(count, _MOST_CELLS)
    return [cell * count // cells for cell in range(cells)]


def wait_share(step: StepRecord) -> float:
    """Return the wait for data, in percent of the step."""
    return 100 * step.data_wait_s / step.step_s if step.step_s > 0 else np.nan


def noise_scale(step: StepRecord) -> float | None:
    """Return the noise scale of a step that measured it, NaN where it is unclear: 0 has no place on the axis."""
    return None if step.gradient_square is None else step.noise_scale or np.nan


FIGURES: tuple[Callable[[Sequence[RunRecord]], Picture | None], ...] = (
    StepCurve(
        "Loss", "loss (nats)", lambda step: step.loss,
        least=None, is_third=False, mark_skipped=True, validated=lambda validation: validation.val_loss,
    ).draw,
    accuracy,
    StepCurve(
        "Learning rate", "learning rate", lambda step: step.lr, "Of every update.", smooth=False, is_stacked=True
    ).draw,
    StepCurve("Throughput", "clips/s, all ranks", lambda step: step.clips_per_second, f"Training only. {TWICE}").draw,
    StepCurve("Data wait", "data wait (% of step time)", wait_share, least=5.0).draw,
    StepCurve(
        "Noise scale", "noise scale (clips)", noise_scale, "Moving average over the measured steps. Dashed: the batch.",
        smooth=False, log=True, level=lambda run: number(run.plan.get("global_batch")),
    ).draw,
    trust_ratios,
    observed_picture,
)  # fmt: skip


def pictures(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw what these runs have data for; classes and ranks of one run alone."""
    with figures.house_style():
        drawn = [draw(runs) for draw in FIGURES]
        if len(runs) == 1:
            drawn += [classes(runs[0]), ranks(runs[0])]
        return [picture for picture in drawn if picture is not None]
