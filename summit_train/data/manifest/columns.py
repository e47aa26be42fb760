"""Columns of a table as plain .npy files, written piece by piece and mapped by all processes of a node.

Mapped pages are in the node's memory once. Long columns with random access (paths) are read by `pread` instead, so that
they never count as a process's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_HEADER_BYTES = 512
_AT_ONCE = 1 << 20


class ColumnWriter:
    """A one-dimensional .npy file; `close` writes its length."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._count = 0
        self._file = open(path, "wb")  # noqa: SIM115  (closed by `close`)
        self._file.write(_header(self._dtype, 0))

    def append(self, values: NDArray[Any] | bytes) -> None:
        """Append values; bytes are uint8."""
        array = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.asarray(values)
        self._file.write(array.astype(self._dtype, copy=False).data)
        self._count += len(array)

    def close(self) -> None:
        """Write the length into the header and flush the file to the disk."""
        if not self._file.closed:
            self._file.seek(0)
            self._file.write(_header(self._dtype, self._count))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the header of a .npy file, version 1.0, of a fixed length (numpy.lib.format)."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': ({count},), }}"
    length = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + f"{text:<{length - 1}}\n".encode()


def map_column(path: Path, *dtypes: DTypeLike) -> NDArray[Any]:
    """Map a column of one of these types as a read-only array.

    Raises ValueError where header or length are not what `ColumnWriter` writes.
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
        return np.frombuffer(self.read(part), self._dtype)

    def read(self, part: slice) -> bytes:
        """Return the bytes of the rows."""
        start, stop, _ = part.indices(self._length)
        size = self._dtype.itemsize
        return os.pread(self._file.fileno(), max(0, stop - start) * size, _HEADER_BYTES + start * size)


class StoredBytes(StoredRows):
    """A column of bytes, whose slices are bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.uint8)

    def __getitem__(self, part: slice) -> bytes:  # type: ignore[override]
        return self.read(part)


def pieces(values: NDArray[Any] | bytes | StoredBytes, dtype: DTypeLike = np.uint8) -> Iterator[bytes]:
    """Yield the bytes of a column as `dtype`, piece by piece, without a copy of the whole."""
    for start in range(0, len(values), _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        yield part if isinstance(part, bytes) else part.astype(dtype).tobytes()


def spread(lengths: NDArray[Any], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Return the offsets of items with these lengths, and the end: (N,) -> (N + 1,)."""
    return np.concatenate([np.zeros(1, dtype), np.cumsum(lengths, dtype=dtype)])


def sync_folder(folder: str | Path) -> None:
    """Write a folder's entries to the disk, so that a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def total_bytes(paths: Iterable[str | Path]) -> int:
    """Return the total size of files in bytes, without those that do not exist."""
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += os.path.getsize(path)
    return total
