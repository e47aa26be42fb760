"""Strips of frames in which everything but the foreground of a class activation map is darkened (TSM, Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from summit_train.core.files import replacing
from summit_train.report.figures import GREY, drawable, house_style

ACROSS = 8  # pictures side by side, as in the paper; more go below
_DARKENED = 0.25  # of the background's brightness is left
# Pixels. A picture is drawn as high as it is within these limits.
_LEAST_HEIGHT, _MOST_HEIGHT, _LEAST_WIDTH = 128, 256, 480
_GAP, _MARGIN, _LINE, _SMALL_LINE = 4, 10, 26, 20
_DPI = 100
_MOST_LETTERS = 120


@dataclass(frozen=True)
class Row:
    """The pictures of one network: title, frame numbers (n,), uint8 RGB (n, H, W, 3), and the foreground (n, H, W)."""

    title: str
    frames: Sequence[int]
    pictures: NDArray[np.uint8]
    foreground: NDArray[np.bool_]

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and height that a picture is drawn with."""
        height, width = self.pictures.shape[1:3]
        drawn = min(max(height, _LEAST_HEIGHT), _MOST_HEIGHT)
        return round(width * drawn / height), drawn

    @property
    def num_lines(self) -> int:
        """Return the number of lines of pictures."""
        return -(-len(self.frames) // ACROSS)

    @property
    def width(self) -> int:
        """Return the width of its pictures, side by side."""
        return min(len(self.frames), ACROSS) * (self.size[0] + _GAP) - _GAP

    @property
    def height(self) -> int:
        """Return the height of its pictures with their numbers, and of the title above them."""
        return _LINE + self.num_lines * (self.size[1] + _SMALL_LINE)


def darkened(pictures: NDArray[np.uint8], foreground: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return RGB pictures (..., H, W, 3) whose background, where `foreground` (..., H, W) is false, is darkened."""
    dark: NDArray[np.uint8] = (pictures * _DARKENED).astype(np.uint8)
    return np.where(foreground[..., None], pictures, dark)


def draw_strip(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw the rows below each other, each with its title, and write the PNG at once."""
    width = max(_LEAST_WIDTH, *(row.width for row in rows)) + 2 * _MARGIN
    height = _LINE + sum(row.height for row in rows) + 2 * _MARGIN
    with house_style():
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        top = _MARGIN + _LINE
        _write(figure, title, _MARGIN, top - _LINE / 2, 11, color=GREY)
        for row in rows:
            _write(figure, row.title, _MARGIN, top + _LINE / 2, 11, fontweight="bold")
            _draw(figure, row, top + _LINE)
            top += row.height
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=_DPI)


def _draw(figure: Figure, row: Row, top: float) -> None:
    (width, height), shown = row.size, darkened(row.pictures, row.foreground)
    total_width, total_height = figure.get_size_inches() * _DPI
    for number, (frame, picture) in enumerate(zip(row.frames, shown, strict=True)):
        line, column = divmod(number, ACROSS)
        left, bottom = _MARGIN + column * (width + _GAP), top + line * (height + _SMALL_LINE) + height
        box = (left / total_width, 1 - bottom / total_height, width / total_width, height / total_height)
        axes = figure.add_axes(box)
        axes.imshow(picture, aspect="auto")
        axes.set_axis_off()
        _write(figure, f"frame {frame}", left + width / 2, bottom + _SMALL_LINE / 2, 8, ha="center", most=width)


def _write(
    figure: Figure, text: str, x: float, y: float, size: float, *, most: float | None = None, **style: Any
) -> None:
    """Write a line centred on `y` pixels from the top, in letters small enough for `most` pixels or the figure."""
    width, height = figure.get_size_inches() * _DPI
    written = figure.text(x / width, 1 - y / height, "", va="center", fontsize=size, **style)
    written.set_parse_math(False)
    written.set_text(drawable(text, _MOST_LETTERS))
    room = most or width - 2 * _MARGIN
    while size > 1 and (is_wide := written.get_window_extent().width) > room:
        size = min(0.97 * size, size * room / is_wide)  # letters have whole pixels, so the ratio alone is not enough
        written.set_fontsize(size)
