"""A node's own copy of a packed set, whole or in part.

Shards that are there as a whole lie in the folder under their names; they are renamed to them when they are complete
and were found right. Single clips lie in `partial/`, in files with holes, at the places that they have in their shards;
`partial/have` has a byte for each clip, 1 where it is there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.data.shards.index import CLIPS, PICTURES
from summit_train.data.shards.layout import INDEX_FOLDER
from summit_train.data.shards.record import read_pack

PARTIAL_FOLDER, HAVE = "partial", "have"


def staged_folder(dest: str | Path, packed: str | Path) -> Path:
    """Where a packed set's copy lies below `dest`: a changed set has another folder. Raises PackError."""
    digest = hashlib.sha256(read_pack(packed).text().encode()).hexdigest()
    return Path(dest) / f"{Path(packed).resolve().name}-{digest[:8]}"


class LocalCopy:
    """What a node has of a set. A folder that is not there holds nothing."""

    def __init__(self, folder: Path, num_clips: int) -> None:
        self.folder = folder
        self._whole: dict[str, bool] = {}
        self._have = _have(folder / PARTIAL_FOLDER / HAVE, num_clips)

    @property
    def has_index(self) -> bool:
        """Whether the index is there too."""
        return all((self.folder / INDEX_FOLDER / name).is_file() for name in (CLIPS, PICTURES))

    def file_with(self, clip: int, shard: str) -> str | None:
        """The file here that has a clip of this shard at its place, or None."""
        if shard not in self._whole:
            self._whole[shard] = (self.folder / shard).is_file()
        if self._whole[shard]:
            return str(self.folder / shard)
        return str(self.folder / PARTIAL_FOLDER / shard) if len(self._have) and self._have[clip] else None


def _have(path: Path, num_clips: int) -> NDArray[np.uint8]:
    """A byte for each clip, mapped; none where there is no such file, or one of another set."""
    if not path.is_file() or path.stat().st_size != num_clips:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")
