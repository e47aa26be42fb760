"""Packing: first the shards, each by one process and written whole or not at all, then the index and the record.

The number of clips a shard alone decides which clips it holds. Any number of ranks and workers therefore gives the same
bytes, and so does a packing that was killed and continued.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256, locked, read_file, replacing, write_json, write_text
from summit_train.core.text import counted, from_json
from summit_train.core.workers import READ_AHEAD
from summit_train.data.check import spread
from summit_train.data.manifest.files import FileStore
from summit_train.data.manifest.reading import PACK_FILE, PACKED_MANIFEST, PACKING_FOLDER, write_packed_manifest
from summit_train.data.manifest.tables import DTYPES
from summit_train.data.packed import format as packed
from summit_train.data.packed.payload import PackedSample, limits_of, make_sample, scratch_file
from summit_train.data.video.flow import PRESETS
from summit_train.data.video.pictures import holds_pictures
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import WHOLE

_SAMPLED_CLIPS = 16


@dataclass(frozen=True)
class PackJob:
    """A set to be packed into `folder`: the clips of `store`, `clips_per_shard` in a shard."""

    store: FileStore
    folder: Path
    packing: packed.Packing
    clips_per_shard: int

    def clips(self, shard: int) -> range:
        return range(len(self.store.manifest))[shard * self.clips_per_shard :][: self.clips_per_shard]

    def parts(self) -> list[Path]:
        """Return the file of each shard's rows of the index, which is written when the shard is finished."""
        num_shards = -(-len(self.store.manifest) // self.clips_per_shard)
        return [self.folder / PACKING_FOLDER / f"{shard:06}.npz" for shard in range(num_shards)]

    def share_bytes(self, clip: int, next_clip: int) -> bool:
        """True if two successive clips are spans of one video, whose bytes are stored once."""
        manifest = self.store.manifest
        if self.packing.kind != "bytes" or WHOLE in (manifest.clip(clip).span, manifest.clip(next_clip).span):
            return False
        file, next_file = ((manifest.path(n), manifest.sha256(n)) for n in (clip, next_clip))
        return file == next_file and not holds_pictures(self.store.path(clip))

    def is_shared(self, clip: int) -> bool:
        """True if a clip's bytes are in its shard already, as those of the clip before."""
        return clip % self.clips_per_shard > 0 and self.share_bytes(clip - 1, clip)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into this folder within the block. Raises UserError if one already does.

    A finished set needs no lock, and may be on a disk where nothing can be written.
    """
    with ExitStack() as held:
        if not (folder / PACK_FILE).exists() or (folder / PACKING_FOLDER).exists():
            whole = Path(os.path.realpath(folder))  # "." has no name
            try:
                held.enter_context(locked(whole.parent / f".{whole.name}.lock", wait=False))
            except BlockingIOError as error:
                wait = "another process is packing into it; wait for it, or pack elsewhere"
                raise UserError(f"{folder}: {wait}") from error
        yield


def begin(store: FileStore, folder: Path, packing: packed.Packing, shard_bytes: int, workers: int) -> PackJob | None:
    """Make the folder, or continue the packing in it; None if it has the same set, finished.

    workers: processes for the sample that gives the clips a shard. Raises UserError if the folder contains something
    else, or the manifest is of a packed set.
    """
    manifest = store.manifest
    if manifest.is_packed:
        raise UserError(f"{manifest.source}: is packed already; pack from the manifest that it was made from")
    if manifest.boxes is not None and (packing.modality == "flow" or packing.every > 1):
        raise UserError(f"{manifest.source}: must be packed as RGB, each frame: it has boxes")
    if packing.modality == "flow" and (reason := manifest.no_flow()) is not None:
        raise UserError(reason)
    if (folder / PACK_FILE).exists():
        pack = packed.read_pack(folder)
        if (pack.packing, pack.fingerprint) != (packing, replace(manifest, pixels=packing.pixels).fingerprint()):
            raise UserError(f"{folder}: contains a different set; delete it, or pack elsewhere")
        shutil.rmtree(folder / PACKING_FOLDER, ignore_errors=True)  # where it was killed just before
        return None
    plan: dict[str, Any] = {"packing": packing.entries(), "fingerprint": manifest.fingerprint()}
    plan["shard_bytes"] = shard_bytes
    plan_path = folder / PACKING_FOLDER / "plan.json"
    if plan_path.exists():
        old = from_json(read_file(plan_path))
        if old != plan | {"clips_per_shard": old["clips_per_shard"]}:
            raise UserError(f"{folder}: contains an unfinished, different set; delete it, or pack elsewhere")
        plan = old
    else:
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {PACKING_FOLDER}:
            raise UserError(f"{folder}: must be an empty or a new folder, but has files")
        plan["clips_per_shard"] = max(1, round(shard_bytes / _mean_bytes(PackJob(store, folder, packing, 1), workers)))
        write_json(plan_path, plan)
    for left in folder.rglob(".*.writing"):  # by a process that was killed
        left.unlink()
    return PackJob(store, folder, packing, plan["clips_per_shard"])


def _mean_bytes(job: PackJob, workers: int) -> float:
    """Return the mean size of a few packed clips from all over the manifest. Raises UserError where all are bad."""
    num_clips = len(job.store.manifest)
    chosen = sorted({place * num_clips // _SAMPLED_CLIPS for place in range(_SAMPLED_CLIPS)})
    # By the fastest method: the pictures of all have about the same size.
    quick = replace(job.packing, method="dis", preset=PRESETS[0]) if job.packing.method else job.packing
    samples = list(_samples(replace(job, packing=quick), chosen, 0 if job.packing.kind == "bytes" else workers))
    sizes = []
    for clip, sample in zip(chosen, samples, strict=True):
        if isinstance(sample, PackedSample):
            first = clip
            while first > 0 and job.share_bytes(first - 1, first):
                first -= 1
            last = clip
            while last + 1 < num_clips and job.share_bytes(last, last + 1):
                last += 1
            before, behind = sample.around(clip)
            sizes.append((len(before) + sample.length + len(behind)) / (1 + last - first))
    if not sizes:
        source = job.store.manifest.source
        tried = f"none of {counted(len(chosen), 'clip')} that were tried can be read"
        raise UserError(f"{source}: {tried} below {job.store.root}; the first: {samples[0]}")
    return sum(sizes) / len(sizes)


def missing_shards(job: PackJob) -> list[int]:
    names = {path.name for path in job.folder.iterdir()}
    return [n for n, part in enumerate(job.parts()) if packed.shard_name(n) not in names or not part.exists()]


def pack_shards(job: PackJob, shards: Iterable[int], workers: int) -> Iterator[DecodeError | None]:
    """Pack some shards; yield for each clip None, or why it cannot be packed. A shard with such a clip is not written.

    workers: processes that read and encode; 0 uses this one. Raises OSError where a shard cannot be written.
    """
    shards = list(shards)
    # Asked once of each clip: the file system may answer otherwise later.
    clips, planned = tee((clip, job.is_shared(clip)) for shard in shards for clip in job.clips(shard))
    with closing(_samples(job, (clip for clip, is_shared in clips if not is_shared), workers)) as samples:
        for shard in shards:
            yield from _pack_shard(job, shard, islice(planned, len(job.clips(shard))), samples)


class _NotWholeError(Exception):
    """A shard has a clip that cannot be packed; its temporary file is deleted."""


def _pack_shard(
    job: PackJob, shard: int, planned: Iterable[tuple[int, bool]], samples: Iterator[PackedSample | DecodeError]
) -> Iterator[DecodeError | None]:
    """Write a shard, and with it its part: the rows of the index and the record's facts.

    planned: its clips, and whether each shares the bytes of the clip before. samples: of the others.
    """
    clips = list[tuple[int, ...]]()
    pictures = list[tuple[int, int]]()
    frame_counts = list[int]()
    manifest = job.store.manifest
    digest = hashlib.sha256()
    is_whole = True
    with suppress(_NotWholeError), replacing(job.folder / packed.shard_name(shard)) as file:
        for clip, is_shared in planned:
            if not is_shared:
                sample = next(samples)
                content_clip = clip
                start = file.tell() + packed.CONTENT_AT
            if isinstance(sample, PackedSample):
                facts = sample.facts
                contents: Iterable[bytes] = sample.bytes_of(clip)
                if is_shared:
                    facts = packed.facts_of(manifest, clip)
                    content_name = f"{content_clip:09}{sample.ending}"
                    contents = packed.around_content(clip, "", 0, facts, content=content_name)[1:]
                try:
                    for content in contents:
                        digest.update(content)
                        file.write(content)
                except DecodeError as error:
                    sample = error
            if isinstance(sample, DecodeError):
                is_whole = False
                yield DecodeError(manifest.path(clip), sample.reason)
                continue
            size = facts.width, facts.height
            clips.append((shard, sample.checksum, start, sample.length, len(pictures), *size, facts.checksum()))
            pictures += sample.pictures
            frame_counts.append(facts.num_frames)
            yield None
        if not is_whole:
            raise _NotWholeError
        digest.update(packed.SHARD_END)
        file.write(packed.SHARD_END)
        with replacing(job.parts()[shard]) as part:
            np.savez(
                part,
                clips=np.array(clips, packed.CLIP_ROW),
                pictures=np.array(pictures, packed.PICTURE_ROW),
                frame_counts=np.array(frame_counts, np.int32),
                about=np.array([str(shard), str(file.tell()), digest.hexdigest()]),
            )


def _samples(job: PackJob, clips: Iterable[int], workers: int) -> Generator[PackedSample | DecodeError, None, None]:
    """Yield each clip's sample in order, or why it has none."""
    folder = job.folder / PACKING_FOLDER
    clips, keys = tee(clips)
    samples = spread(
        partial(make_sample, job.store, job.packing, folder),
        keys,
        workers,
        seconds=limits_of(job.packing).seconds,
        name=job.store.manifest.path,
        modules=[__name__],
        ahead=READ_AHEAD,
    )
    for clip, sample in zip(clips, samples, strict=True):
        try:
            yield sample
        finally:
            scratch_file(folder, clip).unlink(missing_ok=True)


def finish(job: PackJob) -> packed.Pack:
    """Write the manifest, the index and the record of a set whose shards are complete."""
    source = job.store.manifest
    manifest = replace(
        source,
        frame_counts=np.concatenate(list(_saved(job, "frame_counts"))),  # as packing counted them
        lines=np.zeros(len(source), np.int32),
        # Reading jumps to key frames in the files that `data index` has checked.
        digests=source.digests if job.packing.kind == "bytes" else np.zeros(0, DTYPES["digests"]),
        pixels=job.packing.pixels,
    )
    fingerprint = write_packed_manifest(job.folder, manifest)
    num_pictures = [len(pictures) for pictures in _saved(job, "pictures")]
    clips = np.concatenate(list(_saved(job, "clips")))
    clips["first"] += np.cumsum([0, *num_pictures])[clips["shard"]]  # a shard's own rows count them from 0
    folder = job.folder
    index = folder / packed.INDEX_FOLDER
    _save_rows(index / packed.CLIPS, packed.CLIP_ROW, len(clips), [clips])
    # The rows of one shard at a time are in memory: a large set has a thousand million pictures.
    _save_rows(index / packed.PICTURES, packed.PICTURE_ROW, sum(num_pictures), _saved(job, "pictures"))
    about = (part.tolist() for part in _saved(job, "about"))
    shards = tuple(packed.StoredFile(packed.shard_name(int(shard)), int(size), digest) for shard, size, digest in about)
    paths = sorted(path for part in (folder / PACKED_MANIFEST, index) for path in part.iterdir())
    files = tuple(
        packed.StoredFile(str(path.relative_to(folder)), path.stat().st_size, file_sha256(path)) for path in paths
    )
    pack = packed.Pack(job.packing, len(source), job.clips_per_shard, fingerprint, shards, files)
    write_text(folder / PACK_FILE, pack.text())
    shutil.rmtree(folder / PACKING_FOLDER)
    return pack


def _saved(job: PackJob, name: str) -> Iterator[NDArray[Any]]:
    """Yield an array of each shard's saved part."""
    for path in job.parts():
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays[name]


def _save_rows(path: Path, row: np.dtype[Any], length: int, parts: Iterable[NDArray[Any]]) -> None:
    """Write a .npy file of `length` rows, whole or not at all."""
    header = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (length,)}
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part.astype(row, copy=False).tobytes())


def pack_set(store: FileStore, folder: Path, packing: packed.Packing, shard_bytes: int, workers: int = 0) -> None:
    """Pack a whole set on one rank. Raises DecodeError for a clip that cannot be packed."""
    job = begin(store, folder, packing, shard_bytes, workers)
    if job is not None:
        for error in pack_shards(job, missing_shards(job), workers):
            if error is not None:
                raise error
        finish(job)
