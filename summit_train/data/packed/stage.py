"""Copies of packed sets on a node's own disk: the whole set where it fits, else the clips that the node needs first.

Copying checks every byte. A file appears under its name when it is complete and right, with a modification time that
follows from its checksum. Later writes change that time, so a copy of the right size and time needs no second reading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, compress, filterfalse, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest import read_manifest
from summit_train.data.packed.format import (
    INDEX_FOLDER,
    Pack,
    PackError,
    Place,
    ShardIndex,
    StoredFile,
    facts_of,
    is_whole,
    read_pack,
    shard_name,
)
from summit_train.data.packed.read import HAVE, PARTIAL_FOLDER, staged_folder
from summit_train.files import file_sha256, locked, replacing

Clips = NDArray[np.int64]
Needed = Callable[[], Iterable[Clips]]

_BLOCK = 4096
_READ_BYTES = 4 << 20
_CLIPS_AT_ONCE = 4096
_THREADS = 4
# Left free: others write to a node's disk too, and a full file system is slow.
_RESERVED_PART = 0.02
# A disk that is full, or that is not there.
_GIVES_UP = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR,
        errno.EEXIST, errno.ENODEV, errno.ENXIO,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Staged:
    """The result of staging: bytes copied, bytes that were there before, and a warning where some are missing."""

    copied: int
    present: int
    warning: str = ""


class Staging:
    """One set, copied to one node's disk by `work`.

    packed: the set's folder. dest: a folder on the node's disk; its parent has to exist. needed: the clips that the
    node reads, in the order of use, asked for only where the set does not fit (None: whole shards from the first on).
    max_bytes: the most that the copy may take.
    """

    def __init__(self, packed: Path, dest: Path, needed: Needed | None = None, max_bytes: int | None = None) -> None:
        self._packed, self._dest, self._needed, self._max_bytes = packed, dest, needed, max_bytes
        self._pack = read_pack(packed)
        self.folder = staged_folder(dest, packed)
        self.num_files = len(self._pack.every_file)
        self._copied = self._present = 0
        self._warning = ""

    @property
    def result(self) -> Staged:
        """Return the result of `work`, when that has ended."""
        return Staged(self._copied, self._present, self._warning)

    def work(self) -> Iterator[None]:
        """Copy what is missing, a step at a time; wait for another process that stages the same set.

        A disk that is full or missing ends the work with a warning in `result`. Raises PackError where the set itself
        is damaged.
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
            if error.errno not in _GIVES_UP:
                raise
            self._warn(f"{error.strerror} ({error.filename or self.folder})")

    def _fill(self) -> Iterator[None]:
        small, shards = (list(filterfalse(self._is_there, files)) for files in (self._pack.files, self._pack.shards))
        every = self._pack.every_file
        missing, everything = _total([*small, *shards]), _total(every)
        self._present = sum(file.size for file in every) - sum(file.size for file in (*small, *shards))
        budget = self._budget(everything - missing)
        if missing <= budget:
            yield from self._copy_files([*small, *shards])
            # The complete folder is a packed set of its own.
            self._pack.write(self.folder)
            if (self.folder / PARTIAL_FOLDER).exists():
                shutil.rmtree(self.folder / PARTIAL_FOLDER)
            return
        yield from self._copy_files(small)
        budget -= _total(small)
        if self._needed is None:
            taken = accumulate(room(shard.size) for shard in shards)
            yield from self._copy_files(compress(shards, (total <= budget for total in taken)))
        else:
            for size in _ClipCopier(self._packed, self.folder, self._pack).copy(self._needed(), budget):
                self._copied += size
                yield
        self._warn("there is not enough room")

    def _copy_files(self, files: Iterable[StoredFile]) -> Iterator[None]:
        with _threads() as pool:
            for size in pool.map(self._copy_file, files):
                self._copied += size
                yield

    def _copy_file(self, file: StoredFile) -> int:
        """Copy one file, whole or not at all. Raises PackError where the shared one is not what was packed."""
        target = self.folder / file.name
        with replacing(target) as out:
            digest = hashlib.sha256()
            for block in _blocks(self._packed / file.name):
                digest.update(block)
                out.write(block)
            if digest.hexdigest() != file.sha256:
                raise PackError(f"{self._packed / file.name}: is not what was packed; `data verify` says more")
            out.flush()
            os.utime(out.fileno(), ns=_mark(file))
        return file.size

    def _is_there(self, file: StoredFile) -> bool:
        path = self.folder / file.name
        try:
            status = path.stat()
            if status.st_size != file.size:
                return False
            if status.st_mtime_ns != _mark(file)[1]:
                if file_sha256(path) != file.sha256:
                    return False
                os.utime(path, ns=_mark(file))
        except FileNotFoundError:
            return False
        return True

    def _budget(self, present: int) -> int:
        """Return the bytes that may still be written, where whole files take `present` of them."""
        disk = shutil.disk_usage(self._dest)
        free = int(disk.free - _RESERVED_PART * disk.total)
        if self._max_bytes is None:
            return free
        pieces = sum(path.stat().st_blocks * 512 for path in self.folder.glob(f"{PARTIAL_FOLDER}/*"))
        return min(free, self._max_bytes - present - pieces)

    def _warn(self, reason: str) -> None:
        total = sum(file.size for file in self._pack.every_file)
        got = f"{self._copied + self._present:,} of {total:,} bytes are there"
        self._warning = f"{self._dest}: {reason}: {got}, the rest is read from {self._packed}"


