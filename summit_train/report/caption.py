"""A figure with its caption below it, in one file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

from summit_train.core.files import replacing
from summit_train.report.figures import GREY, house_style

_CAPTION_LETTERS = 140  # of a line below a figure of 10 inches


def wrapped(caption: str) -> str:
    """Break the lines of a caption at the width of a figure."""
    return "\n".join(textwrap.fill(line, _CAPTION_LETTERS, break_on_hyphens=False) for line in caption.splitlines())


@contextmanager
def drawn(path: Path, caption: str, inches: tuple[float, float] = (10.0, 4.4)) -> Iterator[Figure]:
    """Yield a figure to draw on; then add the caption below it and write the file at once.

    Without a date: equal figures have equal bytes.
    """
    with house_style():
        figure = Figure(figsize=inches, layout="constrained")
        yield figure
        figure.supxlabel(caption.replace("$", r"\$"), fontsize=9, color=GREY)
        kind = path.suffix[1:]
        date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        with replacing(path) as file:
            figure.savefig(file, format=kind, dpi=150, metadata=date)
