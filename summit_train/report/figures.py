"""The figures of one run, or of several laid over each other: drawn by matplotlib without pyplot, as SVG.

Colours: the set of Okabe and Ito (jfly.uni-koeln.de/color), which the colour-blind can tell apart too.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D

from summit_train.report.curves import (
    Floats,
    axis_name,
    finite,
    positions,
    restarts,
    smoothed,
    thinned,
    wait_share,
)
from summit_train.report.metrics import FinalEval, Run, StepRecord
from summit_train.report.tables import machine_of, views_of
from summit_train.text import mean_std

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")  # for more runs than colours
GREY = "#555555"
FONT = "DejaVu Sans"  # matplotlib brings it along
STYLE: dict[Any, Any] = {
    "font.family": FONT,
    "font.size": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "summit-train",  # the same run gives the same bytes
}
WIDTH, THIRD, HEIGHT, LEGEND_LINE = 6.4, 4.3, 3.3, 0.22  # inches; two wide figures in a row, or three narrow
MOST_LABEL = 60  # letters


@dataclass(frozen=True)
class Picture:
    """A drawn figure: heading, caption, a text for who cannot see it, the SVG; `third`: three go in a row."""

    title: str
    caption: str
    alt: str
    svg: bytes
    third: bool

    @property
    def uri(self) -> str:
        """As a data URI, so that the page needs no other file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


