"""The rows of a manifest as they are written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from summit_train.core.files import write_text
from summit_train.data.video.span import TO_THE_END, Span


@dataclass(frozen=True)
class ManifestRow:
    """One row of a manifest file. label: an integer or a class name. None becomes an empty cell.

    num_frames: of the whole video. start_frame, end_frame: set if the clip is a span of it; the end is exclusive.
    duration, codec: for people; not read back, because other lists may use these names for other things.
    others: names and cells of further columns; a field of the same name takes precedence.
    """

    path: str
    label: int | str
    num_frames: int | None = None
    fps: float | None = None
    width: int | None = None
    height: int | None = None
    group: str | None = None
    sha256: str | None = None
    reversed: bool = False
    start_frame: int | None = None
    end_frame: int | None = None
    duration: float | None = None
    codec: str | None = None
    others: tuple[tuple[str, str], ...] = ()

    def cells(self) -> dict[str, object]:
        """Return the cells to write, by column, without empty ones."""
        others = {name: cell for name, cell in self.others if cell}
        own = {name: value for name, value in vars(self).items() if name != "others"}
        return others | {name: value for name, value in own.items() if value is not None and value is not False}

    @property
    def span(self) -> Span:
        """Return the clip's frames in its video."""
        return Span(self.start_frame or 0, TO_THE_END if self.end_frame is None else self.end_frame)

    def with_span(self, span: Span) -> ManifestRow:
        """Return the row with other frames of the video."""
        return replace(self, start_frame=span.start or None, end_frame=None if span.end == TO_THE_END else span.end)


def write_manifest(path: str | Path, rows: Iterable[ManifestRow]) -> None:
    """Write a manifest CSV, whole or not at all. Optional columns that no row fills are left out."""
    rows = list(rows)
    filled = dict.fromkeys(chain(("path", "label"), chain.from_iterable(row.cells() for row in rows)))
    own = [field.name for field in fields(ManifestRow) if field.name in filled]
    names = [*own, *(name for name in filled if name not in own)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() | {"reversed": int(row.reversed)} for row in rows)
    write_text(path, text.getvalue())
