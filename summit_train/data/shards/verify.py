"""Checking a packed set: every byte of every file against the record, and where a shard differs, which clips."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from summit_train.data.manifest import Manifest, ManifestError, read_manifest
from summit_train.data.shards.index import ShardIndex, is_whole
from summit_train.data.shards.layout import INDEX_FOLDER, shard_name
from summit_train.data.shards.record import Pack, PackError, StoredFile, stored_file
from summit_train.data.shards.store import facts_of

_NAMED_CLIPS = 5


def verify_files(folder: Path, pack: Pack, files: Sequence[StoredFile], workers: int) -> Iterator[list[str]]:
    """For each of some files of a set, in their order, what is wrong with it: nothing, or a line for each complaint.

    workers: files that are read at a time. Reading and hashing leave Python's lock, so threads do.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(lambda file: _complaints(folder, pack, file), files)


def stray_files(folder: Path, pack: Pack) -> list[str]:
    """What lies in a set's folder and is no part of it."""
    known = {file.name for file in (*pack.shards, *pack.files)}
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    found = {os.path.relpath(path, folder) for path in paths}
    return [f"{folder / name}: is no part of the set" for name in sorted(found - known - {"pack.json"})]


def _complaints(folder: Path, pack: Pack, file: StoredFile) -> list[str]:
    path = folder / file.name
    try:
        found = stored_file(folder, file.name)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    if found == file:
        return []
    what = f"has {found.size:,} bytes instead of {file.size:,}" if found.size != file.size else "has other bytes"
    return [f"{path}: {what}{_damaged_clips(folder, pack, file)}"]


def _damaged_clips(folder: Path, pack: Pack, file: StoredFile) -> str:
    """Which clips of a damaged shard cannot be read any more, where the index can still say that."""
    shards = [shard.name for shard in pack.shards]
    if file.name not in shards:
        return ""
    try:
        manifest = read_manifest(folder)
        index = ShardIndex(folder / INDEX_FOLDER, pack.clips)
        first = shards.index(file.name) * pack.clips_per_shard
        clips = range(first, min(first + pack.clips_per_shard, pack.clips))
        bad = [clip for clip in clips if not is_clip_whole(folder / file.name, manifest, index, clip)]
    except (ManifestError, PackError):
        return ""
    if not bad:
        return "; all of its clips are whole: what differs lies between them"
    named = ", ".join(manifest.path(clip) for clip in bad[:_NAMED_CLIPS])
    return f"; damaged: {named}" + (f" and {len(bad) - _NAMED_CLIPS} more clips" if len(bad) > _NAMED_CLIPS else "")


def is_clip_whole(path: Path, manifest: Manifest, index: ShardIndex, clip: int) -> bool:
    """Whether a clip's bytes in this file, at the place that the index says, are the ones that were packed."""
    place = index.place(clip)
    if path.name != shard_name(place.shard) or place.start < 0 or not 0 <= place.length <= path.stat().st_size:
        return False
    with open(path, "rb") as file:
        content = os.pread(file.fileno(), place.length, place.start)
    return is_whole(place, index.pictures(place), facts_of(manifest, clip, place), content)
