"""Packing: first the shards, each by one process and written whole or not at all, then the index and the record.

The number of clips a shard alone decides which clips it holds. Any number of ranks and workers therefore gives the same
bytes, and so does a packing that was killed and continued.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest.columns import sync_folder
from summit_train.data.manifest.files import FileStore
from summit_train.data.manifest.reading import PACK_FILE, PACKED_MANIFEST, PACKING_FOLDER, open_columns, write_columns
from summit_train.data.manifest.tables import Cells
from summit_train.data.packed.format import (
    CLIP_ROW,
    INDEX_FOLDER,
    MAX_MEMBER_BYTES,
    MAX_PICTURES_BYTES,
    PICTURE_ROW,
    Pack,
    PackError,
    Packing,
    StoredFile,
    clip_checksum,
    facts_of,
    picture_checksum,
    read_pack,
    sample,
    shard_end,
    shard_name,
    stored_file,
    write_index,
)
from summit_train.data.packed.payload import Payload, Source, make_payload
from summit_train.data.video.source import DecodeError, worker_pool
from summit_train.files import replacing, write_json

Found = Payload | DecodeError

_SAMPLED_CLIPS = 16
_READ_AHEAD = 2


@dataclass(frozen=True)
class Job:
    """A set to be packed into `folder`: the clips of `store`, `clips_per_shard` in a shard."""

    store: FileStore
    folder: Path
    packing: Packing
    clips_per_shard: int

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return -(-len(self.store.manifest) // self.clips_per_shard)

    def clips(self, shard: int) -> range:
        """Return the clips of a shard."""
        first = shard * self.clips_per_shard
        return range(first, min(first + self.clips_per_shard, len(self.store.manifest)))

    def source(self, clip: int) -> Source:
        """Return a clip's source."""
        manifest = self.store.manifest
        return Source(self.store.path(clip), facts_of(manifest, clip), manifest.sha256(clip))

    def part(self, shard: int) -> Path:
        """Return the path of a finished shard's part of the index."""
        return self.folder / PACKING_FOLDER / f"{shard:06}.npz"


def begin(store: FileStore, folder: Path, packing: Packing, shard_bytes: int, workers: int) -> Job | None:
    """Make the folder, or continue the packing in it; None where the same set lies there, finished.

    workers: processes for the sample that gives the clips a shard. Raises PackError where another set lies there, or
    the manifest is of a packed one.
    """
    manifest = store.manifest
    if manifest.is_packed:
        raise PackError(f"{manifest.source}: is packed already; pack from the manifest that it was made from")
    asked = {"packing": asdict(packing), "fingerprint": manifest.fingerprint(), "shard_bytes": shard_bytes}
    if (folder / PACK_FILE).exists():
        pack = read_pack(folder)
        wanted = replace(manifest, stored=None, pixels=packing.pixels) if packing.pixels else manifest
        if (pack.packing, pack.fingerprint) != (packing, wanted.fingerprint()):
            raise PackError(f"{folder}: another set lies there; delete it, or pack elsewhere")
        _drop_work(folder)  # where it was killed just before
        return None
    plan_path = folder / PACKING_FOLDER / "plan.json"
    if plan_path.exists():
        plan = json.loads(plan_path.read_text(encoding="utf-8"))
        if {name: plan[name] for name in asked} != asked:
            raise PackError(f"{folder}: another packing was begun there and not finished; delete it, or pack elsewhere")
    else:
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {PACKING_FOLDER}:
            raise PackError(f"{folder}: there is something in it; an empty or a new folder is wanted")
        mean = _mean_bytes(Job(store, folder, packing, 1), workers)
        plan = asked | {"clips_per_shard": max(1, round(shard_bytes / mean))}
        write_json(plan_path, plan)
    for left in folder.rglob(".*.writing"):  # by a process that was killed
        left.unlink()
    return Job(store, folder, packing, plan["clips_per_shard"])