class _ClipCopier:
    """Copies single clips into sparse files, at the places that they have in their shards (see read.LocalCopy).

    A clip is marked as present when all of it is written, so an interrupted copy can be continued.
    """

    def __init__(self, packed: Path, folder: Path, pack: Pack) -> None:
        self._packed, self._folder = packed, folder
        self._manifest = read_manifest(packed)
        self._index = ShardIndex(packed / INDEX_FOLDER, pack.clips)
        (folder / PARTIAL_FOLDER).mkdir(exist_ok=True)
        path = folder / PARTIAL_FOLDER / HAVE
        if not path.exists():
            # Not sparse: writing to a mapped page that a full disk has no room for would kill this process.
            with replacing(path) as file:
                file.write(bytes(pack.clips))
        self._have = np.memmap(path, np.uint8, "r+")
        # Whole shards that were copied before.
        self._whole = [(folder / shard.name).is_file() for shard in pack.shards]

    def copy(self, needed: Iterable[Clips], budget: int) -> Iterator[int]:
        """Copy clips in this order until `budget` bytes are taken; yield the bytes copied, batch by batch.

        Raises PackError for a clip that is damaged in the shared set, OSError where the disk takes no more.
        """
        chosen = self._chosen(needed, budget)
        try:
            with _threads() as pool:
                for start in range(0, len(chosen), _CLIPS_AT_ONCE):
                    # By their place in the shards: the shared file system then reads forwards.
                    batch = sorted(
                        chosen[start : start + _CLIPS_AT_ONCE], key=lambda item: (item[1].shard, item[1].start)
                    )
                    groups = [list(group) for _, group in groupby(batch, lambda item: item[1].shard)]
                    yield sum(pool.map(self._copy_clips, groups))
        finally:
            self._have.flush()

    def _chosen(self, needed: Iterable[Clips], budget: int) -> list[tuple[int, Place]]:
        """Return the first of the needed clips that are not here and fit, each once, with their places."""
        seen = self._have.astype(bool)
        chosen = list[tuple[int, Place]]()
        for clips in needed:
            fresh = clips[~seen[clips]]
            seen[fresh] = True
            for clip in fresh.tolist():
                place = self._index.place(clip)
                if self._whole[place.shard]:
                    continue
                budget -= room(place.length) + _BLOCK  # it may begin within a block
                if budget < 0:
                    return chosen
                chosen.append((clip, place))
            if seen.all():
                break
        return chosen

    def _copy_clips(self, clips: list[tuple[int, Place]]) -> int:
        """Copy some clips of one shard; return their bytes."""
        name, total = shard_name(clips[0][1].shard), 0
        target = os.open(self._folder / PARTIAL_FOLDER / name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for clip, place in clips:
                content = self._read(name, clip, place)
                written = os.pwrite(target, content, place.start)
                while written < len(content):
                    written += os.pwrite(target, content[written:], place.start + written)
                self._have[clip] = 1
                total += len(content)
        finally:
            os.close(target)
        return total

    def _read(self, name: str, clip: int, place: Place) -> bytes:
        path = self._packed / name
        try:
            with open(path, "rb") as file:
                file.seek(place.start)
                content = file.read(place.length)
        except OSError as error:
            raise PackError(f"{path}: {error.strerror}") from error
        if not is_whole(
            place, self._index.pictures(place), facts_of(self._manifest, clip, place.width, place.height), content
        ):
            named = self._manifest.path(clip)
            raise PackError(f"{path}: {named} is not what was packed; `data verify` says more")
        return content


def room(size: int) -> int:
    """Return the bytes of a disk that a file of this size takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _mark(file: StoredFile) -> tuple[int, int]:
    """Return the access and modification times of a right copy, in ns: a second in 2001 to 2010, by its checksum."""
    second = (1_000_000_000 + int(file.sha256[:7], 16)) * 1_000_000_000
    return second, second


def _total(files: Iterable[StoredFile]) -> int:
    return sum(room(file.size) for file in files)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Open a thread pool: reading, hashing and writing release Python's lock. Pending work is dropped at the end."""
    pool = ThreadPoolExecutor(_THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
