"""The house style of figures, and those of one run or of several runs overlaid. Drawn by matplotlib without pyplot.

Colours: the set of Okabe and Ito (jfly.uni-koeln.de/color), which is safe for the colour-blind.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from summit_train.core.files import replacing
from summit_train.core.run_log import StepRecord, number
from summit_train.core.text import counted, numbered
from summit_train.report.records import RunRecord
from summit_train.report.results import Observed
from summit_train.report.tables import MOST_CLASSES, machine_of, views_of

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")  # for more runs than colours
GREY = "#555555"
FONT = "DejaVu Sans"  # shipped with matplotlib
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
MOST_LABEL = 60  # characters
CAPTION_LETTERS = 140  # of a line below a figure of 10 inches
MOST_POINTS = 1500  # of one curve; a long run has 250,000 steps
SMOOTH_SHARE = 1 / 30  # window of the moving mean / length of the curve
# Line styles of the accuracies: of training, validation in training, final evaluation.
KINDS: tuple[dict[str, Any], ...] = ({"linewidth": 1.0}, {"marker": "o", "markersize": 4.0}, {"linestyle": "--"})
_X, _Y = "observed part of each video (%)", "top-1 (%)"
CLIP: dict[str, Any] = {"linestyle": "-", "markersize": 5}
STREAM: dict[str, Any] = {"linestyle": "--", "markersize": 5, "markerfacecolor": "white"}
TWICE = "Thin: every step. Thick: moving mean."

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Picture:
    """A drawn figure. alt: text in place of the picture. third: three fit in a row."""

    title: str
    caption: str
    alt: str
    svg: bytes
    third: bool

    @property
    def uri(self) -> str:
        """Return the SVG as a data URI, so that the page needs no other file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


def image(figure: Figure, kind: str = "svg") -> bytes:
    """Return the figure as a file: svg, png or pdf. Without a date or a version: equal figures have equal bytes."""
    content = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[kind]
    figure.savefig(content, format=kind, dpi="figure" if kind == "svg" else 150, metadata=metadata)
    return content.getvalue()


def wrapped(caption: str) -> str:
    """Break the lines of a caption at the width of a figure."""
    return "\n".join(textwrap.fill(line, CAPTION_LETTERS, break_on_hyphens=False) for line in caption.splitlines())


@contextmanager
def drawn(path: Path, caption: str, inches: tuple[float, float] = (10.0, 4.4)) -> Iterator[Figure]:
    """Yield a figure to draw on; then add the caption below it and write the file at once."""
    with house_style():
        figure = Figure(figsize=inches, layout="constrained")
        yield figure
        figure.supxlabel(caption.replace("$", r"\$"), fontsize=9, color=GREY)
        with replacing(path) as file:
            file.write(image(figure, path.suffix[1:]))


def add_legend(figure: Figure, entries: Sequence[tuple[Line2D, str]], place: Any, columns: int = 1) -> None:
    """Add a legend whose labels are drawn as they are."""
    if not entries:
        return
    # Placeholders first: matplotlib omits a label that begins with "_" and reads one with "$" as a formula.
    legend = figure.legend([line for line, _ in entries], ["entry"] * len(entries), loc=place, ncols=columns)
    for text, (_, label) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(drawable(label))


