"""A figure with its caption below it, in one file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

from summit_train.core.files import replacing
from summit_train.report.figures import GREY, house_style, image

_CAPTION_LETTERS = 140  # of a line below a figure of 10 inches


def wrapped(caption: str) -> str:
    """Break the lines of a caption at the width of a figure."""
    return "\n".join(textwrap.fill(line, _CAPTION_LETTERS, break_on_hyphens=False) for line in caption.splitlines())


@contextmanager
def drawn(path: Path, caption: str, inches: tuple[float, float] = (10.0, 4.4)) -> Iterator[Figure]:
    """Yield a figure to draw on; then add the caption below it and write the file at once."""
    with house_style():
        figure = Figure(figsize=inches, layout="constrained")
        yield figure
        figure.supxlabel(caption.replace("$", r"\$"), fontsize=9, color=GREY)
        with replacing(path) as file:
            file.write(image(figure, path.suffix[1:]))
