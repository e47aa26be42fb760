"""Checking a packed set: every byte of every file against the record, and which clips of a shard are damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from summit_train.data.manifest import Manifest, ManifestError, read_manifest
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.packed.format import (
    INDEX_FOLDER,
    Pack,
    PackError,
    ShardIndex,
    StoredFile,
    facts_of,
    is_whole,
    shard_name,
    stored_file,
)

_NAMED_CLIPS = 5


def verify_files(folder: Path, pack: Pack, files: Sequence[StoredFile], workers: int) -> Iterator[list[str]]:
    """Yield the complaints about each of some files of a set, in order, a line each.

    workers: files that are read at a time, by threads: reading and hashing release Python's lock.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(lambda file: _complaints(folder, pack, file), files)


def stray_files(folder: Path, pack: Pack) -> list[str]:
    """Return a complaint for each file in a set's folder that is no part of the set."""
    known = {PACK_FILE} | {file.name for file in pack.every_file}
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    found = {os.path.relpath(path, folder) for path in paths}
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
    return [f"{path}: {what}{_damaged_clips(folder, pack, file)}"]


def _damaged_clips(folder: Path, pack: Pack, file: StoredFile) -> str:
    """Name the clips of a damaged shard that cannot be read, where the index can still tell."""
    shards = [shard.name for shard in pack.shards]
    if file.name not in shards:
        return ""
    try:
        manifest = read_manifest(folder)
        index = ShardIndex(folder / INDEX_FOLDER, pack.clips)
        first = shards.index(file.name) * pack.clips_per_shard
        clips = range(first, min(first + pack.clips_per_shard, pack.clips))
        bad = [clip for clip in clips if not _is_clip_whole(folder / file.name, manifest, index, clip)]
    except (ManifestError, PackError):
        return ""
    if not bad:
        return "; all of its clips are whole: what differs lies between them"
    named = ", ".join(manifest.path(clip) for clip in bad[:_NAMED_CLIPS])
    return f"; damaged: {named}" + (f" and {len(bad) - _NAMED_CLIPS} more clips" if len(bad) > _NAMED_CLIPS else "")


def _is_clip_whole(path: Path, manifest: Manifest, index: ShardIndex, clip: int) -> bool:
    """Return whether a clip's bytes in this shard's file are those that were packed."""
    place = index.place(clip)
    if path.name != shard_name(place.shard) or place.start < 0 or not 0 <= place.length <= path.stat().st_size:
        return False
    with open(path, "rb") as file:
        content = os.pread(file.fileno(), place.length, place.start)
    return is_whole(place, index.pictures(place), facts_of(manifest, clip, place.width, place.height), content)
