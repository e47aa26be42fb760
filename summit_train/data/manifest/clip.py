"""A clip as its list names it, the row of a list, and writing a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from summit_train.core.files import write_text
from summit_train.core.text import csv_text, printable
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.span import TO_THE_END, WHOLE, Span

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes

# Of a list, in the order in which they are written.
_COLUMNS = (
    "path", "label", "num_frames", "fps", "width", "height", "group", "sha256", "reversed", "start_frame", "end_frame",
    "duration", "codec",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Clip:
    """A video as its list names it. Equal clips of two lists are one video."""

    path: str
    span: Span = WHOLE
    is_reversed: bool = False
    region: Region = WHOLE_FRAME

    def __str__(self) -> str:
        span = "" if self.span == WHOLE else f" {self.span}"
        region = "" if self.region == WHOLE_FRAME else f" ({self.region})"
        return f"{printable(self.path)}{span}{region}{' backwards' if self.is_reversed else ''}"

    def values(self) -> dict[str, Any]:
        """Return the clip for JSON, without what is as usual."""
        values: dict[str, Any] = {"path": self.path}
        if self.is_reversed:
            values["reversed"] = True
        if self.span != WHOLE:
            end = None if self.span.end == TO_THE_END else self.span.end
            values |= {"start_frame": self.span.start, "end_frame": end}
        return values if self.region == WHOLE_FRAME else values | self.region._asdict()


def clip_columns(clips: Sequence[Clip]) -> list[tuple[object, ...]]:
    """Return the header and the cells of clips for a table that is a manifest, without the columns that none needs."""
    columns: list[tuple[object, ...]] = [("path", *(clip.path for clip in clips))]
    if any(clip.span != WHOLE for clip in clips):
        columns += zip(("start_frame", "end_frame"), *(clip.span.cells for clip in clips), strict=True)
    if any(clip.region != WHOLE_FRAME for clip in clips):
        columns += zip(Region._fields, *(clip.region.cells for clip in clips), strict=True)
    if any(clip.is_reversed for clip in clips):
        columns.append(("reversed", *(int(clip.is_reversed) for clip in clips)))
    return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class ManifestRow:
    """One row of a manifest file. label: an integer or a class name, or several, `3;17`. None becomes an empty cell.

    num_frames: of the whole video. span: the clip's frames in it, the columns start_frame and end_frame.
    duration, codec: for people; not read back, because other lists may use these names for other things.
    others: names and cells of further columns; a field of the same name wins. boxes: of this clip alone.
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
    span: Span = WHOLE
    duration: float | None = None
    codec: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    boxes: Boxes | None = None

    @property
    def labels(self) -> tuple[int, ...]:
        """Return the numbers of a row without names."""
        return tuple(int(number) for number in str(self.label).split(";") if number)

    def cells(self) -> dict[str, object]:
        """Return the cells that are not empty, by column."""
        start, end = self.span.cells
        columns = vars(self) | {"reversed": int(self.reversed) or "", "start_frame": start, "end_frame": end}
        others: dict[str, object] = {name: cell for name, cell in self.others if cell}
        return others | {name: columns[name] for name in _COLUMNS if columns[name] not in (None, "")}


def write_manifest(path: str | Path, rows: Iterable[ManifestRow]) -> None:
    """Write a manifest CSV, whole or not at all. Optional columns that no row fills are left out.

    Rows with boxes become a list with a row for each box, which has the frame counts, the SHA-256 and `others` alone.
    """
    rows = list(rows)
    if any(row.boxes is not None for row in rows):
        table = _box_table(rows)
    else:
        cells = [row.cells() for row in rows]
        filled = dict.fromkeys(chain(("path", "label"), *cells))
        names = [*(name for name in _COLUMNS if name in filled), *(name for name in filled if name not in _COLUMNS)]
        empty = {"reversed": 0}
        table = chain([names], ([row.get(name, empty.get(name)) for name in names] for row in cells))
    write_text(path, csv_text(table, exact=True))


def _box_table(rows: Sequence[ManifestRow]) -> Iterator[Iterable[object]]:
    from summit_train.tasks.detection.boxes import LIST_HEADER

    names = list(dict.fromkeys(name for row in rows for name, _ in row.others))
    yield [*LIST_HEADER, *names]
    for row in rows:
        assert row.boxes is not None
        others = dict(row.others)
        for cells in row.boxes.list_rows(row.path, row.num_frames, row.sha256):
            yield [*cells, *(others.get(name, "") for name in names)]
