"""Reading clips out of a packed set, where every byte that is used is checked, and checking all of a set's files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256, regular
from summit_train.core.text import printable
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.reading import PACK_FILE, load_column
from summit_train.data.packed import format as packed
from summit_train.data.packed.format import Facts, Pack, StoredFile, facts_of, picture_checksum, read_pack
from summit_train.data.video.clips import DerivedClip, Numbers, OpenClip, PartClip, PictureClip, VideoClip
from summit_train.data.video.films import Films, is_film
from summit_train.data.video.source import LIMITS, DecodeError, Encoded, Limits

# Pictures with at most this between them are read together: the bytes between them cost less than a request.
_JOINED_BYTES = 256 << 10
_MAX_OPEN_FILES = 128
_CHANGED = "is not what was packed: its checksum differs (`data verify` lists the damaged files)"
_OUTSIDE = "is outside its shard: the shard was cut short, or the index is damaged"


class _DamagedError(DecodeError):
    """A clip's bytes cannot be read from a shard, or are not those that were packed."""


def staged_folder(dest: str | Path, source: str | Path) -> Path:
    """Return the folder of a packed set's copy below `dest`; a changed set has another one. Raises UserError."""
    digest = hashlib.sha256(read_pack(source).text().encode()).hexdigest()
    return Path(dest) / f"{os.path.basename(os.path.realpath(source))}-{digest[:8]}"


class _Entry(NamedTuple):
    """A clip in the manifest and in the index. pictures: their rows, PICTURE_ROW; none in a set of videos.

    facts_checksum: as it was packed. checksum: the CRC-32 of its bytes, begun with `seed`.
    """

    shard: Path
    name: str  # in messages
    facts: Facts
    facts_checksum: int
    checksum: int
    seed: int
    start: int
    length: int
    pictures: NDArray[Any]


@dataclass(frozen=True)
class _ThinnedClip(DerivedClip):
    """A clip of which every n-th frame is stored, scaled down.

    whole_size: that before, or 0, 0 if it is the stored one. Views for it give the pixels that the video itself gives.
    """

    thinned_from: int
    every: int
    whole_size: tuple[int, int]

    @property
    def num_frames(self) -> int:
        return self.thinned_from

    def _in_video(self, frames: Numbers) -> Numbers:
        return frames // self.every

    def size(self, frames: Numbers) -> tuple[int, int]:
        return self.whole_size if any(self.whole_size) else super().size(frames)

    def stored(self, frames: Numbers) -> Numbers:
        return frames // self.every * self.every


