"""The columns of a large list, parsed once on a node: its other processes, and later commands, map them.

They are in the folder summit_train_lists_UID of the temporary folder, on the node's own disk: a file that many nodes
map cannot be deleted by one of them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import summit_train
from summit_train.core.files import locked, read_file, write_text
from summit_train.core.text import printable
from summit_train.data.manifest.columns import read_columns, write_columns
from summit_train.data.manifest.tables import DTYPES

_MIN_BYTES = 2 << 20  # of a list: some 50,000 rows, which take less time than the disk
_MAX_BYTES = 2 << 30  # of all copies
_CHECKSUM = "checksum"
_LOG = logging.getLogger(__name__)


def parsed_once(source: Path, meaning: object, parse: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the columns that `parse` returns of a list, mapped if the list is large; note once if they cannot be kept.

    meaning: what they depend on apart from the file.
    """
    if os.stat(source).st_size < _MIN_BYTES:
        return parse()
    columns = dict[str, Any]()
    try:
        folder = _own_folder()
        copy = folder / _name(source, meaning)
        if (mapped := _mapped(copy)) is not None:
            return mapped
        with locked(folder / ".lock"):  # the node's other processes wait for the first
            if (mapped := _mapped(copy)) is not None:
                return mapped
            columns = parse()
            if copy.name == _name(source, meaning):  # else it has changed meanwhile
                _write(copy, columns)
                columns = _mapped(copy) or {}
    except OSError as error:
        text = "summit-train: note: the columns of %s cannot be kept: %s (%s); set TMPDIR"
        _LOG.warning(text, printable(str(source)), printable(str(error.filename)), error.strerror)
    return columns or parse()


def _own_folder() -> Path:
    """Return the folder of all copies, which only this user can read and write. Raises OSError."""
    folder = Path(tempfile.gettempdir(), f"summit_train_lists_{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not a folder of this user alone", str(folder))
    return folder


def _name(source: Path, meaning: object) -> str:
    """Return what tells a list, in its present state, from all others."""
    state = os.stat(source)
    states = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    words = repr((os.path.abspath(source), states, meaning, summit_train.__version__))
    return hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _mapped(copy: Path) -> dict[str, Any] | None:
    """Return the columns of a copy; None if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        columns, _ = read_columns(copy)
        if int(read_file(copy / _CHECKSUM)) == _checksum(columns):
            os.utime(copy)
            return columns
    return None


def _write(copy: Path, columns: dict[str, Any]) -> None:
    """Move columns to a copy, whole or not at all, and delete the others that were used longest ago."""
    unfinished = copy.with_name(".writing")  # only one process writes
    for former in (unfinished, copy):  # of a process that was killed, and damaged
        shutil.rmtree(former, ignore_errors=True)
    try:
        write_columns(unfinished, columns, {})
        columns.clear()  # memory need not hold them twice
        write_text(unfinished / _CHECKSUM, str(_checksum(read_columns(unfinished)[0])))
        unfinished.rename(copy)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk is others' too
        raise
    copies = sorted((path for path in copy.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in copies]
    for place, path in enumerate(copies[:-1]):
        if sum(sizes[place:]) > _MAX_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def _checksum(columns: Mapping[str, Any]) -> int:
    numbers = zlib.crc32(repr(columns["group_names"]).encode("utf-8", "surrogateescape"))
    for name in sorted({*DTYPES, "offsets", "paths"}):
        numbers = zlib.crc32(columns[name].view(np.uint8), numbers)
    return numbers
