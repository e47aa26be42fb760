"""Copies of packed sets on a node's own disk: whole where they fit, else what the node needs first.

Everything is checked while it is copied. A file appears under its name when it is complete and right, and gets a time
of change that follows from its checksum. Whatever changes the file later changes its time too, so a copy of the right
size and time is known to be right without being read again.
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
from itertools import filterfalse
from pathlib import Path

from summit_train.data.shards.local import PARTIAL_FOLDER, staged_folder
from summit_train.data.shards.record import PackError, StoredFile, file_sha256, read_pack
from summit_train.data.staged_clips import ClipCopier, Clips, room
from summit_train.files import locked, replacing

Needed = Callable[[], Iterable[Clips]]

_READ_BYTES = 4 << 20
_THREADS = 4
# Left free: others write to a node's disk too, and a file system that is full to its last block is slow.
_RESERVED_PART = 0.02
# What a disk says that takes no more, or that is not there.
_GIVES_UP = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR,
        errno.EEXIST, errno.ENODEV, errno.ENXIO,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Staged:
    """What came of it: bytes that were copied, bytes that were there before; why not all are there, if they are not."""

    copied: int
    present: int
    warning: str = ""


class Staging:
    """One set copied to one node's disk; `work` does it and `result` says what came of it.

    packed: the set's folder; dest: a folder on the node's disk, whose parent has to be there; needed: the clips that
    the node reads, in the order of their use, asked for only where the set does not fit (None: whole shards from the
    first on); max_bytes: what the copy may take, where that is less than the disk has.
    """

    def __init__(self, packed: Path, dest: Path, needed: Needed | None = None, max_bytes: int | None = None) -> None:
        self._packed, self._dest, self._needed, self._max_bytes = packed, dest, needed, max_bytes
        self._pack = read_pack(packed)
        self.folder = staged_folder(dest, packed)
        self.num_files = len(self._pack.files) + len(self._pack.shards)
        self._copied = self._present = 0
        self._warning = ""

    @property
    def result(self) -> Staged:
        """What came of `work`, when it has ended."""
        return Staged(self._copied, self._present, self._warning)

    def work(self) -> Iterator[None]:
        """Copy what is missing, a step at a time; another process that stages the same set is waited for.

        A disk that is full or missing ends the work with a warning in `result`. Raises PackError where the set itself
        is damaged.
        """
        try:
            # Not the parents: a disk that is not there must not become a folder in the node's memory.
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
        every = (*self._pack.files, *self._pack.shards)
        missing, everything = _total([*small, *shards]), _total(every)
        self._present = sum(file.size for file in every) - sum(file.size for file in (*small, *shards))
        budget = self._budget(everything - missing)
        if missing <= budget:
            yield from self._copy_files([*small, *shards])
            self._finish()
            return
        yield from self._copy_files(small)
        budget -= _total(small)
        if self._needed is None:
            yield from self._copy_files(_fitting(shards, budget))
        else:
            for size in ClipCopier(self._packed, self.folder, self._pack, _THREADS).copy(self._needed(), budget):
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
                if file_sha256(path)[1] != file.sha256:
                    return False
                os.utime(path, ns=_mark(file))
        except FileNotFoundError:
            return False
        return True

    def _budget(self, present: int) -> int:
        """Bytes that may still be written where whole files take `present` of them."""
        disk = shutil.disk_usage(self._dest)
        free = int(disk.free - _RESERVED_PART * disk.total)
        if self._max_bytes is None:
            return free
        pieces = sum(path.stat().st_blocks * 512 for path in self.folder.glob(f"{PARTIAL_FOLDER}/*"))
        return min(free, self._max_bytes - present - pieces)

    def _finish(self) -> None:
        """All is there: the folder is a packed set of its own."""
        self._pack.write(self.folder)
        if (self.folder / PARTIAL_FOLDER).exists():
            shutil.rmtree(self.folder / PARTIAL_FOLDER)

    def _warn(self, reason: str) -> None:
        total = sum(file.size for file in (*self._pack.files, *self._pack.shards))
        got = f"{self._copied + self._present:,} of {total:,} bytes are there"
        self._warning = f"{self._dest}: {reason}: {got}, the rest is read from {self._packed}"


def _mark(file: StoredFile) -> tuple[int, int]:
    """The times of access and change that a right copy gets, in ns: a second between 2001 and 2010, by its checksum."""
    second = (1_000_000_000 + int(file.sha256[:7], 16)) * 1_000_000_000
    return second, second


def _total(files: Iterable[StoredFile]) -> int:
    return sum(room(file.size) for file in files)


def _fitting(files: Iterable[StoredFile], budget: int) -> Iterator[StoredFile]:
    for file in files:
        budget -= room(file.size)
        if budget < 0:
            return
        yield file


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads: reading, hashing and writing leave Python's lock. What is not begun when the block ends is dropped."""
    pool = ThreadPoolExecutor(_THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
