"""Copies of packed sets on a node's own disk: a set is copied whole, or not at all.

Every file of a copy is compared with the SHA-256 in the set's record. The record itself is copied last: a copy without
it is not read, and the next call continues it.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256, locked, replacing
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.data.packed.format import StoredFile, read_pack
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


def stage(packed: Path, dest: Path, show: Callable[[int, int], None], max_bytes: int | None = None) -> Staged:
    """Copy what is missing of a set to a folder below `dest`; wait for another process that stages the same set.

    dest: a folder on the node's disk; its parent must exist. show: is told the number of finished files and of all.
    max_bytes: the most that the copy may take. An error of the disk, such as one that is full or missing, is a warning
    in the result and leaves no unfinished copy. Raises UserError if the set itself is damaged.
    """
    folder = staged_folder(dest, packed)
    try:
        # Not the parents: a disk that is not mounted must not become a folder in the node's memory.
        dest.mkdir(exist_ok=True)
        with locked(dest / f".{folder.name}.lock"):
            try:
                return _copy_set(packed, folder, show, max_bytes)
            except OSError:
                if not (folder / PACK_FILE).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or folder})"
        return Staged(warning=f"{dest}: {reason}: the set is read from {packed}")


def _copy_set(packed: Path, folder: Path, show: Callable[[int, int], None], max_bytes: int | None) -> Staged:
    pack, staged = read_pack(packed), Staged()
    files = pack.every_file
    folder.mkdir(exist_ok=True)
    for left in folder.rglob(".*.writing"):  # by a process that was killed
        left.unlink()
    missing = [file for file in files if not _has_size_of(folder, file)]
    # Files take whole blocks.
    needed, total = (sum(-(-file.size // _BLOCK) * _BLOCK for file in some) for some in (missing, files))
    disk = shutil.disk_usage(folder)
    free = int(disk.free - _RESERVED_PART * disk.total)
    if needed > free or (max_bytes is not None and total > max_bytes):
        raise OSError(errno.ENOSPC, f"there is not enough room for {total:,} bytes", str(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        sizes = pool.map(partial(_copy_file, packed, folder), files)
        for number, (file, copied) in enumerate(zip(files, sizes, strict=True), 1):
            staged.copied += copied
            staged.present += file.size - copied
            show(number, len(files))
    pack.write(folder)  # the complete folder is a packed set of its own
    return staged


def _has_size_of(folder: Path, file: StoredFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size


def _copy_file(packed: Path, folder: Path, file: StoredFile) -> int:
    """Copy one file, whole or not at all, unless it is there; return the bytes copied.

    Raises UserError if the shared one is not what was packed.
    """
    if _has_size_of(folder, file) and file_sha256(folder / file.name) == file.sha256:
        return 0
    source, digest = packed / file.name, hashlib.sha256()
    with replacing(folder / file.name) as out:
        for block in _blocks(source):
            digest.update(block)
            out.write(block)
        if digest.hexdigest() != file.sha256:
            raise UserError(f"{source}: is not what was packed; run `data verify` for details")
    return file.size


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
