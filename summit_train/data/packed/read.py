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
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.reading import PACK_FILE, load_column
from summit_train.data.packed.format import (
    CLIP_ROW,
    CLIPS,
    INDEX_FOLDER,
    PICTURE_ROW,
    PICTURES,
    Facts,
    Pack,
    StoredFile,
    facts_of,
    picture_checksum,
    read_pack,
    shard_name,
    stored_file,
)
from summit_train.data.video.augment import View
from summit_train.data.video.clips import Choose, Frames, ViewsOf, read_picture_views, read_views
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import LIMITS, DecodeError, Encoded, Limits

# Pictures with at most this between them are read together: the bytes between them cost less than a request.
_JOINED_BYTES = 256 << 10
_MAX_OPEN_FILES = 128
_CHANGED = "is not what was packed: its checksum differs (`data verify` lists what else is damaged)"
_NAMED_CLIPS = 5


class _DamagedError(DecodeError):
    """A clip's bytes cannot be read from a shard, or are not those that were packed."""


def staged_folder(dest: str | Path, packed: str | Path) -> Path:
    """Return the folder of a packed set's copy below `dest`; a changed set has another one. Raises UserError."""
    digest = hashlib.sha256(read_pack(packed).text().encode()).hexdigest()
    return Path(dest) / f"{Path(packed).resolve().name}-{digest[:8]}"


class _Entry(NamedTuple):
    """A clip in the manifest and in the index. pictures: their rows, PICTURE_ROW; none in a set of original bytes."""

    name: str  # in messages
    path: str  # of its shard
    facts: Facts
    checksum: int
    start: int
    length: int
    pictures: NDArray[Any]


