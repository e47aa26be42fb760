"""Strips of frames in which everything but the foreground of a class activation map is darkened (TSM, Figure 14)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from summit_train.core.files import replacing
from summit_train.report.figures import drawable, house_style

ACROSS = 8  # most pictures side by side, as in the paper
_DARKENED = 0.25  # of the background's brightness is left
_DPI, _LEAST_HEIGHT, _MOST_HEIGHT, _LEAST_WIDTH = 100, 128, 256, 480  # pixels; a picture keeps its height within them
_LETTERS_PER_INCH, _MOST_LETTERS = 12, 120


def draw_strip(
    path: Path, titles: Sequence[str], frames: Sequence[int], pictures: NDArray[np.uint8], foreground: NDArray[np.bool_]
) -> None:
    """Write a PNG of the pictures, uint8 RGB (n, H, W, 3), with their frame numbers and their foreground (n, H, W).

    Each title is cut to 120 characters and wrapped.
    """
    height = min(max(pictures.shape[1], _LEAST_HEIGHT), _MOST_HEIGHT) / _DPI
    width = height * pictures.shape[2] / pictures.shape[1]
    inches = max(_LEAST_WIDTH / _DPI, len(frames) * (width + 0.05))
    text = "\n".join(textwrap.fill(drawable(one, _MOST_LETTERS), int(_LETTERS_PER_INCH * inches)) for one in titles)
    shown = np.where(foreground[..., None], pictures, (pictures * _DARKENED).astype(np.uint8))
    with house_style():
        size = (inches, height + 0.25 + 0.2 * (1 + text.count("\n")) + 0.1)
        layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
        figure = Figure(figsize=size, dpi=_DPI, layout=layout)
        figure.suptitle(text, fontsize=10, parse_math=False)
        all_axes = figure.subplots(1, len(frames), squeeze=False).ravel()
        for axes, frame, picture in zip(all_axes, frames, shown, strict=True):
            axes.set_axis_off()
            axes.imshow(picture)
            axes.set_title(f"frame {frame}", fontsize=8, pad=2)
        with replacing(path) as file:
            figure.savefig(file, format="png")