class ShardStore:
    """The clips of a packed set (see loading.Store), read by one `pread` each.

    local: the folder of a node's own copy, which is read if it is complete. Pickling keeps the three arguments; each
    process opens the files that it reads from.
    """

    def __init__(self, manifest: Manifest, local: Path | None = None, limits: Limits = LIMITS) -> None:
        self.manifest = manifest
        self._local = local
        self._limits = limits
        self._shared = Path(manifest.source)
        self._damaged: set[Path] = set()  # shards whose clips are read from the shared set, by its own index, instead
        self._files: dict[Path, IO[bytes]] = {}
        self._films = Films()
        self._crcs = dict[tuple[Encoded, int], int]()  # of a film's bytes, begun with a seed

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStore, (self.manifest, self._local, self._limits)

    @cached_property
    def _folder(self) -> Path:  # found at the first read: a run opens its sets before it stages them
        return self._local if self._local is not None and (self._local / PACK_FILE).is_file() else self._shared

    @cached_property
    def pack(self) -> Pack:
        """Return the set's record. Raises UserError where it is damaged or not that of the manifest."""
        pack = read_pack(self._shared)
        if (pack.clips, pack.fingerprint) != (len(self.manifest), self.manifest.fingerprint()):
            raise UserError(f"{self._shared}: its manifest is not the one that its record names")
        return pack

    @cached_property
    def _index(self) -> tuple[NDArray[Any], NDArray[Any]]:
        folder = self._folder / packed.INDEX_FOLDER
        try:
            clips = load_column(folder / packed.CLIPS, packed.CLIP_ROW if self.pack.format > 1 else packed.CLIP_ROW_1)
            pictures = load_column(folder / packed.PICTURES, packed.PICTURE_ROW)
            if len(clips) != len(self.manifest):
                raise ValueError(f"{len(clips)} clips instead of {len(self.manifest)}")
        except (OSError, ValueError) as error:
            damaged = UserError(f"{folder}: the index is damaged: {error}")
            if self._folder == self._shared:
                raise damaged from error
            self._warn(damaged, "the set")
            self._folder = self._shared
            return self._index
        return clips, pictures

    @cached_property
    def _shared_store(self) -> ShardStore:
        return ShardStore(self.manifest, None, self._limits)

    def _warn(self, error: UserError, what: str) -> None:
        note = "summit-train: warning: %s; %s is read from %s instead"
        logging.getLogger(__name__).warning(note, error, what, printable(str(self._shared)))

    def open(self, clip: int) -> OpenClip:
        """Open a clip, see Store. Frame numbers are the video's, also where every n-th is packed.

        Of a span the numbers are its own; where pictures are packed, only its pictures are. In a set of flow the frames
        are pictures, two of each field, and grey. Damage to a local shard or index is reported, and the shared set is
        read instead.
        """
        entry = self._entry(clip)
        if entry.shard not in self._damaged:
            try:
                return self._open(clip, entry)
            except _DamagedError as error:
                self._give_up(entry, error)
        return self._shared_store.open(clip)

    def _entry(self, clip: int) -> _Entry:
        clips, pictures = self._index
        number, checksum, start, length, first, width, height, *later = clips[clip].item()
        end = int(clips[clip + 1]["first"]) if clip + 1 < len(clips) else len(pictures)
        shard = self._folder / packed.shard_name(number)
        name = f"{shard}:{self.manifest.path(clip)}"
        facts = facts_of(self.manifest, clip, width, height)
        if self.pack.format > 1:
            seed = 0
            (facts_checksum,) = later
        else:  # one checksum for the facts and then the bytes
            seed = facts_checksum = facts.checksum()
        return _Entry(shard, name, facts, facts_checksum, checksum, seed, start, length, pictures[first:end])

    def _give_up(self, entry: _Entry, error: _DamagedError) -> None:
        """Read the clips of a damaged local shard from the shared set from now on. Raises the error of a shared one."""
        if self._folder == self._shared:
            raise error
        if entry.shard not in self._damaged:
            self._warn(error, "this shard")
        self._damaged.add(entry.shard)

    def _open(self, clip: int, entry: _Entry) -> OpenClip:
        name = entry.name
        facts = entry.facts
        packing = self.pack.packing
        if not len(entry.pictures) and packing.kind != "video":
            count = facts.num_frames if facts.num_frames > 0 else None
            is_checked = self.manifest.sha256(clip) is not None
            video = VideoClip(self._video(entry, count), count, self._limits, is_checked=is_checked)
            return PartClip(video, facts.clip.span, name)
        # A span counts frames; the facts of flow count fields, one less, of two pictures each.
        is_flow = packing.modality == "flow"
        num_frames = (len(facts.clip.span.frames(name, facts.num_frames + is_flow)) - is_flow) * (1 + is_flow)
        count = -(-num_frames // packing.every)
        stored: OpenClip
        if not len(entry.pictures):  # a video with the frames of this clip alone
            stored = VideoClip(self._video(entry, count), count, self._limits, is_checked=True)
        else:
            self._check_pictures(entry, count)
            fetch = partial(self._fetch, clip, entry)
            stored = PictureClip(name, fetch, count, self._limits, is_grey=is_flow)
        return _ThinnedClip(stored, num_frames, packing.every, (facts.width, facts.height))

    def _video(self, entry: _Entry, num_frames: int | None) -> Encoded:
        """Return a clip's video after a check of its bytes, those of a film once in each process."""
        part = (str(entry.shard), entry.start, entry.length)
        if not is_film(entry.length, num_frames):
            video = Encoded(entry.name, self._read(entry, 0, entry.length))
            checksum = video.crc32(entry.seed)
        else:
            try:
                self._shard_with(entry, 0, entry.length)
                video = Encoded(entry.name, state=Encoded(entry.name, part=part).check(), part=part)
                checksum = self._crcs.get((video, entry.seed)) or video.crc32(entry.seed)
            except OSError as error:
                raise _DamagedError(entry.name, error.strerror or str(error)) from error
            except DecodeError as error:
                raise _DamagedError(entry.name, error.reason) from error
            self._crcs[video, entry.seed] = checksum
        if (entry.facts.checksum(), checksum) != (entry.facts_checksum, entry.checksum):
            raise _DamagedError(entry.name, _CHANGED)
        return video if video.state is None or num_frames is None else self._films.indexed(video, self._limits)

    def _check_pictures(self, entry: _Entry, count: int) -> None:
        """Raise _DamagedError unless the index has `count` pictures of a clip, one after the other."""
        edges = [0, *entry.pictures["end"].tolist()]
        is_sound = sorted(set(edges)) == edges and edges[-1] == entry.length
        # The CRC-32 of no bytes is its seed.
        changed = (entry.facts.checksum(), entry.seed) != (entry.facts_checksum, entry.checksum)
        if len(entry.pictures) != count or changed or not is_sound:
            raise _DamagedError(entry.name, _CHANGED)

    def _fetch(self, clip: int, entry: _Entry, numbers: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        """Yield the names and the bytes of the pictures `numbers`, which rise."""
        try:
            pictures = self._pictures(entry, numbers)
        except _DamagedError as error:
            self._give_up(entry, error)
            shared = self._shared_store
            whole = shared._entry(clip)
            shared._check_pictures(whole, len(entry.pictures))
            yield from shared._fetch(clip, whole, numbers)
            return
        for number in numbers:
            yield f"{entry.name}, picture {number}", pictures[number]

    def _pictures(self, entry: _Entry, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of the pictures `numbers`, which rise; those that are close are read together."""
        base = entry.facts.checksum()
        rows = entry.pictures
        edges = [0, *rows["end"].tolist()]  # picture n from edges[n] to edges[n + 1]
        groups: list[list[int]] = []
        for number in numbers:
            if groups and edges[number] - edges[groups[-1][-1] + 1] <= _JOINED_BYTES:
                groups[-1].append(number)
            else:
                groups.append([number])
        pictures = dict[int, bytes]()
        for group in groups:
            first = edges[group[0]]
            content = self._read(entry, first, edges[group[-1] + 1])
            for number in group:
                pictures[number] = content[edges[number] - first : edges[number + 1] - first]
                if picture_checksum(base, number, pictures[number]) != rows["checksum"][number]:
                    raise _DamagedError(entry.name, f"picture {number} {_CHANGED}")
        return pictures

    def _read(self, entry: _Entry, start: int, end: int) -> bytes:
        """Return the bytes start .. end - 1 of a clip. Raises _DamagedError, also if the file is too short."""
        try:
            file = self._shard_with(entry, start, end)
            content = b""
            while more := os.pread(file, end - start - len(content), entry.start + start + len(content)):  # <= 2 GiB
                content += more
            return content
        except OSError as error:
            raise _DamagedError(entry.name, error.strerror or str(error)) from error

    def _shard_with(self, entry: _Entry, start: int, end: int) -> int:
        """Return the descriptor of a clip's shard, which has the clip's bytes start .. end - 1. Raises OSError."""
        file = self._files.pop(entry.shard, None) or open(entry.shard, "rb", buffering=0, opener=regular)  # noqa: SIM115  (closed when the oldest)
        self._files[entry.shard] = file  # the last
        if len(self._files) > _MAX_OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        if not 0 <= entry.start + start <= entry.start + end <= os.fstat(file.fileno()).st_size:
            raise OSError(_OUTSIDE)
        return file.fileno()


def verify_files(folder: Path, files: Sequence[StoredFile], workers: int) -> Iterator[str | None]:
    """Yield for each of some files of a set, in order, what is wrong with it, or None.

    workers: files that are read at a time, by threads: reading and hashing release Python's lock.
    """

    def complaint(file: StoredFile) -> str | None:
        path = folder / file.name
        try:
            size = path.stat().st_size
            digest = file_sha256(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if size != file.size:
            return f"{path}: has {size:,} bytes instead of {file.size:,}"
        return None if digest == file.sha256 else f"{path}: has other bytes"

    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(complaint, files)


def stray_files(folder: Path, pack: Pack) -> list[str]:
    """Return a complaint for each file in a set's folder that does not belong to the set."""
    known = {PACK_FILE} | {file.name for file in pack.every_file}
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return [f"{folder / name}: does not belong to the set" for name in sorted(present - known)]
