"""A video as its list names it: path, span, direction and region. Equal clips of two lists are one video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from summit_train.core.text import printable
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.span import TO_THE_END, WHOLE, Span


@dataclass(frozen=True, order=True)
class Clip:
    """A video as its list names it: path, span, direction and region."""

    path: str
    span: Span = WHOLE
    is_reversed: bool = False
    region: Region = WHOLE_FRAME

    def __str__(self) -> str:
        span = "" if self.span == WHOLE else f" {self.span}"
        region = "" if self.region == WHOLE_FRAME else f" ({self.region})"
        return f"{printable(self.path)}{span}{region}{' backwards' if self.is_reversed else ''}"

    def values(self) -> dict[str, Any]:
        """Return what JSON has of it. A clip that is a part of its file, or plays backwards, says so."""
        values: dict[str, Any] = {"path": self.path} | ({"reversed": True} if self.is_reversed else {})
        if self.span != WHOLE:
            end = None if self.span.end == TO_THE_END else self.span.end
            values |= {"start_frame": self.span.start, "end_frame": end}
        return values | ({} if self.region == WHOLE_FRAME else self.region._asdict())


def clip_columns(clips: Sequence[Clip]) -> list[tuple[object, ...]]:
    """Return the header and the cells of clips for a table that is a manifest.

    The frames of spans, the regions and the directions are columns where a clip has them.
    """
    columns: list[tuple[object, ...]] = [("path", *(clip.path for clip in clips))]
    if any(clip.span != WHOLE for clip in clips):
        columns += zip(("start_frame", "end_frame"), *(clip.span.cells for clip in clips), strict=True)
    if any(clip.region != WHOLE_FRAME for clip in clips):
        columns += zip(Region._fields, *(clip.region.cells for clip in clips), strict=True)
    if any(clip.is_reversed for clip in clips):
        columns.append(("reversed", *(int(clip.is_reversed) for clip in clips)))
    return list(zip(*columns, strict=True))
