"""Copies of packed sets on a node's own disk: a set is copied whole, or not at all.

Every file of a copy is compared with the SHA-256 in the set's record. The record itself is copied last: a copy without
it is not read, and the next call continues it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.comm.launch import node_name
from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256, locked, regular, replacing, write_text
from summit_train.core.text import counted
from summit_train.data.manifest.reading import PACK_FILE, Manifest
from summit_train.data.packed.format import StoredFile, read_pack
from summit_train.data.packed.read import staged_folder

if TYPE_CHECKING:
    from summit_train.core.comm import World
    from summit_train.core.watch import Watchdog

_READ_BYTES = 4 << 20
_THREADS = 4  # reading, hashing and writing release Python's lock
# Left free: others write to a node's disk too, and a full file system is slow.
_RESERVED_PART = 0.02


@dataclass
class Staged:
    """The result of staging: bytes copied, bytes that were there before, and a warning if the set was not copied."""

    copied: int = 0
    present: int = 0
    warning: str = ""


def stage(packed: Path, dest: Path, show: Callable[[int, int], None]) -> Staged:
    """Copy what is missing of a set to a folder below `dest`; wait for another process that stages the same set.

    dest: a folder on the node's disk; its parent must exist. show: gets the numbers of finished and of all files.
    An error of the disk, such as one that is full or missing, is a warning in the result and leaves no unfinished copy.
    Raises UserError if the set itself is damaged.
    """
    folder = staged_folder(dest, packed)
    try:
        # Not the parents: a disk that is not mounted must not become a folder in the node's memory.
        dest.mkdir(exist_ok=True)
        with locked(dest / f".{folder.name}.lock"):
            try:
                return _copy_set(packed, folder, show)
            except OSError:
                if not (folder / PACK_FILE).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or folder})"
        node = node_name(os.environ, socket.gethostname())
        return Staged(warning=f"{node}: {dest}: {reason}: the set is read from {packed}")


def stage_sets(dest: str | None, manifests: Sequence[Manifest], world: World, watchdog: Watchdog) -> list[str]:
    """Copy the packed sets of a run to `dest`, data.stage, on one rank of each node; return rank 0's notes. Collective.

    A set that does not fit the disk, or a missing disk, gives one warning for all nodes; the set is then
    read from the shared folder. Raises UserError where a set is damaged.
    """
    if dest is None:
        return []
    if dest == "auto":
        return ["data.stage is auto, but nothing was staged: only a job of `submit` stages, and only packed sets"]
    sets = {manifest.source: manifest.is_packed for manifest in manifests}
    packed = [source for source, is_packed in sets.items() if is_packed]
    done = []
    for source in packed if world.local_rank == 0 else []:

        def show(number: int, total: int, source: str = source) -> None:
            watchdog.at(f"copying {source} to {dest}: {number} of {total} files")

        done.append(stage(Path(source), Path(dest), show))
    world.wait(lambda: watchdog.at("waiting for the nodes' copies of the data", waits=True))
    gathered = world.gather([asdict(each) for each in done]) or []
    nodes = [[Staged(**values) for values in node] for node in gathered if node]
    copies = [copy for node in nodes for copy in node]
    notes = []
    if copies:
        copied = sum(copy.copied for copy in copies)
        present = sum(copy.present for copy in copies)
        where = f"{dest} on {counted(len(nodes), 'node')}"
        notes.append(f"staged to {where}: {copied:,} bytes copied, {present:,} were there")
    warnings = [copy.warning for copy in copies if copy.warning]
    if warnings:
        more = f" (and {len(warnings) - 1} more such copies)" if len(warnings) > 1 else ""
        notes.append(f"warning: {warnings[0]}{more}")
    raw = [source for source, is_packed in sets.items() if not is_packed] if world.rank == 0 else []
    return notes + [f"data.stage: {source} is not a packed set; its files are read where they are" for source in raw]


def _copy_set(packed: Path, folder: Path, show: Callable[[int, int], None]) -> Staged:
    pack = read_pack(packed)
    staged = Staged()
    files = pack.every_file
    folder.mkdir(exist_ok=True)
    for left in folder.rglob(".*.writing"):  # by a process that was killed
        left.unlink()
    there = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*")}
    needed = sum(file.size for file in files if there.get(file.name) != file.size)
    disk = shutil.disk_usage(folder)
    if needed > disk.free - _RESERVED_PART * disk.total:
        raise OSError(errno.ENOSPC, f"the disk lacks room for {needed:,} bytes", str(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        sizes = pool.map(partial(_copy_file, packed, folder), files)
        for number, (file, copied) in enumerate(zip(files, sizes, strict=True), 1):
            staged.copied += copied
            staged.present += file.size - copied
            show(number, len(files))
    write_text(folder / PACK_FILE, pack.text())  # the complete folder is a packed set of its own
    return staged


def _copy_file(packed: Path, folder: Path, file: StoredFile) -> int:
    """Copy one file, whole or not at all, unless it is there; return the bytes copied. Raises UserError if changed."""
    if (folder / file.name).is_file() and file_sha256(folder / file.name) == file.sha256:
        return 0
    source = packed / file.name
    digest = hashlib.sha256()
    with replacing(folder / file.name) as out:
        for block in _blocks(source):
            digest.update(block)
            out.write(block)
        if digest.hexdigest() != file.sha256:
            raise UserError(f"{source}: is not what was packed; run `data verify` for details")
    return file.size


def _blocks(source: Path) -> Iterator[bytes]:
    """Yield the pieces of a shared file. Raises UserError for its errors: those of the copy are the disk's."""
    try:
        with open(source, "rb", buffering=0, opener=regular) as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from error
