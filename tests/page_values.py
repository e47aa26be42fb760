"""A report's page as lines of text, with the values of its figures in place of their pictures."""

from __future__ import annotations

import base64
import difflib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

SVG = "data:image/svg+xml;base64"
MOST_POINTS = 12  # of a line that is written out
BLOCKS = ("h1", "h2", "h3", "p", "li", "tr", "figcaption", "pre", "img")


def check_golden(golden: Path, make_lines: Callable[[], Iterable[str]]) -> None:
    """Fail with the lines that differ from the golden file; they are made in an empty folder."""
    differing = list(difflib.unified_diff(golden.read_text("utf-8").splitlines(), made(make_lines), n=0, lineterm=""))
    assert not differing, "\n".join(differing)


def write_golden(golden: Path, make_lines: Callable[[], Iterable[str]]) -> None:
    golden.write_text("".join(f"{line}\n" for line in made(make_lines)), encoding="utf-8")


def made(make_lines: Callable[[], Iterable[str]]) -> list[str]:
    """The lines, with the values of figures in place of their pictures."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Figure, "savefig", save_values)
        return list(make_lines())


def save_values(figure: Figure, content: IO[bytes], **options: Any) -> None:
    """Write what a figure shows as text, in place of `Figure.savefig`."""
    width, height = figure.get_size_inches()
    lines = [f"{width:.2f} x {height:.2f} inches", *(text.get_text() for text in figure.texts)]
    lines += [line for axes in figure.axes for line in axes_values(axes)]
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    content.write("\n".join([*lines, f"legend: {'; '.join(names)}"] if names else lines).encode())


def axes_values(axes: Axes) -> Iterator[str]:
    """Yield the names and limits of the axes, then each line, area, picture and text on them."""
    if axes.get_label() == "<colorbar>":
        yield f"colours: {axes.get_ylabel()}"
        return
    x, y = (numbers(limits, 4, " to ") for limits in (axes.get_xlim(), axes.get_ylim()))
    if title := axes.get_title() or axes.get_title(loc="left"):
        yield title
    yield f"axes: {axes.get_xlabel()} {x}, {axes.get_ylabel()} {y}, {axes.get_yscale()}"
    if isinstance(axes.xaxis.get_major_locator(), FixedLocator):
        yield f"ticks {axes.get_xscale()}: {', '.join(label.get_text() for label in axes.get_xticklabels())}"
    for line in axes.lines:
        style = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_marker()} {line.get_linewidth():g}"
        points = np.asarray(line.get_xydata())
        shown = [numbers(point, 6, " ") for point in points]
        if len(points) > MOST_POINTS:
            shown[3:-3] = [f"... {len(points) - 6} points", f"in all {numbers(np.nansum(points, 0), 6, ' ')}"]
        yield f"line {style}: {', '.join(shown)}"
    for patch in axes.patches:
        yield f"area {numbers(patch.get_extents().transformed(axes.transData.inverted()).extents, 6)}"
    for picture in (*axes.collections, *axes.images):
        if isinstance(picture, LineCollection):  # error bars
            yield f"bars {'; '.join(numbers(np.ravel(bar), 6) for bar in picture.get_segments())}"
            continue
        if isinstance(picture, PathCollection):
            sizes = zip(picture.get_offsets(), picture.get_sizes(), strict=False)
            discs = [f"{numbers(place, 6)} of {size:.6g}" for place, size in sizes]
            yield f"discs {to_hex(picture.get_facecolor()[0])} {'; '.join(discs)}"
            continue
        yield f"cells {numbers(np.ma.getdata(picture.get_array()).ravel(), 6)}"
        if isinstance(picture, QuadMesh):
            yield f"edges {numbers(picture.get_coordinates()[0, :, 0], 6)}"
        yield f"rows {', '.join(label.get_text() for label in axes.get_yticklabels())}"
    if axes.texts:
        yield f"texts {', '.join(text.get_text() for text in axes.texts)}"


def numbers(values: Iterable[float], digits: int, between: str = ", ") -> str:
    return between.join(f"{round(value, 12) + 0.0:.{digits}g}" for value in values)


class PageLines(HTMLParser):
    """The lines of a page: one a heading, paragraph, row of a table and value of a figure; bars divide cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines = [""]
        self._is_unseen = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_unseen = tag in ("title", "style", "script")
        if tag in BLOCKS:
            self.lines.append("")
        if tag in ("td", "th") and self.lines[-1]:
            self.lines[-1] += " | "
        if tag == "img":
            values = dict(attrs)
            kind, _, content = (values["src"] or "").partition(",")
            drawn = base64.b64decode(content).decode().splitlines() if kind == SVG else []
            self.lines += [f"[{values['alt']}]", *drawn, ""]

    def handle_endtag(self, tag: str) -> None:
        self._is_unseen = False
        if tag in BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._is_unseen:
            self.lines[-1] += data


def page_text(page: str) -> str:
    """Return a page's text. Several spaces are one, and lines without text are left out."""
    found = (" ".join(line.split()) for line in PageLines(page).lines)
    return "".join(f"{line}\n" for line in found if line)
