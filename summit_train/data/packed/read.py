"""Reading clips out of a packed set, where every byte that is used is checked, and checking all of a set's files."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest import Manifest, ManifestError, read_manifest
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.packed.format import (
    CLIPS,
    INDEX_FOLDER,
    PICTURES,
    Facts,
    Pack,
    PackError,
    Place,
    ShardIndex,
    StoredFile,
    facts_of,
    picture_checksum,
    read_pack,
    read_range,
    shard_name,
    stored_file,
)
from summit_train.data.video.augment import View
from summit_train.data.video.clips import Choose, Frames, ViewsOf, read_picture_views, read_views
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import LIMITS, DecodeError, Encoded, Limits

# Complete shards of a copy, which were checked, lie in its folder under their names. Single clips lie in `partial/`, in
# sparse files, at their places in the shards; `partial/have` has a byte for each clip, 1 where the clip is there.
PARTIAL_FOLDER, HAVE = "partial", "have"
# Pictures with at most this between them are read together: the bytes between them cost less than a request.
_JOINED_BYTES = 256 << 10
_MAX_OPEN_FILES = 128
_CHANGED = "is not what was packed: its checksum differs (`data verify` says what else is damaged)"
_NAMED_CLIPS = 5


class _DamagedError(DecodeError):
    """A clip's bytes cannot be read from a shard, or are not those that were packed."""


def staged_folder(dest: str | Path, packed: str | Path) -> Path:
    """Return the folder of a packed set's copy below `dest`; a changed set has another one. Raises PackError."""
    digest = hashlib.sha256(read_pack(packed).text().encode()).hexdigest()
    return Path(dest) / f"{Path(packed).resolve().name}-{digest[:8]}"


@dataclass(frozen=True, eq=False)
class ShardStore:
    """The clips of a packed set (see batches.stores.Store), read by one `pread` each.

    local: the folder of a node's own copy, whole or in part, or of none. Pickling keeps the three fields; each process
    opens the files that it reads from.
    """

    manifest: Manifest
    local: Path | None = None
    limits: Limits = LIMITS

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStore, (self.manifest, self.local, self.limits)

    @cached_property
    def pack(self) -> Pack:
        """Return the set's record. Raises PackError where it is damaged or not that of the manifest."""
        pack = read_pack(self.manifest.source)
        if (pack.clips, pack.fingerprint) != (len(self.manifest), self.manifest.fingerprint()):
            raise PackError(f"{self.manifest.source}: its manifest is not the one that its record names")
        return pack

    @cached_property
    def _index(self) -> ShardIndex:
        local = self.local
        if local is not None and all((local / INDEX_FOLDER / name).is_file() for name in (CLIPS, PICTURES)):
            return ShardIndex(local, self.manifest)
        return ShardIndex(Path(self.manifest.source), self.manifest)

    @cached_property
    def _have(self) -> NDArray[np.uint8] | None:
        path = Path(self.local or "", PARTIAL_FOLDER, HAVE)
        fits = self.local and path.is_file() and path.stat().st_size == len(self.manifest)  # else it is of another set
        return np.memmap(path, np.uint8, "r") if fits else None

    @cached_property
    def _shared(self) -> ShardStore:
        return ShardStore(self.manifest, None, self.limits)

    @cached_property
    def _damaged(self) -> set[str]:
        return set()

    @cached_property
    def _files(self) -> dict[str, IO[bytes]]:
        return {}

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """Read clips in several views, see Store. Frame numbers are the video's, also where every n-th is packed.

        Of a span the numbers are its own; where pictures are packed, only its pictures are. In a set of flow `choose`
        gives numbers of pictures, from 0 to 2 F - 1, for the number of fields F; the pictures are grey, see
        `clips.read_flow_views`. A damaged local shard is reported, and the shared one is read instead.
        """
        place = self._index.place(clip)
        path = self._path(clip, place)
        try:
            return self._read_from(path, clip, place, choose, views_of)
        except _DamagedError as error:
            if self.local is None or Path(path).parent == Path(self.manifest.source):
                raise
            note = "summit-train: warning: %s; this shard is read from %s instead"
            logging.getLogger(__name__).warning(note, error, self.manifest.source)
            self._damaged.add(path)
            return self._shared.read_views(clip, choose, views_of)

    def _read_from(self, path: str, clip: int, place: Place, choose: Choose, views_of: ViewsOf) -> Frames:
        name = f"{path}:{self.manifest.path(clip)}"
        facts = facts_of(self.manifest, clip, place.width, place.height)
        if place.num_pictures:
            return self._read_pictures(name, path, place, facts, choose, views_of)
        content = self._read(name, path, place, 0, place.length)
        if zlib.crc32(content, facts.checksum()) != place.checksum:
            raise _DamagedError(name, _CHANGED)
        choose, num_frames = facts.span.chosen_in(name, choose), self.manifest.num_frames(clip)
        return read_views(Encoded(name, content), choose, views_of, num_frames, limits=self.limits)

    def _read_pictures(
        self, name: str, path: str, place: Place, facts: Facts, choose: Choose, views_of: ViewsOf
    ) -> Frames:
        packing, base, rows = self.pack.packing, facts.checksum(), self._index.pictures(place)
        edges = np.concatenate([np.zeros(1, np.int64), rows["end"]])  # picture n from edges[n] to edges[n + 1]
        is_index_right = np.all(np.diff(edges) > 0) and edges[-1] == place.length and base == place.checksum
        if not is_index_right:
            raise _DamagedError(name, _CHANGED)
        num_frames = packing.num_frames(name, facts)
        if len(rows) != packing.num_packed(num_frames):
            raise _DamagedError(name, _CHANGED)

        packed: NDArray[np.int64] = np.asarray(choose(num_frames)) // packing.every
        pictures = dict[int, bytes]()
        for numbers in _spans(edges, np.unique(packed).tolist()):
            first = edges[numbers[0]]
            content = self._read(name, path, place, first, edges[numbers[-1] + 1])
            for number in numbers:
                pictures[number] = content[edges[number] - first : edges[number + 1] - first]
                if picture_checksum(base, number, pictures[number]) != rows["checksum"][number]:
                    raise _DamagedError(name, f"picture {number} {_CHANGED}")

        def views(width: int, height: int) -> Sequence[View]:
            # The size before packing scaled the frame down gives the same view as the video itself.
            return views_of(facts.width or width, facts.height or height)

        fetch = lambda number: (f"{name}, picture {number}", pictures[number])  # noqa: E731
        render = Renderer(views, is_grey=packing.modality == "flow")
        return read_picture_views(name, fetch, lambda _: packed, render, len(rows), self.limits)

    def _path(self, clip: int, place: Place) -> str:
        """Return the file that has the clip: the local copy's where it has it, else the shared one."""
        name, copies = shard_name(place.shard), list[Path]()
        if self.local and (self.local / name).is_file():
            copies.append(self.local / name)
        if self.local and self._have is not None and self._have[clip]:
            copies.append(self.local / PARTIAL_FOLDER / name)
        right = (str(copy) for copy in copies if str(copy) not in self._damaged)
        return next(right, os.path.join(self.manifest.source, name))

    def _read(self, name: str, path: str, place: Place, start: int, end: int) -> bytes:
        """Return the bytes start .. end - 1 of a clip. Raises _DamagedError, also if the file is too short."""
        try:
            file = self._files.pop(path, None) or open(path, "rb", buffering=0)  # noqa: SIM115  (closed when the oldest)
            self._files[path] = file  # the last
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            return read_range(file, place.start + start, place.start + end)
        except OSError as error:
            raise _DamagedError(name, error.strerror or str(error)) from error


