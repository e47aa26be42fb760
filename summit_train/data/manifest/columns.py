"""Tables on the disk: folders of columns as plain .npy files, built by one process, then opened by all.

Mapped pages are in the node's memory once. Long columns with random access (paths) are read by `pread` instead, so that
they never count as a process's memory.

The folder of a file's columns has the file's key in its name, and appears under that name only when it is complete. It
lies beside the file; where that cannot be written, in the user's cache folder ($XDG_CACHE_HOME or ~/.cache), or else in
the node's temporary folder.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.core.files import locked

Build = Callable[[Path], None]

_HEADER_BYTES = 512
_OLD_SECONDS = 30 * 86400.0
_SAMPLES = 16
_SAMPLE_BYTES = 4096
# A file system that cannot be written, or that has no locks.
_NO_PLACE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ENOLCK, errno.ENOSYS}
)


def write_table(folder: Path, dtypes: Mapping[str, DTypeLike], parts: Iterable[Mapping[str, NDArray[Any]]]) -> None:
    """Write the columns of a table, each to NAME.npy, with one part at a time in memory. A part may lack columns."""
    types = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in dtypes.items()}
    counts = dict.fromkeys(types, 0)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.npy", "wb")) for name in types}
        for name, file in files.items():
            file.write(_header(types[name], 0))
        for part in parts:
            for name in types.keys() & part.keys():
                files[name].write(part[name].astype(types[name], copy=False).data)
                counts[name] += len(part[name])
        for name, file in files.items():
            file.seek(0)
            file.write(_header(types[name], counts[name]))
            file.flush()
            os.fsync(file.fileno())


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the header of a .npy file, version 1.0, of a fixed length (numpy.lib.format)."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': ({count},), }}"
    length = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + f"{text:<{length - 1}}\n".encode()


def map_column(path: Path, *dtypes: DTypeLike) -> NDArray[Any]:
    """Map a column of one of these types as a read-only array.

    Raises ValueError where header or length are not what `write_table` writes.
    """
    try:
        with open(path, "rb") as file:
            header, size = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a column: {error.strerror}") from error
    for dtype in [np.dtype(dtype) for dtype in dtypes]:
        count, left = divmod(size - _HEADER_BYTES, dtype.itemsize)
        if not left and header == _header(dtype, count):
            # An empty column cannot be mapped.
            return np.memmap(path, dtype, "r", _HEADER_BYTES).view(np.ndarray) if count else np.zeros(0, dtype)
    raise ValueError(f"{path}: is no column of {np.dtype(dtypes[0])}, or it is damaged or cut short")


class StoredRows:
    """A column that is read by `pread`, without keeping rows in memory. Raises ValueError as map_column does."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._length = len(map_column(path, dtype))
        self._dtype = np.dtype(dtype)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed with this object)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(self._length)
        size = self._dtype.itemsize
        content = os.pread(self._file.fileno(), max(0, stop - start) * size, _HEADER_BYTES + start * size)
        return np.frombuffer(content, self._dtype)


def sync_folder(folder: str | Path) -> None:
    """Write a folder's entries to the disk, so that a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_key(path: str | Path, *more: str) -> str:
    """Return 32 hexadecimal digits of the file (size, modification time, samples of the bytes) and of `more`."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest.update(f"{status.st_size} {status.st_mtime_ns} {len(more)}".encode())
        for sample in range(_SAMPLES):
            file.seek(max(0, status.st_size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    for text in more:
        digest.update(hashlib.blake2b(text.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()


def cached_folder(source: Path, key: str, build: Build) -> Path | None:
    """Return the folder that `build` fills for this file and key; None where no place can be written.

    Of many processes that ask at once, one builds and the others wait. `build` gets an empty folder; its errors are
    passed on.
    """
    places = [place.with_name(f"{place.name}.{key}") for place in _places(source)]
    for final in places:
        if final.is_dir():
            return final
    for final in places:
        try:
            _build_once(final, build)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
        else:
            return final
    return None


def _places(source: Path) -> list[Path]:
    """Return the paths that a key is added to, the preferred one first."""
    name = f".{hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()}.{source.name[:100]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = Path(tempfile.gettempdir()) / f"summit_train-{os.getuid()}"
    found = [source.with_name(f".{source.name[:150]}")]
    found += [cache / "summit_train" / name] if cache.is_absolute() else []
    found += [temporary / name] if _is_private(temporary) else []
    return found


def _is_private(folder: Path) -> bool:
    """Make a folder that only this user can write to; False where another user made one of that name in /tmp."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _build_once(final: Path, build: Build) -> None:
    """Build under a lock, which ends with the process that holds it."""
    building = final.with_name(f"{final.name}.building")
    # Locks may not reach other nodes, so each process builds in a folder of its own, and the first rename wins.
    lock, own = building / "lock", building / os.urandom(8).hex()
    while not final.is_dir():
        try:
            with locked(lock):
                own.mkdir()
                try:
                    if not final.is_dir():
                        build(own)
                        sync_folder(own)
                        own.rename(final)
                        sync_folder(final.parent)
                        _remove_old(final)
                finally:
                    # After a failure another process may still build beside this one.
                    shutil.rmtree(building if final.is_dir() else own, ignore_errors=True)
                    with suppress(OSError):
                        lock.unlink()
                        building.rmdir()
        except OSError as error:
            # Another process was first, or has failed and removed the folder.
            if not (final.is_dir() or error.errno in (errno.ENOENT, errno.ESTALE)):
                raise


def _remove_old(final: Path) -> None:
    """Remove folders of older versions of the file. A running job may still open one, so they stay for a while."""
    for old in glob.glob(f"{glob.escape(str(final.with_suffix('')))}.{'[0-9a-f]' * 32}"):
        if time.time() - os.stat(old).st_mtime > _OLD_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
