"""Copies of packed sets on a node's own disk: the whole set where it fits, else the clips that the node needs first.

Copying checks every byte. A file appears under its name when it is complete and right, with a modification time that
follows from its checksum. Later writes change that time, so a copy of the right size and time needs no second reading.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import file_sha256, locked, replacing
from summit_train.data.manifest import read_manifest
from summit_train.data.packed.format import PackError, Place, ShardIndex, StoredFile, read_pack, shard_name
from summit_train.data.packed.read import HAVE, PARTIAL_FOLDER, staged_folder

Clips = NDArray[np.int64]
Needed = Callable[[], Iterable[Clips]]

_BLOCK = 4096
_READ_BYTES = 4 << 20
_CLIPS_AT_ONCE = 4096
_THREADS = 4  # reading, hashing and writing release Python's lock
# Left free: others write to a node's disk too, and a full file system is slow.
_RESERVED_PART = 0.02


@dataclass
class Staged:
    """The result of staging: bytes copied, bytes that were there before, and a warning where some are missing."""

    copied: int = 0
    present: int = 0
    warning: str = ""


class Staging:
    """One set, copied to one node's disk by `work`; then `result` says what was done.

    packed: the set's folder. dest: a folder on the node's disk; its parent has to exist. needed: the clips that the
    node reads, in the order of use, asked for only where the set does not fit (None: whole shards from the first on).
    max_bytes: the most that the copy may take.
    """

    def __init__(self, packed: Path, dest: Path, needed: Needed | None = None, max_bytes: int | None = None) -> None:
        self._packed, self._dest, self._needed, self._max_bytes = packed, dest, needed, max_bytes
        self._pack = read_pack(packed)
        self.folder = staged_folder(dest, packed)
        self.num_files = len(self._pack.every_file)
        self.result = Staged()

    def work(self) -> Iterator[None]:
        """Copy what is missing, a step at a time; wait for another process that stages the same set.

        An error of the disk, such as one that is full or missing, ends the work with a warning in `result`. Raises
        PackError where the set itself is damaged.
        """
        try:
            # Not the parents: a disk that is not mounted must not become a folder in the node's memory.
            self._dest.mkdir(exist_ok=True)
            with locked(self._dest / f".{self.folder.name}.lock"):
                self.folder.mkdir(exist_ok=True)
                for left in self.folder.rglob(".*.writing"):  # by a process that was killed
                    left.unlink()
                yield from self._fill()
        except OSError as error:
            self._warn(f"{error.strerror or error} ({error.filename or self.folder})")

    def _fill(self) -> Iterator[None]:
        pack = self._pack
        there = {file for file in pack.every_file if self._is_there(file)}
        small, shards = ([file for file in files if file not in there] for files in (pack.files, pack.shards))
        self.result.present = sum(file.size for file in there)
        budget = self._budget(there)
        if _total([*small, *shards]) <= budget:
            yield from self._copy_files([*small, *shards])
            # The complete folder is a packed set of its own.
            pack.write(self.folder)
            shutil.rmtree(self.folder / PARTIAL_FOLDER, ignore_errors=True)
            return
        yield from self._copy_files(small)
        budget -= _total(small)
        if self._needed is None:
            taken = accumulate(room(shard.size) for shard in shards)
            yield from self._copy_files(compress(shards, (total <= budget for total in taken)))
        else:
            yield from self._copy_clips(self._needed(), budget)
        self._warn("there is not enough room")

    def _is_there(self, file: StoredFile) -> bool:
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if path.stat().st_mtime_ns != _mark(file):
            if file_sha256(path) != file.sha256:
                return False
            os.utime(path, ns=(_mark(file), _mark(file)))
        return True

    def _budget(self, there: Iterable[StoredFile]) -> int:
        """Return the bytes that may still be written beside these files."""
        disk = shutil.disk_usage(self._dest)
        free = int(disk.free - _RESERVED_PART * disk.total)
        if self._max_bytes is None:
            return free
        pieces = sum(path.stat().st_blocks * 512 for path in self.folder.glob(f"{PARTIAL_FOLDER}/*"))
        return min(free, self._max_bytes - _total(there) - pieces)

    def _copy_files(self, files: Iterable[StoredFile]) -> Iterator[None]:
        with ThreadPoolExecutor(_THREADS) as pool:
            for size in pool.map(self._copy_file, files):
                self.result.copied += size
                yield

    def _copy_file(self, file: StoredFile) -> int:
        """Copy one file, whole or not at all. Raises PackError where the shared one is not what was packed."""
        with replacing(self.folder / file.name) as out:
            digest = hashlib.sha256()
            for block in _blocks(self._packed / file.name):
                digest.update(block)
                out.write(block)
            if digest.hexdigest() != file.sha256:
                raise PackError(f"{self._packed / file.name}: is not what was packed; `data verify` says more")
            out.flush()
            os.utime(out.fileno(), ns=(_mark(file), _mark(file)))
        return file.size

    def _copy_clips(self, needed: Iterable[Clips], budget: int) -> Iterator[None]:
        """Copy clips in this order until `budget` bytes are taken, each to its place in a sparse file (see read.py).

        A clip is marked as present when all of it is written, so an interrupted copy can be continued. Raises PackError
        for a clip that is damaged in the shared set.
        """
        manifest = read_manifest(self._packed)
        index, path = ShardIndex(self._packed, manifest), self.folder / PARTIAL_FOLDER / HAVE
        if not path.exists():
            # Not sparse: writing to a mapped page that a full disk has no room for would kill this process.
            with replacing(path) as file:
                file.write(bytes(len(manifest)))
        have = np.memmap(path, np.uint8, "r+")
        chosen = self._chosen(index, have, needed, budget)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for start in range(0, len(chosen), _CLIPS_AT_ONCE):
                    # By their place in the shards: the shared file system then reads forwards.
                    batch = sorted(chosen[start : start + _CLIPS_AT_ONCE], key=lambda one: (one[1].shard, one[1].start))
                    self.result.copied += sum(pool.map(partial(self._copy_clip, index, have), batch))
                    yield
        finally:
            have.flush()

    def _chosen(
        self, index: ShardIndex, have: NDArray[np.uint8], needed: Iterable[Clips], budget: int
    ) -> list[tuple[int, Place]]:
        """Return the first of the needed clips that are not here and fit, each once, with their places."""
        # Whole shards that were copied before.
        is_whole = [(self.folder / shard.name).is_file() for shard in self._pack.shards]
        seen, chosen = have.astype(bool), list[tuple[int, Place]]()
        for clips in needed:
            fresh = clips[~seen[clips]]
            seen[fresh] = True
            for clip in fresh.tolist():
                place = index.place(clip)
                if is_whole[place.shard]:
                    continue
                budget -= room(place.length) + _BLOCK  # it may begin within a block
                if budget < 0:
                    return chosen
                chosen.append((clip, place))
            if seen.all():
                break
        return chosen

    def _copy_clip(self, index: ShardIndex, have: NDArray[np.uint8], one: tuple[int, Place]) -> int:
        clip, place = one
        content = index.read_whole(self._packed, clip, place)
        path = self.folder / PARTIAL_FOLDER / shard_name(place.shard)
        path.touch()
        with open(path, "r+b") as file:
            file.seek(place.start)
            file.write(content)
        have[clip] = 1
        return len(content)

    def _warn(self, reason: str) -> None:
        total = sum(file.size for file in self._pack.every_file)
        got = f"{self.result.copied + self.result.present:,} of {total:,} bytes are there"
        self.result.warning = f"{self._dest}: {reason}: {got}, the rest is read from {self._packed}"


def room(size: int) -> int:
    """Return the bytes of a disk that a file of this size takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _total(files: Iterable[StoredFile]) -> int:
    return sum(room(file.size) for file in files)


def _mark(file: StoredFile) -> int:
    """Return the modification time of a right copy, in ns: a second in 2001 to 2010, by its checksum."""
    return (1_000_000_000 + int(file.sha256[:7], 16)) * 1_000_000_000


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error
