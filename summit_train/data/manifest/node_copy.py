"""The columns of a large list, parsed once on a node: its other processes, and later commands, map one copy of them.

The copies are in the folder summit_train_lists_UID_NODE of the temporary folder: a file that many nodes map cannot be
deleted by one of them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.files import locked, read_file, write_text
from summit_train.core.text import printable
from summit_train.data.manifest import reading
from summit_train.data.manifest.tables import CLASSES_FILE

_MIN_BYTES = 2 << 20  # of a list: some 50,000 rows, which take less time than the disk
_MAX_BYTES = 2 << 30  # of all copies
_CHECKSUM = "checksum"
_LOG = logging.getLogger(__name__)


def read_shared(path: str | Path, region: str | None) -> reading.Manifest:
    """Return `read_manifest(path, region)`, that of a large list mapped. Class folders and boxes have no copy."""
    source, manifest = Path(path), None
    if not source.is_file() or source.stat().st_size < _MIN_BYTES:
        return reading.read_manifest(source, region)
    try:
        folder = _own_folder()
        copy = folder / _name(source, region)
        if (manifest := _mapped(copy, source)) is not None:
            return manifest
        with locked(folder / f"{copy.name}.lock"):  # the node's other processes wait for the first
            if (manifest := _mapped(copy, source)) is None:
                manifest = reading.read_manifest(source, region)
                if manifest.boxes is None and copy.name == _name(source, region):  # it has not changed meanwhile
                    _write(copy, manifest)
                    del manifest  # memory need not hold it twice
                    manifest = _mapped(copy, source)
    except OSError as error:
        text = "summit-train: note: the columns of %s cannot be kept: %s (%s); set TMPDIR"
        _LOG.warning(text, printable(str(source)), printable(str(error.filename)), error.strerror)
    return manifest or reading.read_manifest(source, region)


def _own_folder() -> Path:
    """Return the folder of this node's copies, which only this user can read and write. Raises OSError."""
    folder = Path(tempfile.gettempdir(), f"summit_train_lists_{os.getuid()}_{os.uname().nodename}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not a folder of this user alone", str(folder))
    return folder


def _name(source: Path, region: str | None) -> str:
    """Return what tells a list, in its present state and read as it would be now, from all others."""
    state = source.stat()
    states = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    readers = [zlib.crc32(path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    meaning = (region, reading.read_classes(source.parent / CLASSES_FILE), summit_train.__version__, readers)
    return hashlib.sha256(ascii((os.path.abspath(source), states, meaning)).encode()).hexdigest()[:32]


def _mapped(copy: Path, source: Path) -> reading.Manifest | None:
    """Return the manifest in a copy; None if it is missing or damaged."""
    with suppress(OSError, UserError, ValueError):
        if int(read_file(copy / _CHECKSUM)) == _checksum(copy):
            os.utime(copy)
            return replace(reading.read_packed(copy), source=str(source), is_packed=False)
    return None


def _checksum(copy: Path) -> int:
    """Return the CRC-32 of all columns. Raises OSError, and ValueError for an empty file."""
    number = 0
    for path in sorted((copy / reading.PACKED_MANIFEST).iterdir()):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            number = zlib.crc32(content, zlib.crc32(path.name.encode(), number))
    return number


def _write(copy: Path, manifest: reading.Manifest) -> None:
    """Write a copy, whole or not at all, and delete the others that were used longest ago."""
    with tempfile.TemporaryDirectory(dir=copy.parent, ignore_cleanup_errors=True) as unfinished:
        reading.write_packed_manifest(Path(unfinished), manifest)
        write_text(Path(unfinished, _CHECKSUM), str(_checksum(Path(unfinished))))
        shutil.rmtree(copy, ignore_errors=True)  # it is damaged
        os.rename(unfinished, copy)
    size = 0
    with suppress(FileNotFoundError):  # another process deletes, too
        for path in sorted(filter(Path.is_dir, copy.parent.iterdir()), key=lambda path: -path.stat().st_mtime_ns):
            size += sum(file.stat().st_size for file in path.rglob("*"))
            if size > _MAX_BYTES and path != copy:
                shutil.rmtree(path, ignore_errors=True)