def _spans(edges: NDArray[np.int64], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the pictures `numbers`, which rise, in groups that are read together."""
    group = list[int]()
    for number in numbers:
        if group and edges[number] - edges[group[-1] + 1] > _JOINED_BYTES:
            yield group
            group = []
        group.append(number)
    yield group


def verify_files(folder: Path, pack: Pack, files: Sequence[StoredFile], workers: int) -> Iterator[list[str]]:
    """Yield the complaints about each of some files of a set, in order, a line each.

    workers: files that are read at a time, by threads: reading and hashing release Python's lock.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(lambda file: _complaints(folder, pack, file), files)


def stray_files(folder: Path, pack: Pack) -> list[str]:
    """Return a complaint for each file in a set's folder that is no part of the set."""
    known = {PACK_FILE} | {file.name for file in pack.every_file}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return [f"{folder / name}: is no part of the set" for name in sorted(found - known)]


def _complaints(folder: Path, pack: Pack, file: StoredFile) -> list[str]:
    path = folder / file.name
    try:
        found = stored_file(folder, file.name)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    if found == file:
        return []
    what = f"has {found.size:,} bytes instead of {file.size:,}" if found.size != file.size else "has other bytes"
    return [f"{path}: {what}{_damaged_clips(folder, pack, pack.shards.index(file)) if file in pack.shards else ''}"]


def _damaged_clips(folder: Path, pack: Pack, shard: int) -> str:
    """Name the clips of a damaged shard that cannot be read, where the index can still tell."""
    bad = []
    try:
        manifest = read_manifest(folder)
        index = ShardIndex(folder, manifest)
        for clip in range(shard * pack.clips_per_shard, min((shard + 1) * pack.clips_per_shard, len(manifest))):
            try:
                index.read_whole(folder, clip, index.place(clip))
            except PackError:
                bad.append(manifest.path(clip))
    except (ManifestError, PackError):
        return ""
    if not bad:
        return "; all of its clips are whole: what differs lies between them"
    more = f" and {len(bad) - _NAMED_CLIPS} more clips" if len(bad) > _NAMED_CLIPS else ""
    return f"; damaged: {', '.join(bad[:_NAMED_CLIPS])}{more}"