class Canvas:
    """A figure being drawn: its axes, the runs on it, and the entries of its legend, which names several runs.

    axis: 'epoch' if the steps per epoch of every run are known, else 'step'. lines: the line style of each run.
    """

    def __init__(self, runs: Sequence[RunRecord], y_label: str, third: bool = False) -> None:
        self.runs, self.third = runs, third
        self.axis = "step" if any(run.steps_per_epoch is None for run in runs) else "epoch"
        self.width, self.height = THIRD if third else WIDTH, HEIGHT  # inches, without the legend
        self.lines = [LINES[i // len(PALETTE) % len(LINES)] for i in range(len(runs))]
        self.entries = [
            (Line2D([], [], color=self.colour(i), linestyle=self.lines[i], linewidth=2.5), run.label)
            for i, run in enumerate(runs)
            if len(runs) > 1
        ]
        self.figure = Figure(figsize=(self.width, HEIGHT), layout="constrained")
        self.axes: Axes = self.figure.subplots()
        self.axes.set(xlabel=self.axis, ylabel=y_label)
        for i, run in enumerate(runs):
            for x in self.positions(run, (start.step for start in run.log.starts[1:])):
                self.axes.axvline(x, color=self.colour(i), linewidth=0.9, linestyle=(0, (2, 3)))

    def colour(self, i: int, kind: int = 0) -> str:
        """Return the colour of run i. A single run has a colour for each kind of line."""
        return PALETTE[kind if len(self.runs) == 1 else i % len(PALETTE)]

    def positions(self, run: RunRecord, steps: Iterable[int]) -> Floats:
        """Return the positions of these updates (counted from 1) on the axis, (N,)."""
        per_epoch = (run.steps_per_epoch if self.axis == "epoch" else None) or 1.0
        return np.array(list(steps), dtype=np.float64) / per_epoch

    def picture(self, title: str, caption: str) -> Picture:
        """Write the legend and the SVG."""
        self.axes.set_xlim(left=0)
        add_legend(self.figure, self.entries, "outside lower left")
        self.figure.set_size_inches(self.width, self.height + LEGEND_LINE * len(self.entries))
        machines = dict.fromkeys(machine for run in self.runs if (machine := machine_of(run.environment)))
        dotted = " Dotted vertical: resumed there." if any(run.log.starts[1:] for run in self.runs) else ""
        made_on = f" Machine: {'; '.join(machines)}." if machines else ""
        alt = f"{title} by {self.axis}: {', '.join(run.label for run in self.runs)}"
        return Picture(title, caption + dotted + made_on, alt, image(self.figure), self.third)


def pictures(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw what these runs have data for: loss, accuracy, LR, throughput, data wait, noise scale, ..."""
    wait_share = lambda s: 100 * s.data_wait_s / s.step_s if s.step_s > 0 else np.nan  # noqa: E731
    with house_style():
        drawn = (
            _steps(runs, "Loss", "loss (nats)", lambda s: s.loss),
            _accuracy(runs),
            _steps(runs, "Learning rate", "learning rate", lambda s: s.lr, "Of every update.", smooth=False),
            _steps(runs, "Throughput", "clips/s, all ranks", lambda s: s.clips_per_second, f"Training only. {TWICE}"),
            _steps(runs, "Data wait", "data wait (% of step time)", wait_share, least=5.0),
            _noise_scale(runs),
            _trust_ratios(runs),
            _observed(runs),
            _classes(runs[0]) if len(runs) == 1 else None,
        )
        return [picture for picture in drawn if picture is not None]


def drawable(text: str, most: int = MOST_LABEL) -> str:
    """Cut a name to a length that fits, and replace each character that the font lacks by a white square."""
    known = FT2Font(findfont(FONT)).get_charmap()
    cut = text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if c.isprintable() and ord(c) in known else "\N{WHITE SQUARE}" for c in cut)


def series(i: int) -> dict[str, Any]:
    """Return the colour and the marker of curve i."""
    return {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}


def log_ticks(axes: Axes, ticks: Sequence[float], base: int = 10) -> None:
    """Make the horizontal axis logarithmic, with these ticks alone, in plain numbers."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(ticks, [f"{tick:,}" if isinstance(tick, int) else f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in our style, whatever the user's matplotlibrc says, and restore the settings afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _steps(
    runs: Sequence[RunRecord],
    title: str,
    y_label: str,
    value: Callable[[StepRecord], float],
    caption: str = TWICE,
    smooth: bool = True,
    least: float = 0.0,
) -> Picture | None:
    """Draw a value of every step, thin, and its moving mean, thick. None if no run has a finite value.

    The vertical axis begins at 0 and reaches `least`, except for the loss, which marks skipped steps.
    """
    is_loss, known, has_validation = title == "Loss", False, False
    canvas = Canvas(runs, y_label, third=not is_loss)
    for i, run in enumerate(runs):
        x, y = canvas.positions(run, (s.step for s in run.log.steps)), finite(map(value, run.log.steps))
        known |= bool(np.isfinite(y).any())
        if smooth:
            canvas.axes.plot(*thinned(x, y), color=canvas.colour(i), linewidth=0.7, alpha=0.35)
        # Curves without noise may coincide: earlier ones are wider and show under later ones.
        width = 1.6 if smooth else 1.6 + 1.2 * min(len(runs) - 1 - i, 3)
        curve = smoothed(x, y) if smooth else thinned(x, y)
        canvas.axes.plot(*curve, canvas.lines[i], color=canvas.colour(i), linewidth=width)
        if is_loss:
            validated = canvas.positions(run, (one.step for one in run.log.evals))
            losses = finite(one.val_loss for one in run.log.evals)
            has_validation |= bool(np.isfinite(losses).any())
            canvas.axes.plot(validated, losses, color=canvas.colour(i, 1), **KINDS[1])
            crosses, floor = canvas.positions(run, run.log.skipped_steps), canvas.axes.get_xaxis_transform()
            canvas.axes.plot(crosses, np.full_like(crosses, 0.03), "x", color=canvas.colour(i, 2), transform=floor)
    if not known:
        return None
    if not is_loss:
        canvas.axes.set_ylim(0, max(least, 1.04 * canvas.axes.get_ylim()[1]))
    skipped = is_loss and any(run.log.skipped_steps for run in runs)
    caption += " Circles: on the validation videos." if has_validation else ""
    return canvas.picture(title, caption + (" Cross: step without an update." if skipped else ""))


def _noise_scale(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw the noise scale of the runs that measured it, and their batches. None if it is nowhere clear."""
    canvas, known = Canvas(runs, "noise scale (clips)", third=True), False
    for i, run in enumerate(runs):
        steps = [step for step in run.log.steps if step.gradient_square is not None]
        y = finite(step.noise_scale or None for step in steps)  # 0 has no place on the axis
        known |= bool(np.isfinite(y).any())
        x = canvas.positions(run, (step.step for step in steps))
        canvas.axes.plot(*thinned(x, y), canvas.lines[i], color=canvas.colour(i), linewidth=1.6)
        if (batch := number(run.plan.get("global_batch"))) is not None:
            canvas.axes.axhline(batch, color=canvas.colour(i, 1), linestyle="--", linewidth=1.0)
    if not known:
        return None
    _log_axis(canvas.axes)
    return canvas.picture("Noise scale", "Moving average over the measured steps. Dashed: the batch.")


def _trust_ratios(runs: Sequence[RunRecord]) -> Picture | None:
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


def _log_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with few ticks in plain numbers, also within one decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _accuracy(runs: Sequence[RunRecord]) -> Picture | None:
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
        canvas.entries += [(Line2D([], [], color=GREY, **KINDS[kind]), label) for label, kind in kinds.items()]
    has_band = any(run.final is not None and run.final.of(f"{run.measures.main.key}_std") for run in runs)
    band = " Band: one standard deviation (n - 1) over the last checkpoints." if has_band else ""
    trained = "Training: moving mean over the batches." if "training" in kinds else ""
    return canvas.picture("Accuracy", trained + band)


def _accuracy_curves(canvas: Canvas, i: int, run: RunRecord) -> dict[str, int]:
    """Draw the accuracies that run i has; return label -> index into KINDS."""
    kinds: dict[str, int] = {}
    axes, colours = canvas.axes, [canvas.colour(i, kind) for kind in range(len(KINDS))]
    main = run.measures.main
    top1 = finite(step.top1 for step in run.log.steps)
    if main.key == "top1" and np.isfinite(top1).any():
        curve = smoothed(canvas.positions(run, (step.step for step in run.log.steps)), top1)
        canvas.entries.append((axes.plot(*curve, color=colours[0], **KINDS[0])[0], "training"))
        kinds["training"] = 0
    if run.log.evals:
        x = canvas.positions(run, (validation.step for validation in run.log.evals))
        y = finite(validation.of(main.key) for validation in run.log.evals)
        canvas.entries.append((axes.plot(x, y, color=colours[1], **KINDS[1])[0], "validation"))
        kinds["validation"] = 1
    if run.final is not None and (mean := run.final.of(f"{main.key}_mean")) is not None:
        label = f"final, {views}" if (views := views_of(run.final)) else "final"
        canvas.entries.append((axes.axhline(mean, color=colours[2], **KINDS[2]), f"{label}: {run.final.text(main)}"))
        if std := run.final.of(f"{main.key}_std"):
            axes.axhspan(mean - std, mean + std, color=colours[2], alpha=0.2, linewidth=0)
        kinds[label] = 2
    return kinds


def _classes(run: RunRecord) -> Picture | None:
    """Shade the main measure of each class by the epoch of the validation; of more than 30, the lowest at the end."""
    evals = [one for one in run.log.evals if one.classes and len(one.classes) == len(run.log.evals[-1].classes)]
    if not evals:
        return None
    values = np.array([finite(one.classes) for one in evals]).T
    names = dict(enumerate(run.clips_per_class.sides()["training"] if run.clips_per_class else ()))
    known = [row for row in np.argsort(values[:, -1], kind="stable").tolist() if np.isfinite(values[row]).any()]
    shown = known[:MOST_CLASSES]
    canvas = Canvas([run], "")
    canvas.height = 1.0 + 0.23 * max(len(shown), 10)
    before = [0, *(one.step for one in run.log.evals[: run.log.evals.index(evals[0])])][-1]
    x, y = canvas.positions(run, [before, *(one.step for one in evals)]), np.arange(len(shown) + 1)
    mesh = canvas.axes.pcolormesh(x, y, values[shown], cmap="Blues", vmin=0, vmax=100, rasterized=True)
    canvas.figure.colorbar(mesh, ax=canvas.axes).set_label(f"{run.measures.main.name} (%)")
    labels = [drawable(names.get(row, str(row)), 24) for row in shown]
    canvas.axes.set_yticks(np.arange(len(shown)) + 0.5, labels, parse_math=False)
    canvas.axes.invert_yaxis()
    canvas.axes.grid(visible=False)
    some = "" if len(shown) == len(known) else f" The {len(shown)} lowest of {len(known):,} are shown."
    each = "A cell is a validation and spans the epochs since the one before."
    return canvas.picture("Classes", f"{each} Sorted by the last, lowest first.{some}")


# Early recognition: accuracy against the observed part of each video, as in Figures 7 and 8 of the TSM paper.


def draw_observed(path: Path, runs: Sequence[Observed]) -> None:
    """Draw the curves of several runs, numbered where several have one name."""
    curves = dict(zip(numbered([run.name for run in runs], "{} ({})"), runs, strict=True))
    with drawn(path, wrapped(_observed_caption(runs)), (10.0, 5.0)) as figure:
        add_legend(figure, [*_draw_observed(figure, curves), *_kinds(runs)], "outside right upper")


def _observed(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw the runs that have curves of early recognition. None if no run has any."""
    found = {run.label: run.observed for run in runs}
    curves = [curve for curve in found.values() if curve]
    if not curves:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    names = _draw_observed(figure, found)
    entries = [*(names if len(runs) > 1 else []), *_kinds(curves)]
    figure.set_size_inches(WIDTH, HEIGHT + LEGEND_LINE * len(entries))
    add_legend(figure, entries, "outside lower left")
    alt = f"Early recognition, {_Y} by {_X}: {', '.join(label for label in found if found[label])}"
    return Picture("Early recognition", _observed_caption(curves), alt, image(figure), third=False)


def _draw_observed(figure: Figure, runs: Mapping[str, Observed | None]) -> list[tuple[Line2D, str]]:
    """Draw the runs that have curves; return their names. Run i has its colour also if those before it have none."""
    axes, names = figure.subplots(), list[tuple[Line2D, str]]()
    for i, (label, run) in enumerate(runs.items()):
        if run is None:
            continue
        names.append((Line2D([], [], markersize=5, **series(i)), label))
        for curve, style in ((run.observed, CLIP), (run.anytime, STREAM)):
            percents = [100 * point.fraction for point in curve]
            axes.plot(percents, finite(point.of("top1") for point in curve), **style, **series(i))
    axes.set(xlabel=_X, ylabel=_Y, xlim=(0, 103))
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(103.0, high))
    return names


def _kinds(runs: Sequence[Observed]) -> list[tuple[Line2D, str]]:
    """Return the legend's entries for the two kinds of curves, if there are both."""
    if not any(run.anytime for run in runs):
        return []
    clip = Line2D([], [], color=GREY, marker="o", markersize=5)
    return [(clip, "a clip of the part"), (Line2D([], [], color=GREY, marker="o", **STREAM), "the stream so far")]


def _observed_caption(runs: Sequence[Observed]) -> str:
    """Return what is drawn, as exactly as the runs agree on it."""
    frames, videos = ({getattr(run, key) for run in runs} for key in ("frames", "videos"))
    of = f"{frames.pop()}" if len(frames) == 1 else "T"
    count = f" {counted(videos.pop(), 'video')}." if len(videos) == 1 and None not in videos else ""
    streams = any(run.anytime for run in runs)
    stream = " Dashed: the average of a stream's logits over the frames of the part." if streams else ""
    what = "Early recognition, as in Figures 7 and 8 of the TSM paper (journal version)."
    return f"{what} Solid: {of} frames, taken uniformly from the observed part.{stream}{count}"


# A curve is prepared for drawing: gaps, thinning, moving mean.


def finite(values: Iterable[float | None]) -> Floats:
    """Return an array, (N,), with NaN for every value that is not finite."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return at most 1,500 points of a curve: the least and the greatest of each stretch, which keeps every spike."""
    if len(x) <= MOST_POINTS:
        return x, y
    keep: set[int] = set()
    for stretch in np.array_split(np.arange(len(y)), MOST_POINTS // 2):
        values = y[stretch]
        keep.add(int(stretch[np.argmin(np.where(np.isnan(values), np.inf, values))]))
        keep.add(int(stretch[np.argmax(np.where(np.isnan(values), -np.inf, values))]))
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def smoothed(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the centred moving mean of a curve at up to 1,500 points, without the values that are not finite."""
    x, y = stretches(x, y)  # first: a moving mean over all points of a long run takes minutes
    return x, moving_mean(y, max(1, round(len(y) * SMOOTH_SHARE)) | 1) if len(y) else y


def stretches(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the means of a curve over 1,500 stretches; a curve of fewer points as it is."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(MOST_POINTS) * len(x) // MOST_POINTS
    x, y = (_means(lambda values: np.add.reduceat(values, starts), array) for array in (x, y))
    return x, y


def moving_mean(values: Floats, window: int) -> Floats:
    """Return the mean of the finite values in a centred odd window, shorter at both ends; NaN without any."""
    return _means(lambda array: np.convolve(array, np.ones(window), "same"), values)


def _means(sums: Callable[[Floats], Floats], values: Floats) -> Floats:
    """Return the sums of the finite values / the sums of their numbers; NaN for 0 / 0."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return sums(np.where(known, values, 0.0)) / sums(known.astype(np.float64))
