"""Copies of packed sets on a node's own disk: a set is copied whole, or not at all.

Every file of a copy is compared with the SHA-256 in the set's record. The record itself is copied last: a copy without
it is not read, and the next call continues it.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from summit_train.core.files import file_sha256, locked, replacing
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.packed.format import PackError, StoredFile, read_pack
from summit_train.data.packed.read import staged_folder

_BLOCK = 4096  # of a disk
_READ_BYTES = 4 << 20
_THREADS = 4  # reading, hashing and writing release Python's lock
# Left free: others write to a node's disk too, and a full file system is slow.
_RESERVED_PART = 0.02


@dataclass
class Staged:
    """The result of staging: bytes copied, bytes that were there before, and a warning if there is no copy."""

    copied: int = 0
    present: int = 0
    warning: str = ""


class Staging:
    """One set, copied to one node's disk by `work`; `result` then tells what was done.

    packed: the set's folder. dest: a folder on the node's disk; its parent must exist. max_bytes: the most that the
    copy may take.
    """

    def __init__(self, packed: Path, dest: Path, max_bytes: int | None = None) -> None:
        self._packed, self._dest, self._max_bytes = packed, dest, max_bytes
        self._pack = read_pack(packed)
        self.folder = staged_folder(dest, packed)
        self.num_files = len(self._pack.every_file)
        self.result = Staged()

    def work(self) -> Iterator[None]:
        """Copy what is missing, one file a step; wait for another process that stages the same set.

        An error of the disk, such as one that is full or missing, ends the work with a warning in `result` and without
        an unfinished copy. Raises PackError if the set itself is damaged.
        """
        try:
            # Not the parents: a disk that is not mounted must not become a folder in the node's memory.
            self._dest.mkdir(exist_ok=True)
            with locked(self._dest / f".{self.folder.name}.lock"):
                try:
                    yield from self._copy()
                except OSError:
                    if not (self.folder / PACK_FILE).exists():
                        shutil.rmtree(self.folder, ignore_errors=True)
                    raise
        except OSError as error:
            reason = f"{error.strerror or error} ({error.filename or self.folder})"
            self.result = Staged(warning=f"{self._dest}: {reason}: the set is read from {self._packed}")

    def _copy(self) -> Iterator[None]:
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.rglob(".*.writing"):  # by a process that was killed
            left.unlink()
        files = self._pack.every_file
        missing = [file for file in files if not self._has_size_of(file)]
        # Files take whole blocks.
        needed, total = (sum(-(-file.size // _BLOCK) * _BLOCK for file in some) for some in (missing, files))
        disk = shutil.disk_usage(self._dest)
        free = int(disk.free - _RESERVED_PART * disk.total)
        if needed > free or (self._max_bytes is not None and total > self._max_bytes):
            raise OSError(errno.ENOSPC, f"there is not enough room for {total:,} bytes", str(self.folder))
        with ThreadPoolExecutor(_THREADS) as pool:
            for file, copied in zip(files, pool.map(self._bring, files), strict=True):
                self.result.copied += copied
                self.result.present += file.size - copied
                yield
        # The complete folder is a packed set of its own.
        self._pack.write(self.folder)

    def _has_size_of(self, file: StoredFile) -> bool:
        path = self.folder / file.name
        return path.is_file() and path.stat().st_size == file.size

    def _bring(self, file: StoredFile) -> int:
        """Copy one file, whole or not at all, unless it is there; return the bytes copied.

        Raises PackError if the shared one is not what was packed.
        """
        if self._has_size_of(file) and file_sha256(self.folder / file.name) == file.sha256:
            return 0
        source, digest = self._packed / file.name, hashlib.sha256()
        with replacing(self.folder / file.name) as out:
            for block in _blocks(source):
                digest.update(block)
                out.write(block)
            if digest.hexdigest() != file.sha256:
                raise PackError(f"{source}: is not what was packed; run `data verify` for details")
        return file.size


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error