def _mean_bytes(job: Job, workers: int) -> float:
    """Return the mean size of a few packed clips from all over the manifest. Raises PackError where all are bad."""
    num_clips = len(job.store.manifest)
    chosen = sorted({place * num_clips // _SAMPLED_CLIPS for place in range(_SAMPLED_CLIPS)})
    with _workers(workers if job.packing.kind == "jpeg" else 0) as pool:
        found = _payloads(job, chosen, pool, _READ_AHEAD * workers)
        sizes = [len(Part(0).add(clip, payload)) for clip, payload in found if isinstance(payload, Payload)]
    if not sizes:
        source = job.store.manifest.source
        raise PackError(f"{source}: none of {len(chosen)} clips that were tried can be read below {job.store.root}")
    return sum(sizes) / len(sizes)


def missing_shards(job: Job) -> list[int]:
    """Return the shards that are still to be packed."""
    names = {path.name for path in job.folder.iterdir()}
    return [n for n in range(job.num_shards) if shard_name(n) not in names or not job.part(n).exists()]


def pack_shards(job: Job, shards: Iterable[int], workers: int) -> Iterator[DecodeError | None]:
    """Pack some shards; yield for each clip None, or why it cannot be packed. A shard with such a clip is not written.

    workers: processes that read and encode; 0 uses this one. Raises PackError where one of them dies, OSError where a
    shard cannot be written.
    """
    with _workers(workers) as pool:
        for shard in shards:
            payloads = _payloads(job, job.clips(shard), pool, _READ_AHEAD * workers)
            yield from _pack_shard(job, shard, payloads)


class _NotWholeError(Exception):
    """A shard has a clip that cannot be packed; its temporary file is deleted."""


def _pack_shard(job: Job, shard: int, payloads: Iterable[tuple[int, Found]]) -> Iterator[DecodeError | None]:
    part, is_whole = Part(shard), True
    try:
        with replacing(job.folder / shard_name(shard)) as file:
            for clip, payload in payloads:
                if isinstance(payload, Payload):
                    file.write(part.add(clip, payload))
                else:
                    is_whole = False
                yield None if isinstance(payload, Payload) else payload
            if not is_whole:
                raise _NotWholeError
            file.write(part.end())
    except _NotWholeError:
        return
    part.save(job.part(shard))


@contextmanager
def _workers(number: int) -> Iterator[ProcessPoolExecutor | None]:
    """Open a pool of processes that make payloads, None for 0. Pending work is dropped when the block ends."""
    if not number:
        yield None
        return
    pool = worker_pool(number)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _payloads(
    job: Job, clips: Iterable[int], pool: ProcessPoolExecutor | None, read_ahead: int
) -> Iterator[tuple[int, Found]]:
    """Yield each clip's payload in order, or why it has none."""
    if pool is None:
        yield from ((clip, _make(job.source(clip), job.packing)) for clip in clips)
        return
    waiting = deque[tuple[int, Future[Found]]]()
    for clip in clips:
        waiting.append((clip, pool.submit(_make, job.source(clip), job.packing)))
        if len(waiting) > read_ahead:
            yield _result(job, waiting)
    while waiting:
        yield _result(job, waiting)


def _make(source: Source, packing: Packing) -> Found:
    try:
        payload = make_payload(source, packing)
    except DecodeError as error:
        return error
    size = sum(map(len, payload.pictures)) + len(payload.content)
    if size >= (MAX_PICTURES_BYTES if payload.pictures else MAX_MEMBER_BYTES):
        return DecodeError(source.facts.path, f"is too large to be packed: {size:,} bytes")
    return payload


def _result(job: Job, waiting: deque[tuple[int, Future[Found]]]) -> tuple[int, Found]:
    clip, future = waiting.popleft()
    try:
        return clip, future.result()
    except BrokenProcessPool as error:
        paths = [job.store.manifest.path(number) for number, _ in [(clip, future), *waiting]]
        raise PackError(
            f"a worker died while it packed one of {', '.join(paths)}: is one of them damaged (see `data scan`), or is "
            "there too little memory (--workers)?"
        ) from error


def finish(job: Job) -> Pack:
    """Write the manifest, the index and the record of a set whose shards are complete."""
    manifest = job.store.manifest
    for name in (PACKED_MANIFEST, INDEX_FOLDER):
        (job.folder / name).mkdir(exist_ok=True)
    # Generators: one part of a large set at a time is in memory.
    cells = (_cells(job, part) for part in _parts(job))
    wide = len(manifest.paths) >= 1 << 32
    write_columns(job.folder / PACKED_MANIFEST, cells, manifest.classes, wide=wide, pixels=job.packing.pixels)
    write_index(job.folder / INDEX_FOLDER, ((part.clips, part.pictures) for part in _parts(job)))
    shards = tuple(StoredFile(shard_name(number), part.size, part.sha256) for number, part in enumerate(_parts(job)))
    names = sorted(
        f"{name}/{file.name}" for name in (PACKED_MANIFEST, INDEX_FOLDER) for file in (job.folder / name).iterdir()
    )
    files = tuple(stored_file(job.folder, name) for name in names)
    fingerprint = open_columns(job.folder / PACKED_MANIFEST, str(job.folder)).fingerprint()
    pack = Pack(job.packing, len(manifest), job.clips_per_shard, fingerprint, shards, files)
    pack.write(job.folder)
    sync_folder(job.folder)
    _drop_work(job.folder)
    return pack


def pack_set(store: FileStore, folder: Path, packing: Packing, shard_bytes: int) -> None:
    """Pack a whole set in this process. Raises DecodeError for a clip that cannot be packed."""
    job = begin(store, folder, packing, shard_bytes, workers=0)
    if job is not None:
        for error in pack_shards(job, missing_shards(job), workers=0):
            if error is not None:
                raise error
        finish(job)


def _parts(job: Job) -> Iterator[LoadedPart]:
    return (load_part(job.part(shard)) for shard in range(job.num_shards))


def _drop_work(folder: Path) -> None:
    if (folder / PACKING_FOLDER).exists():
        shutil.rmtree(folder / PACKING_FOLDER)


def _cells(job: Job, part: LoadedPart) -> Cells:
    """Return the manifest's cells of a shard's clips, with the frames that packing counted."""
    manifest, clips = job.store.manifest, job.clips(part.shard)
    rows = slice(clips.start, clips.stop)
    offsets = manifest.offsets[clips.start : clips.stop + 1].astype(np.int64)
    return Cells(
        paths=manifest.paths[int(offsets[0]) : int(offsets[-1])],
        lengths=np.diff(offsets),
        labels=manifest.labels[rows],
        frame_counts=part.frame_counts,
        reversed_flags=manifest.reversed_flags[rows],
        lines=np.zeros(len(clips), np.int32),
    )


class Part:
    """One shard as it is written, clip by clip, and its rows of the index."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._clips: list[tuple[int, ...]] = []
        self._pictures: list[tuple[int, int]] = []
        self._frame_counts: list[int] = []
        self._size = 0
        self._digest = hashlib.sha256()

    def add(self, clip: int, payload: Payload) -> bytes:
        """Return the bytes of the next clip."""
        facts, base = payload.facts, payload.facts.checksum()
        content = b"".join(payload.pictures) or payload.content
        ends = list(accumulate(map(len, payload.pictures)))
        more = {"picture_ends": ends} if ends else {}
        encoded, start = sample(clip, payload.ending, content, facts, more)
        checksum = base if ends else clip_checksum(facts, content)
        row = (self._shard, checksum, self._size + start, len(content), len(self._pictures), facts.width, facts.height)
        self._clips.append(row)
        sums = (picture_checksum(base, number, picture) for number, picture in enumerate(payload.pictures))
        self._pictures += zip(ends, sums, strict=True)
        self._frame_counts.append(facts.num_frames)
        return self._took(encoded)

    def end(self) -> bytes:
        """Return the bytes that end the shard."""
        return self._took(shard_end())

    def save(self, path: Path) -> None:
        """Write the rows for index and record, whole or not at all."""
        with replacing(path) as file:
            np.savez(
                file,
                clips=np.array(self._clips, CLIP_ROW),
                pictures=np.array(self._pictures, PICTURE_ROW),
                frame_counts=np.array(self._frame_counts, np.int32),
                about=np.array([str(self._shard), str(self._size), self._digest.hexdigest()]),
            )

    def _took(self, content: bytes) -> bytes:
        self._size += len(content)
        self._digest.update(content)
        return content


class LoadedPart(NamedTuple):
    """A saved part: rows of the index, frame counts int32 (clips,), the shard's size in bytes and SHA-256."""

    shard: int
    clips: NDArray[Any]
    pictures: NDArray[Any]
    frame_counts: NDArray[np.int32]
    size: int
    sha256: str


def load_part(path: Path) -> LoadedPart:
    """Read what `save` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        shard, size, digest = arrays["about"].tolist()
        return LoadedPart(int(shard), arrays["clips"], arrays["pictures"], arrays["frame_counts"], int(size), digest)