@dataclass
class Canvas:
    """A figure being drawn: its axes, the runs on it, and the legend's entries so far."""

    runs: Sequence[Run]
    y_label: str
    third: bool = False
    figure: Figure = field(init=False)
    axes: Axes = field(init=False)
    entries: list[tuple[Artist, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.figure = Figure(figsize=(self.width, HEIGHT), layout="constrained")
        self.axes = self.figure.subplots()
        self.axes.set_xlabel(self.axis)
        self.axes.set_ylabel(self.y_label)
        for i, run in enumerate(self.runs):
            for x in positions(run, restarts(run), self.axis):
                self.axes.axvline(x, color=self.colour(i), linewidth=0.9, linestyle=(0, (2, 3)))

    @property
    def width(self) -> float:
        """Inches."""
        return THIRD if self.third else WIDTH

    @property
    def axis(self) -> str:
        """Of the horizontal axis: epoch or step."""
        return axis_name(self.runs)

    def colour(self, i: int, kind: int = 0) -> str:
        """Of run i; a run that is alone has a colour for each kind of line."""
        return PALETTE[kind if len(self.runs) == 1 else i % len(PALETTE)]

    def line(self, i: int) -> Literal["-", "--", ":"]:
        """Line style of run i."""
        return LINES[i // len(PALETTE) % len(LINES)]

    def from_zero(self, least: float = 0.0) -> None:
        """Let the vertical axis begin at zero, and go to `least` at least."""
        self.axes.set_ylim(0, max(least, 1.04 * self.axes.get_ylim()[1]))

    def picture(self, title: str, caption: str) -> Picture:
        """Write the legend and the SVG."""
        self.axes.set_xlim(left=0)
        self._legend()
        machines = dict.fromkeys(machine for run in self.runs if (machine := machine_of(run.environment)))
        dotted = " Dotted upright: resumed there." if any(map(restarts, self.runs)) else ""
        made_on = f" Machine: {'; '.join(machines)}." if machines else ""
        names = ", ".join(run.label for run in self.runs)
        svg = io.BytesIO()
        self.figure.savefig(svg, format="svg", metadata={"Date": None})
        return Picture(
            title, caption + dotted + made_on, f"{title} by {self.axis}: {names}", svg.getvalue(), self.third
        )

    def _legend(self) -> None:
        if not self.entries:
            return
        # Placeholders first: a name that opens with "_" would be left out and one with "$" read as a formula.
        artists = [artist for artist, _ in self.entries]
        legend = self.figure.legend(artists, ["entry"] * len(artists), loc="outside lower left")
        for text, (_, label) in zip(legend.get_texts(), self.entries, strict=True):
            text.set_parse_math(False)
            text.set_text(drawable(label))
        self.figure.set_size_inches(self.width, HEIGHT + LEGEND_LINE * len(artists))


def pictures(runs: Sequence[Run]) -> list[Picture]:
    """The figures that these runs have data for: loss, accuracy, learning rate, throughput, data wait."""
    with house_style():
        drawn = (draw(runs) for draw in (loss, accuracy, learning_rate, throughput, data_wait))
        return [picture for picture in drawn if picture is not None]


def loss(runs: Sequence[Run]) -> Picture | None:
    """Loss of the training batches; crosses where the update was skipped."""
    canvas = _step_curves(runs, "training loss (nats)", lambda step: step.loss)
    if canvas is None:
        return None
    for i, run in enumerate(runs):
        x = positions(run, run.skipped_steps, canvas.axis)
        floor = canvas.axes.get_xaxis_transform()
        canvas.axes.plot(x, np.full(x.shape, 0.03), "x", color=canvas.colour(i, 1), transform=floor)
    crosses = " Cross: step without an update." if any(run.skipped_steps for run in runs) else ""
    return canvas.picture("Loss", "Thin: every step. Thick: moving mean." + crosses)


def learning_rate(runs: Sequence[Run]) -> Picture | None:
    """The learning rate of every update."""
    canvas = _step_curves(runs, "learning rate", lambda step: step.lr, third=True, smooth=False)
    if canvas is None:
        return None
    canvas.from_zero()
    return canvas.picture("Learning rate", "Of every update.")


def throughput(runs: Sequence[Run]) -> Picture | None:
    """Clips per second over all ranks."""
    canvas = _step_curves(runs, "clips/s, all ranks", lambda step: step.clips_per_second, third=True)
    if canvas is None:
        return None
    canvas.from_zero()
    return canvas.picture("Throughput", "Training only. Thin: every step. Thick: moving mean.")


def data_wait(runs: Sequence[Run]) -> Picture | None:
    """The share of each step in which the device waited for data."""
    canvas = _step_curves(runs, "data wait (% of step time)", wait_share, third=True)
    if canvas is None:
        return None
    canvas.from_zero(least=5.0)
    return canvas.picture("Data wait", "Thin: every step. Thick: moving mean.")


def accuracy(runs: Sequence[Run]) -> Picture | None:
    """Top-1: training batches (moving mean), validation in training, final evaluation with one std."""
    canvas = Canvas(runs, "top-1 (%)")
    kinds: dict[str, int] = {}
    for i, run in enumerate(runs):
        kinds |= _accuracy_of(canvas, i, run)
    if not kinds:
        return None
    canvas.axes.set_ylim(0, min(103.0, max(10.0, canvas.axes.get_ylim()[1])))
    if len(runs) > 1:
        canvas.entries = [(_run_line(canvas, i), _with_final(run)) for i, run in enumerate(runs)]
        canvas.entries += [(_style_line(kind), label) for label, kind in kinds.items()]
    band = " Band: one standard deviation over the last checkpoints." if any(map(_has_band, runs)) else ""
    return canvas.picture("Accuracy", "Training: moving mean over the batches." + band)


def drawable(text: str) -> str:
    """A name cut to a length that fits, with a white square for each letter that the font lacks."""
    known = FT2Font(findfont(FONT)).get_charmap()
    cut = text if len(text) <= MOST_LABEL else text[: MOST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if c.isprintable() and ord(c) in known else "\N{WHITE SQUARE}" for c in cut)


@contextmanager
def house_style() -> Iterator[None]:
    """Draw as we want it, whatever the user's matplotlibrc says, and leave no trace."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _step_curves(
    runs: Sequence[Run],
    y_label: str,
    value: Callable[[StepRecord], float],
    *,
    third: bool = False,
    smooth: bool = True,
) -> Canvas | None:
    """A value of every step: thin as it is, thick its moving mean. None if no run has any."""
    canvas, known = Canvas(runs, y_label, third), False
    for i, run in enumerate(runs):
        x, y = positions(run, (s.step for s in run.steps), canvas.axis), finite(value(s) for s in run.steps)
        known |= bool(np.isfinite(y).any())
        if smooth:
            canvas.axes.plot(*thinned(x, y), color=canvas.colour(i), linewidth=0.7, alpha=0.35)
        # Curves without noise may lie on each other exactly: the first are wider and show under the later.
        width = 1.6 if smooth else 1.6 + 1.2 * min(len(runs) - 1 - i, 3)
        curve = smoothed(x, y) if smooth else thinned(x, y)
        canvas.axes.plot(*curve, canvas.line(i), color=canvas.colour(i), linewidth=width)
        if len(runs) > 1:
            canvas.entries.append((_run_line(canvas, i), run.label))
    return canvas if known else None


def _accuracy_of(canvas: Canvas, i: int, run: Run) -> dict[str, int]:
    """Draw one run's three kinds of accuracy; which ones it has, as label -> kind."""
    kinds: dict[str, int] = {}
    top1 = finite(step.top1 for step in run.steps)
    if np.isfinite(top1).any():
        x = positions(run, (step.step for step in run.steps), canvas.axis)
        _plot(canvas, i, 0, smoothed(x, top1), "training")
        kinds["training"] = 0
    if run.evals:
        x = positions(run, (validation.step for validation in run.evals), canvas.axis)
        _plot(canvas, i, 1, (x, finite(validation.top1 for validation in run.evals)), "validation")
        kinds["validation"] = 1
    if run.final is not None:
        label = f"final, {views}" if (views := views_of(run.final)) else "final"
        _final_line(canvas, i, run.final, label)
        kinds[label] = 2
    return kinds


def _plot(canvas: Canvas, i: int, kind: int, xy: tuple[Floats, Floats], label: str) -> None:
    line = _style_line(kind, canvas.colour(i, kind), xy)
    canvas.axes.add_line(line)
    canvas.axes.autoscale_view()
    canvas.entries.append((line, label))


def _final_line(canvas: Canvas, i: int, final: FinalEval, label: str) -> None:
    line = _style_line(2, canvas.colour(i, 2))
    canvas.axes.axhline(final.top1_mean, color=line.get_color(), linestyle=line.get_linestyle())
    if final.top1_std:
        low, high = final.top1_mean - final.top1_std, final.top1_mean + final.top1_std
        canvas.axes.axhspan(low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    canvas.entries.append((line, f"{label}: {mean_std(final.top1_mean, final.top1_std)}"))


def _style_line(kind: int, colour: str = GREY, xy: tuple[Floats, Floats] | None = None) -> Line2D:
    """Training thin, validation with dots, final dashed; without points it is for the legend."""
    style: dict[str, Any] = ({"linewidth": 1.0}, {"marker": "o", "markersize": 4.0}, {"linestyle": "--"})[kind]
    return Line2D(*(xy or ([], [])), color=colour, **style)


def _run_line(canvas: Canvas, i: int) -> Line2D:
    return Line2D([], [], color=canvas.colour(i), linestyle=canvas.line(i), linewidth=2.5)


def _has_band(run: Run) -> bool:
    return run.final is not None and bool(run.final.top1_std)


def _with_final(run: Run) -> str:
    if run.final is None:
        return run.label
    return f"{run.label}: {mean_std(run.final.top1_mean, run.final.top1_std)}"
