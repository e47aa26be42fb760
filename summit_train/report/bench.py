"""Figures of the benches in the layout of the paper's Figure 3: bars, bars of two parts, lines over ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.report.figures import GREY, PALETTE, drawable, house_style
from summit_train.report.scaling import MARKERS, finish

_CAPTION_LETTERS = 140  # of a line below a figure of 10 inches


@dataclass(frozen=True)
class Bar:
    """A median with its least and most; `note` stands above it."""

    label: str
    median: float
    low: float
    high: float
    note: str


@dataclass(frozen=True)
class Panel:
    """Bars side by side, and what their height means."""

    title: str
    y_label: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Step:
    """One network's step in seconds: what is computed, and the wait for data on top."""

    label: str
    busy_s: float
    wait_s: float
    note: str


@dataclass(frozen=True)
class Curve:
    """Percent of ideal at each number of ranks: medians, least and most."""

    label: str
    ranks: Sequence[int]
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw_panels(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """Figure 3a: one panel beside the other."""
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for i, bar in enumerate(panel.bars):
                error = [[bar.median - bar.low], [bar.high - bar.median]]
                axes.bar(i, bar.median, 0.6, color=PALETTE[i % len(PALETTE)], yerr=error, capsize=4, ecolor=GREY)
                _above(axes, i, bar.high, bar.note)
            _name_bars(axes, [bar.label for bar in panel.bars], panel.y_label)
            axes.set_title(panel.title)
        finish(figure, _wrapped(caption), path)


def draw_steps(path: Path, steps: Sequence[Step], caption: str) -> None:
    """Figure 3b: the whole step, and the part of it that waits for data."""
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        axes = figure.subplots()
        positions = range(len(steps))
        busy = [step.busy_s for step in steps]
        axes.bar(positions, busy, 0.6, color=PALETTE[0], label="computation and update")
        axes.bar(positions, [s.wait_s for s in steps], 0.6, bottom=busy, color=PALETTE[1], label="wait for data")
        for i, step in enumerate(steps):
            _above(axes, i, step.busy_s + step.wait_s, step.note)
        _name_bars(axes, [step.label for step in steps], "seconds of a training step")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        finish(figure, _wrapped(caption), path)


def draw_scalability(path: Path, curves: Sequence[Curve], caption: str) -> None:
    """Figure 3c: speed over ideal speed against ranks."""
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        axes = figure.subplots()
        for i, curve in enumerate(curves):
            below = [median - low for median, low in zip(curve.median, curve.low, strict=True)]
            above = [high - median for median, high in zip(curve.median, curve.high, strict=True)]
            style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "capsize": 4}
            axes.errorbar(curve.ranks, curve.median, yerr=[below, above], label=drawable(curve.label), **style)  # type: ignore[arg-type]
        axes.axhline(100, linestyle="--", color=GREY, label="ideal")
        ranks = sorted({count for curve in curves for count in curve.ranks})
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("scalability (% of ideal speed)")
        axes.set_ylim(0, max(110.0, 1.05 * max(max(curve.high) for curve in curves)))
        axes.legend(loc="lower left")
        finish(figure, _wrapped(caption), path)


def _above(axes: Axes, x: float, y: float, note: str) -> None:
    axes.annotate(note, (x, y), xytext=(0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=9)


def _name_bars(axes: Axes, labels: Sequence[str], y_label: str) -> None:
    axes.set_xticks(range(len(labels)), [drawable(label).replace(", ", "\n") for label in labels])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for two lines of notes


def _wrapped(caption: str) -> str:
    return "\n".join(textwrap.fill(line, _CAPTION_LETTERS, break_on_hyphens=False) for line in caption.splitlines())
