"""Reading clips out of a packed set: one `pread` for a clip, and every byte that is used is checked."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest import Manifest
from summit_train.data.packed.format import (
    CLIPS,
    INDEX_FOLDER,
    PICTURES,
    Facts,
    Pack,
    PackError,
    Place,
    ShardIndex,
    clip_checksum,
    facts_of,
    picture_checksum,
    read_pack,
    shard_name,
)
from summit_train.data.video.augment import View
from summit_train.data.video.clips import Choose, Frames, ViewsOf, read_picture_views, read_views
from summit_train.data.video.source import LIMITS, DecodeError, Encoded, Limits

PARTIAL_FOLDER, HAVE = "partial", "have"
# Pictures with at most this between them are read together: the bytes between them cost less than a request.
_JOINED_BYTES = 256 << 10
_MAX_OPEN_FILES = 128
_CHANGED = "is not what was packed: its checksum differs (`data verify` says what else is damaged)"


def staged_folder(dest: str | Path, packed: str | Path) -> Path:
    """Return the folder of a packed set's copy below `dest`; a changed set has another one. Raises PackError."""
    digest = hashlib.sha256(read_pack(packed).text().encode()).hexdigest()
    return Path(dest) / f"{Path(packed).resolve().name}-{digest[:8]}"


class LocalCopy:
    """A node's own copy of a packed set, whole or in part. A folder that does not exist holds nothing.

    Complete shards, which were checked, lie in the folder under their names. Single clips lie in `partial/`, in sparse
    files, at their places in the shards; `partial/have` has a byte for each clip, 1 where the clip is there.
    """

    def __init__(self, folder: Path, num_clips: int) -> None:
        self.folder = folder
        self._whole: dict[str, bool] = {}
        path = folder / PARTIAL_FOLDER / HAVE
        fits = path.is_file() and path.stat().st_size == num_clips  # else it is of another set
        self._have: NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if fits else np.zeros(0, np.uint8)

    @property
    def has_index(self) -> bool:
        """Return whether the index is in the copy."""
        return all((self.folder / INDEX_FOLDER / name).is_file() for name in (CLIPS, PICTURES))

    def file_with(self, clip: int, shard: str) -> str | None:
        """Return the copy's file that has a clip of this shard at its place, or None."""
        if shard not in self._whole:
            self._whole[shard] = (self.folder / shard).is_file()
        if self._whole[shard]:
            return str(self.folder / shard)
        return str(self.folder / PARTIAL_FOLDER / shard) if len(self._have) and self._have[clip] else None