@dataclass(frozen=True, eq=False)
class ShardStore:
    """The clips of a packed set (see batches.stores.Store), read by one `pread` each.

    local: the folder of a node's own copy, which is read if it is complete. Pickling keeps the three fields; each
    process opens the files that it reads from.
    """

    manifest: Manifest
    local: Path | None = None
    limits: Limits = LIMITS

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStore, (self.manifest, self.local, self.limits)

    @cached_property
    def pack(self) -> Pack:
        """Return the set's record. Raises UserError where it is damaged or not that of the manifest."""
        pack = read_pack(self.manifest.source)
        if (pack.clips, pack.fingerprint) != (len(self.manifest), self.manifest.fingerprint()):
            raise UserError(f"{self.manifest.source}: its manifest is not the one that its record names")
        return pack

    @cached_property
    def _folder(self) -> Path:
        if self.local is not None and (self.local / PACK_FILE).is_file():
            return self.local
        return Path(self.manifest.source)

    @cached_property
    def _index(self) -> tuple[NDArray[Any], NDArray[Any]]:
        folder = self._folder / INDEX_FOLDER
        try:
            clips, pictures = load_column(folder / CLIPS, CLIP_ROW), load_column(folder / PICTURES, PICTURE_ROW)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: the index is damaged: {error}") from error
        if len(clips) != len(self.manifest):
            raise UserError(f"{folder}: the index is damaged: {len(clips)} clips instead of {len(self.manifest)}")
        return clips, pictures

    def _entry(self, clip: int) -> _Entry:
        clips, pictures = self._index
        shard, checksum, start, length, first, width, height = clips[clip].item()
        end = int(clips[clip + 1]["first"]) if clip + 1 < len(clips) else len(pictures)
        path, facts = str(self._folder / shard_name(shard)), facts_of(self.manifest, clip, width, height)
        return _Entry(f"{path}:{self.manifest.path(clip)}", path, facts, checksum, start, length, pictures[first:end])

    @cached_property
    def _shared(self) -> ShardStore:
        return ShardStore(self.manifest, None, self.limits)

    @cached_property
    def _damaged(self) -> set[str]:
        """The shards of the local copy that are read from the shared set instead."""
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
        entry = self._entry(clip)
        if entry.path in self._damaged:
            return self._shared.read_views(clip, choose, views_of)
        try:
            return self._read_from(entry, choose, views_of)
        except _DamagedError as error:
            if self._folder != self.local:
                raise
            note = "summit-train: warning: %s; this shard is read from %s instead"
            logging.getLogger(__name__).warning(note, error, self.manifest.source)
            self._damaged.add(entry.path)
            return self._shared.read_views(clip, choose, views_of)

    def check(self, clip: int) -> None:
        """Read all bytes of a clip. Raises DecodeError where they are not those that were packed."""
        entry = self._entry(clip)
        if len(entry.pictures):
            self._pictures(entry, range(len(entry.pictures)))
        else:
            self._video(entry)

    def _read_from(self, entry: _Entry, choose: Choose, views_of: ViewsOf) -> Frames:
        name, facts = entry.name, entry.facts
        if not len(entry.pictures):
            count = facts.num_frames if facts.num_frames > 0 else None
            video = Encoded(name, self._video(entry))
            return read_views(video, facts.span.chosen_in(name, choose), views_of, count, limits=self.limits)

        packing = self.pack.packing
        num_frames = packing.num_frames(name, facts)
        if len(entry.pictures) != packing.num_packed(num_frames):
            raise _DamagedError(name, _CHANGED)
        packed: NDArray[np.int64] = np.asarray(choose(num_frames)) // packing.every
        pictures = self._pictures(entry, np.unique(packed).tolist())

        def views(width: int, height: int) -> Sequence[View]:
            # The size before packing scaled the frame down gives the same view as the video itself.
            return views_of(facts.width or width, facts.height or height)

        fetch = lambda number: (f"{name}, picture {number}", pictures[number])  # noqa: E731
        render = Renderer(views, is_grey=packing.modality == "flow")
        return read_picture_views(name, fetch, lambda _: packed, render, len(entry.pictures), self.limits)

    def _video(self, entry: _Entry) -> bytes:
        content = self._read(entry, 0, entry.length)
        if zlib.crc32(content, entry.facts.checksum()) != entry.checksum:
            raise _DamagedError(entry.name, _CHANGED)
        return content

    def _pictures(self, entry: _Entry, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of the pictures `numbers`, which rise; those that are close are read together."""
        base, rows = entry.facts.checksum(), entry.pictures
        edges = np.concatenate([np.zeros(1, np.int64), rows["end"]])  # picture n from edges[n] to edges[n + 1]
        if np.any(np.diff(edges) <= 0) or edges[-1] != entry.length or base != entry.checksum:
            raise _DamagedError(entry.name, _CHANGED)
        pictures = dict[int, bytes]()
        for group in _groups(edges, numbers):
            first = edges[group[0]]
            content = self._read(entry, first, edges[group[-1] + 1])
            for number in group:
                pictures[number] = content[edges[number] - first : edges[number + 1] - first]
                if picture_checksum(base, number, pictures[number]) != rows["checksum"][number]:
                    raise _DamagedError(entry.name, f"picture {number} {_CHANGED}")
        return pictures

    def _read(self, entry: _Entry, start: int, end: int) -> bytes:
        """Return the bytes start .. end - 1 of a clip. Raises _DamagedError, also if the file is too short."""
        path = entry.path
        try:
            file = self._files.pop(path, None) or open(path, "rb", buffering=0)  # noqa: SIM115  (closed when the oldest)
            self._files[path] = file  # the last
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            start, end, content = entry.start + start, entry.start + end, b""
            if not 0 <= start <= end <= os.fstat(file.fileno()).st_size:
                raise OSError("is outside its shard: the shard was cut short, or the index is damaged")
            while more := os.pread(file.fileno(), end - start - len(content), start + len(content)):  # at most 2 GiB
                content += more
            return content
        except OSError as error:
            raise _DamagedError(entry.name, error.strerror or str(error)) from error


def _groups(edges: NDArray[np.int64], numbers: Sequence[int]) -> Iterator[list[int]]:
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
    """Return a complaint for each file in a set's folder that does not belong to the set."""
    known = {PACK_FILE} | {file.name for file in pack.every_file}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return [f"{folder / name}: does not belong to the set" for name in sorted(found - known)]


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
        store = ShardStore(read_manifest(folder))
        for clip in range(shard * pack.clips_per_shard, min((shard + 1) * pack.clips_per_shard, len(store.manifest))):
            try:
                store.check(clip)
            except DecodeError:
                bad.append(store.manifest.path(clip))
    except UserError:
        return ""
    if not bad:
        return "; all of its clips are whole: what differs lies between them"
    more = f" and {len(bad) - _NAMED_CLIPS} more clips" if len(bad) > _NAMED_CLIPS else ""
    return f"; damaged: {', '.join(bad[:_NAMED_CLIPS])}{more}"
