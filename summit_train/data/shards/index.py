"""Where each clip of a packed set lies: numpy files with a row a clip, and a row a picture where there are pictures.

`np.load("packed/index/clips.npy", mmap_mode="r")` shows it. Rows are read by `pread`: a process keeps nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.data.columns import ColumnWriter, StoredRows
from summit_train.data.shards.layout import Facts, clip_checksum, picture_checksum
from summit_train.data.shards.record import PackError

# start, length: of the clip's bytes in its shard's file. checksum: see layout; of a clip of pictures it is that of its
# facts alone, as each picture has one of its own. first: the row of the clip's first picture.
CLIP_ROW = np.dtype(
    [
        ("shard", "<u4"), ("checksum", "<u4"), ("start", "<i8"), ("length", "<i8"), ("first", "<i8"),
        ("width", "<u4"), ("height", "<u4"),
    ]
)  # fmt: skip
# end: where the picture ends, from the clip's start on.
PICTURE_ROW = np.dtype([("end", "<u4"), ("checksum", "<u4")])
CLIPS, PICTURES = "clips.npy", "pictures.npy"


class Place(NamedTuple):
    """A clip's row. num_pictures is 0 in a set of the original bytes."""

    shard: int
    checksum: int
    start: int
    length: int
    first: int
    width: int
    height: int
    num_pictures: int


def write_index(folder: Path, parts: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """Write the index of all shards in their order: rows of clips and of pictures of each, `first` from its own 0."""
    num_pictures = 0
    with ExitStack() as stack:
        clips = stack.enter_context(ColumnWriter(folder / CLIPS, CLIP_ROW))
        pictures = stack.enter_context(ColumnWriter(folder / PICTURES, PICTURE_ROW))
        for clip_rows, picture_rows in parts:
            moved = clip_rows.copy()
            moved["first"] += num_pictures
            clips.append(moved)
            pictures.append(picture_rows)
            num_pictures += len(picture_rows)


class ShardIndex:
    """The index of a packed set, opened. Raises PackError where it is damaged."""

    def __init__(self, folder: Path, num_clips: int) -> None:
        try:
            self._clips = StoredRows(folder / CLIPS, CLIP_ROW)
            self._pictures = StoredRows(folder / PICTURES, PICTURE_ROW)
        except (OSError, ValueError) as error:
            raise PackError(f"{folder}: the index is damaged: {error}") from error
        if len(self._clips) != num_clips:
            raise PackError(f"{folder}: the index is damaged: {len(self._clips)} clips instead of {num_clips}")

    def place(self, clip: int) -> Place:
        """Where a clip lies."""
        rows = self._clips[clip : clip + 2]
        end = rows["first"][1] if len(rows) > 1 else len(self._pictures)
        shard, checksum, start, length, first, width, height = (int(value) for value in rows[0])
        return Place(shard, checksum, start, length, first, width, height, int(end) - first)

    def pictures(self, place: Place) -> NDArray[Any]:
        """The rows of a clip's pictures, PICTURE_ROW (num_pictures,)."""
        return self._pictures[place.first : place.first + place.num_pictures]


def is_whole(place: Place, pictures: NDArray[Any], facts: Facts, payload: bytes) -> bool:
    """Whether a clip's bytes are the ones that were packed, all of them."""
    if len(payload) != place.length:
        return False
    if not place.num_pictures:
        return clip_checksum(facts, payload) == place.checksum
    base = facts.checksum()
    ends = [0, *pictures["end"].tolist()]
    sums = [picture_checksum(base, i, payload[ends[i] : ends[i + 1]]) for i in range(len(pictures))]
    return base == place.checksum and ends[-1] == len(payload) and sums == pictures["checksum"].tolist()
