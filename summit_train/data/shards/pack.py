"""Packing: the shards of a set, each by one process, each written whole or not at all; then the index and the record.

Which clips a shard holds follows from the number of clips a shard alone, so any number of ranks and workers gives the
same bytes, and so does a packing that was killed and begun again.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from summit_train.data.cells import Cells
from summit_train.data.columns import sync_folder
from summit_train.data.manifest import (
    PACK_FILE,
    PACKED_MANIFEST,
    PACKING_FOLDER,
    Manifest,
    open_columns,
    write_columns,
)
from summit_train.data.shards.index import write_index
from summit_train.data.shards.layout import (
    INDEX_FOLDER,
    MAX_MEMBER_BYTES,
    MAX_PICTURES_BYTES,
    Facts,
    shard_name,
)
from summit_train.data.shards.part import LoadedPart, Part, load_part
from summit_train.data.shards.payload import Payload, Source, make_payload
from summit_train.data.shards.record import Pack, PackError, Packing, StoredFile, read_pack, stored_file
from summit_train.data.store import FileStore
from summit_train.data.survey import worker_pool
from summit_train.data.video import DecodeError
from summit_train.files import replacing, write_json

Found = Payload | DecodeError

_SAMPLED_CLIPS = 16
_READ_AHEAD = 2


@dataclass(frozen=True)
class Job:
    """A set to be packed into `folder`: the clips of `store`, so many in a shard."""

    store: FileStore
    folder: Path
    packing: Packing
    clips_per_shard: int

    @property
    def num_shards(self) -> int:
        """How many shards the set has."""
        return -(-len(self.store.manifest) // self.clips_per_shard)

    def clips(self, shard: int) -> range:
        """The clips of a shard."""
        first = shard * self.clips_per_shard
        return range(first, min(first + self.clips_per_shard, len(self.store.manifest)))

    def source(self, clip: int) -> Source:
        """A clip as it lies on the disk."""
        manifest = self.store.manifest
        num_frames = manifest.num_frames(clip)
        facts = Facts(
            manifest.stored_path(clip),
            manifest.label(clip),
            -1 if num_frames is None else num_frames,
            manifest.is_reversed(clip),
        )
        return Source(self.store.path(clip), facts, manifest.sha256(clip))

    def part(self, shard: int) -> Path:
        """Where the index of a finished shard waits for the others."""
        return self.folder / PACKING_FOLDER / f"{shard:06}.npz"


def begin(store: FileStore, folder: Path, packing: Packing, shard_bytes: int, workers: int) -> Job | None:
    """Make the folder, or take over what is in it; None where the same set lies there, finished.

    Raises PackError where another set lies there, or the manifest is of a packed one.
    """
    manifest = store.manifest
    if manifest.is_packed:
        raise PackError(f"{manifest.source}: is packed already; pack from the manifest that it was made from")
    asked = {"packing": asdict(packing), "fingerprint": manifest.fingerprint(), "shard_bytes": shard_bytes}
    if (folder / PACK_FILE).exists():
        _check_finished(read_pack(folder), folder, manifest, packing)
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


def _check_finished(pack: Pack, folder: Path, manifest: Manifest, packing: Packing) -> None:
    pixels = replace(manifest, stored=None, pixels=packing.pixels).fingerprint()
    if pack.packing != packing or pack.fingerprint != (pixels if packing.pixels else manifest.fingerprint()):
        raise PackError(f"{folder}: another set lies there; delete it, or pack elsewhere")


def _mean_bytes(job: Job, workers: int) -> float:
    """The mean size of a packed clip, of a few from all over the manifest. Raises PackError where all are bad."""
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
    """The shards that are still to be packed."""
    names = {path.name for path in job.folder.iterdir()}
    return [n for n in range(job.num_shards) if shard_name(n) not in names or not job.part(n).exists()]


def pack_shards(job: Job, shards: Iterable[int], workers: int) -> Iterator[DecodeError | None]:
    """Pack some shards; for each clip None, or why it cannot be packed. A shard with such a clip is not written.

    workers: processes that read and encode; 0: this one does. Raises PackError where one of them dies, OSError where
    the disk does not take a shard.
    """
    with _workers(workers) as pool:
        for shard in shards:
            payloads = _payloads(job, job.clips(shard), pool, _READ_AHEAD * workers)
            yield from _pack_shard(job, shard, payloads)


class _NotWholeError(Exception):
    """A shard with a clip that cannot be packed: what was written of it is dropped."""


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
    """Processes that make payloads; None for 0 of them. What they have not begun when the block ends is dropped."""
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
    """What each clip is packed as, or why it cannot be, in their order."""
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
    """Write the manifest, the index and the record of a set whose shards are all there."""
    manifest = job.store.manifest
    for name in (PACKED_MANIFEST, INDEX_FOLDER):
        (job.folder / name).mkdir(exist_ok=True)
    cells = (_cells(job, load_part(job.part(shard))) for shard in range(job.num_shards))
    wide = len(manifest.paths) >= 1 << 32
    write_columns(job.folder / PACKED_MANIFEST, cells, manifest.classes, wide=wide, pixels=job.packing.pixels)
    parts = (load_part(job.part(shard)) for shard in range(job.num_shards))
    write_index(job.folder / INDEX_FOLDER, ((part.clips, part.pictures) for part in parts))
    parts = (load_part(job.part(shard)) for shard in range(job.num_shards))
    shards = tuple(StoredFile(shard_name(number), part.size, part.sha256) for number, part in enumerate(parts))
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


def _drop_work(folder: Path) -> None:
    if (folder / PACKING_FOLDER).exists():
        shutil.rmtree(folder / PACKING_FOLDER)


def _cells(job: Job, part: LoadedPart) -> Cells:
    """The clips of a shard as they stand in the manifest, with the frames that were counted on the way."""
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