class ShardStore:
    """The clips of a packed set (see batches.store.Store). local: the folder of a node's own copy.

    Pickling it keeps the manifest and the folders; each process opens the files that it reads from.
    """

    def __init__(self, manifest: Manifest, local: Path | None = None, limits: Limits = LIMITS) -> None:
        self.manifest = manifest
        self._local_folder = local
        self._limits = limits

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStore, (self.manifest, self._local_folder, self._limits)

    @cached_property
    def pack(self) -> Pack:
        """Return the set's record. Raises PackError where it is damaged or not that of the manifest."""
        pack = read_pack(self.manifest.source)
        if (pack.clips, pack.fingerprint) != (len(self.manifest), self.manifest.fingerprint()):
            raise PackError(f"{self.manifest.source}: its manifest is not the one that its record names")
        return pack

    @cached_property
    def _local(self) -> LocalCopy | None:
        return None if self._local_folder is None else LocalCopy(self._local_folder, len(self.manifest))

    @cached_property
    def _index(self) -> ShardIndex:
        folder = Path(self.manifest.source)
        if self._local is not None and self._local.has_index:
            folder = self._local.folder
        return ShardIndex(folder / INDEX_FOLDER, len(self.manifest))

    @cached_property
    def _files(self) -> OrderedDict[str, IO[bytes]]:
        return OrderedDict()

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """Read clips in several views, see Store. Frame numbers are the video's, also where every n-th is packed."""
        place = self._index.place(clip)
        path = self._path(clip, place)
        name = f"{path}:{self.manifest.path(clip)}"
        facts = facts_of(self.manifest, clip, place.width, place.height)
        if place.num_pictures:
            return self._read_pictures(name, path, place, facts, choose, views_of)
        content = self._read(name, path, place, 0, place.length)
        if clip_checksum(facts, content) != place.checksum:
            raise DecodeError(name, _CHANGED)
        return read_views(Encoded(name, content), choose, views_of, self.manifest.num_frames(clip), limits=self._limits)

    def _read_pictures(
        self, name: str, path: str, place: Place, facts: Facts, choose: Choose, views_of: ViewsOf
    ) -> Frames:
        packing, base = self.pack.packing, facts.checksum()
        rows = self._index.pictures(place)
        if base != place.checksum or len(rows) != packing.num_packed(facts.num_frames):
            raise DecodeError(name, _CHANGED)

        packed: NDArray[np.int64] = np.asarray(choose(facts.num_frames)) // packing.every

        def views(width: int, height: int) -> Sequence[View]:
            # The size before packing scaled the frame down gives the same view as the video itself.
            return views_of(facts.width or width, facts.height or height)

        pictures = dict[int, bytes]()
        for numbers, start, end in _spans(name, rows, np.unique(packed), place.length):
            content = self._read(name, path, place, start, end)
            for number in numbers:
                first = int(rows["end"][number - 1]) if number else 0
                pictures[number] = content[first - start : int(rows["end"][number]) - start]
                if picture_checksum(base, number, pictures[number]) != rows["checksum"][number]:
                    raise DecodeError(name, f"picture {number} {_CHANGED}")
        fetch = lambda number: (f"{name}, picture {number}", pictures[number])  # noqa: E731
        return read_picture_views(name, fetch, lambda _: packed, views, len(rows), self._limits)

    def _path(self, clip: int, place: Place) -> str:
        """Return the file that has the clip: the local copy's where it has it, else the shared one."""
        name = shard_name(place.shard)
        here = None if self._local is None else self._local.file_with(clip, name)
        return here or os.path.join(self.manifest.source, name)

    def _read(self, name: str, path: str, place: Place, start: int, end: int) -> bytes:
        """Return the bytes start .. end - 1 of a clip. Raises DecodeError, also where the file ends before."""
        try:
            descriptor = self._open(path).fileno()
            if not 0 <= place.start <= place.start + start <= place.start + end <= os.fstat(descriptor).st_size:
                raise DecodeError(name, "does not lie in its shard: the shard was cut short, or the index is damaged")
            content = os.pread(descriptor, end - start, place.start + start)
            while content and len(content) < end - start:  # one call gives at most 2 GiB
                more = os.pread(descriptor, end - start - len(content), place.start + start + len(content))
                content = content + more if more else b""
        except OSError as error:
            raise DecodeError(name, error.strerror or str(error)) from error
        return content

    def _open(self, path: str) -> IO[bytes]:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            if len(self._files) >= _MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115  (closed when it is the oldest, or at exit)
        return self._files[path]


def _spans(
    name: str, rows: NDArray[Any], numbers: NDArray[np.int64], length: int
) -> Iterator[tuple[list[int], int, int]]:
    """Yield the wanted pictures in few contiguous reads: (numbers, start, end)."""
    ends = rows["end"].astype(np.int64)
    if len(ends) and not (np.all(np.diff(ends) > 0) and ends[0] > 0 and ends[-1] == length):
        raise DecodeError(name, _CHANGED)
    group, first, last = list[int](), 0, 0
    for number in numbers.tolist():
        start, end = int(ends[number - 1]) if number else 0, int(ends[number])
        if group and start - last > _JOINED_BYTES:
            yield group, first, last
            group = []
        first = first if group else start
        group, last = [*group, number], end
    yield group, first, last
