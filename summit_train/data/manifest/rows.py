"""A row of a list of clips, and writing a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.files import write_text
from summit_train.core.text import csv_text
from summit_train.data.video.span import WHOLE, Span

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes

# Those of a list, in the order in which they are written.
_COLUMNS = (
    "path", "label", "num_frames", "fps", "width", "height", "group", "sha256", "reversed", "start_frame", "end_frame",
    "duration", "codec",
)  # fmt: skip


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
        start, end = row.span.cells
        columns = vars(row) | {"reversed": int(row.reversed) or "", "start_frame": start, "end_frame": end}
        others: dict[str, object] = {name: cell for name, cell in row.others if cell}
        cells.append(others | {name: columns[name] for name in _COLUMNS if columns[name] not in (None, "")})
    filled = dict.fromkeys(chain(("path", "label"), *cells))
    names = [*(name for name in _COLUMNS if name in filled), *(name for name in filled if name not in _COLUMNS)]
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
