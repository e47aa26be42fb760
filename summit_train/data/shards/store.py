"""Reading clips out of a packed set: one `pread` for a clip, every byte that is used checked on the way."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from summit_train.data.augment import View
from summit_train.data.clips import Choose, Frames, ViewOf, ViewsOf, read_picture_views, read_views
from summit_train.data.limits import LIMITS, Limits
from summit_train.data.manifest import Manifest
from summit_train.data.shards.index import Place, ShardIndex
from summit_train.data.shards.layout import INDEX_FOLDER, Facts, clip_checksum, picture_checksum, shard_name
from summit_train.data.shards.local import LocalCopy
from summit_train.data.shards.record import Pack, PackError, read_pack
from summit_train.data.video import DecodeError, Encoded

# Pictures with no more than this between them are read together: what is read for nothing costs less than a request.
_JOINED_BYTES = 256 << 10
_MAX_OPEN_FILES = 128
_CHANGED = "is not what was packed: its checksum differs (`data verify` says what else is damaged)"


class ShardStore:
    """The clips of a packed set (see data.store.Store). local: a node's own copy of it, or of a part of it.

    Pickled it is its manifest and folders; each process opens the files that it reads from.
    """

    def __init__(self, manifest: Manifest, local: Path | None = None, limits: Limits = LIMITS) -> None:
        self.manifest = manifest
        self._local_folder = local
        self._limits = limits

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStore, (self.manifest, self._local_folder, self._limits)

    @cached_property
    def pack(self) -> Pack:
        """The set's record. Raises PackError where it is damaged or not that of the manifest."""
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

    def read_clip(self, clip: int, choose: Choose, view_of: ViewOf) -> Frames:
        """See Store."""
        views = self.read_views(clip, lambda n: choose(n)[None], lambda w, h: [view_of(w, h)])
        one: Frames = views[0]
        return one

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """See Store. A frame's number is its number in the video, also where only every n-th is packed."""
        place = self._index.place(clip)
        path = self._path(clip, place)
        name = f"{path}:{self.manifest.path(clip)}"
        facts = facts_of(self.manifest, clip, place)
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
            # Of the size that it had before it was scaled down: the view is then the one that the video itself has.
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
        """The file that has the clip: the node's own where it has it, else the shared one."""
        name = shard_name(place.shard)
        here = None if self._local is None else self._local.file_with(clip, name)
        return here or os.path.join(self.manifest.source, name)

    def _read(self, name: str, path: str, place: Place, start: int, end: int) -> bytes:
        """The bytes start .. end - 1 of a clip. Raises DecodeError, also where the file does not reach so far."""
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


def facts_of(manifest: Manifest, clip: int, place: Place) -> Facts:
    """What is known of a packed clip, as it entered its checksums."""
    return Facts(
        manifest.stored_path(clip),
        manifest.label(clip),
        int(manifest.frame_counts[clip]),
        manifest.is_reversed(clip),
        place.width,
        place.height,
    )


def _spans(
    name: str, rows: NDArray[Any], numbers: NDArray[np.int64], length: int
) -> Iterator[tuple[list[int], int, int]]:
    """The wanted pictures in as few stretches of the clip's bytes as is sensible: (numbers, start, end)."""
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
