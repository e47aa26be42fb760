"""The house style of figures, and how curves are prepared for them. Drawn by matplotlib without pyplot.

Colours: the set of Okabe and Ito (jfly.uni-koeln.de/color), which is safe for the colour-blind.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from summit_train.core.files import replacing

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
WIDTH = 6.4  # inches; two wide figures in a row, or three narrow
THIRD = 4.3
HEIGHT = 3.3
LEGEND_LINE = 0.22
MOST_LABEL = 60  # characters
CAPTION_LETTERS = 140  # of a line below a figure of 10 inches
MOST_POINTS = 1500  # of one curve; a long run has 250,000 steps
SMOOTH_SHARE = 1 / 30  # window of the moving mean / length of the curve

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
