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


def draw_strip(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw the rows below each other, each with its title, and write the PNG at once."""
    heights = [min(max(row.pictures.shape[1], _LEAST_HEIGHT), _MOST_HEIGHT) for row in rows]
    widths = [round(h * row.pictures.shape[2] / row.pictures.shape[1]) for row, h in zip(rows, heights, strict=True)]
    across = [min(len(row.frames), ACROSS) * (w + _GAP) - _GAP for row, w in zip(rows, widths, strict=True)]
    down = [-(-len(row.frames) // ACROSS) * (h + _SMALL_LINE) for row, h in zip(rows, heights, strict=True)]
    total_width = max(_LEAST_WIDTH, *across) + 2 * _MARGIN
    total_height = _LINE * (1 + len(rows)) + sum(down) + 2 * _MARGIN
    with house_style():
        figure = Figure(figsize=(total_width / _DPI, total_height / _DPI), dpi=_DPI)
        top = _MARGIN + _LINE
        _write(figure, title, _MARGIN, top - _LINE / 2, 11, color=GREY)
        for row, width, height, lines in zip(rows, widths, heights, down, strict=True):
            _write(figure, row.title, _MARGIN, top + _LINE / 2, 11, fontweight="bold")
            shown = np.where(row.foreground[..., None], row.pictures, (row.pictures * _DARKENED).astype(np.uint8))
            for number, (frame, picture) in enumerate(zip(row.frames, shown, strict=True)):
                line, column = divmod(number, ACROSS)
                left = _MARGIN + column * (width + _GAP)
                bottom = top + _LINE + line * (height + _SMALL_LINE) + height
                box = (left / total_width, 1 - bottom / total_height, width / total_width, height / total_height)
                axes = figure.add_axes(box)
                axes.imshow(picture, aspect="auto")
                axes.set_axis_off()
                _write(figure, f"frame {frame}", left + width / 2, bottom + _SMALL_LINE / 2, 8, ha="center", most=width)
            top += _LINE + lines
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=_DPI)


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
