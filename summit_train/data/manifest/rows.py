"""A row of a list of clips, and writing a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.files import write_text
from summit_train.core.text import csv_text
from summit_train.data.video.span import TO_THE_END, Span

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes


@dataclass(frozen=True)
class ManifestRow:
    """One row of a manifest file. label: an integer or a class name, or several, `3;17`. None becomes an empty cell.

    num_frames: of the whole video. start_frame, end_frame: set if the clip is a span of it; the end is exclusive.
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
    start_frame: int | None = None
    end_frame: int | None = None
    duration: float | None = None
    codec: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    boxes: Boxes | None = None

    @property
    def labels(self) -> tuple[int, ...]:
        """Return the numbers of a row without names."""
        return tuple(int(number) for number in str(self.label).split(";") if number)

    @property
    def span(self) -> Span:
        return Span(self.start_frame or 0, TO_THE_END if self.end_frame is None else self.end_frame)

    def with_span(self, span: Span) -> ManifestRow:
        return replace(self, start_frame=span.start or None, end_frame=None if span.end == TO_THE_END else span.end)


def write_manifest(path: str | Path, rows: Iterable[ManifestRow]) -> None:
    """Write a manifest CSV, whole or not at all. Optional columns that no row fills are left out.

    Rows with boxes become a list with a row for each box, which has the frame counts, the SHA-256 and `others` alone.
    """
    rows = list(rows)
    if any(row.boxes is not None for row in rows):
        _write_boxes(path, rows)
        return
    cells: list[dict[str, object]] = []
    for row in rows:
        own = vars(row) | {"reversed": int(row.reversed) or None, "others": None, "boxes": None}
        others: dict[str, object] = {name: cell for name, cell in row.others if cell}
        cells.append(others | {name: value for name, value in own.items() if value is not None})
    order = [field.name for field in fields(ManifestRow)]
    filled = dict.fromkeys(chain(("path", "label"), *cells))
    names = [*(name for name in order if name in filled), *(name for name in filled if name not in order)]
    empty = {"reversed": 0}
    table: list[Iterable[object]] = [names, *([row.get(name, empty.get(name)) for name in names] for row in cells)]
    write_text(path, csv_text(table, exact=True))


def _write_boxes(path: str | Path, rows: Sequence[ManifestRow]) -> None:
    from summit_train.tasks.detection.boxes import LIST_HEADER

    names = list(dict.fromkeys(name for row in rows for name, _ in row.others))
    table: list[Iterable[object]] = [[*LIST_HEADER, *names]]
    for row in rows:
        assert row.boxes is not None
        others = dict(row.others)
        listed = row.boxes.list_rows(row.path, row.num_frames, row.sha256)
        table += ([*cells, *(others.get(name, "") for name in names)] for cells in listed)
    write_text(path, csv_text(table, exact=True))
