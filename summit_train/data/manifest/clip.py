"""A video as its list names it: path, span and direction. Equal clips of two lists are one video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from summit_train.core.text import printable
from summit_train.data.video.span import TO_THE_END, WHOLE, Span


@dataclass(frozen=True, order=True)
class Clip:
    """A video as its list names it: path, span and direction."""

    path: str
    span: Span = WHOLE
    is_reversed: bool = False

    def __str__(self) -> str:
        span = "" if self.span == WHOLE else f" {self.span}"
        return f"{printable(self.path)}{span}{' backwards' if self.is_reversed else ''}"

    def values(self) -> dict[str, Any]:
        """Return what JSON has of it. A clip that is a span of its file, or plays backwards, says so."""
        values: dict[str, Any] = {"path": self.path} | ({"reversed": True} if self.is_reversed else {})
        if self.span != WHOLE:
            end = None if self.span.end == TO_THE_END else self.span.end
            values |= {"start_frame": self.span.start, "end_frame": end}
        return values


def clip_columns(clips: Sequence[Clip]) -> list[tuple[object, ...]]:
    """Return the header and the cells of clips for a table that is a manifest.

    The frames of spans and the directions are columns where a clip has them.
    """
    columns: dict[str, list[object]] = {"path": [clip.path for clip in clips]}
    if any(clip.span != WHOLE for clip in clips):
        for number, name in enumerate(("start_frame", "end_frame")):
            columns[name] = [clip.span.cells[number] for clip in clips]
    if any(clip.is_reversed for clip in clips):
        columns["reversed"] = [int(clip.is_reversed) for clip in clips]
    return [tuple(columns), *zip(*columns.values(), strict=True)]
