"""Memory that a worker and its process both map: the values and errors that they exchange."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.text import with_unit

Allocate = Callable[[int], NDArray[np.uint8]]

FEWER = "try fewer of them (data.workers, or --workers)"
MOST_TEXT = 16 << 10  # bytes of an error, or of a traceback: a connection has room for both
_ALIGNMENT = 64


def new_bytes(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


class Page:
    """Memory without a name that two processes share, for one value after the other. It grows with them."""

    def __init__(self, file: int | None = None) -> None:
        """Make a page, or map the file of another process's page."""
        if file is None and hasattr(os, "memfd_create"):
            file = os.memfd_create("summit-train")
        elif file is None:  # a Python built for an old system
            file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        self.file = file
        self._mapped = memoryview(b"")

    def write(self, value: object) -> list[int]:
        """Write a value, its pickle and then its arrays, and return the sizes to read it by. Raises RunFailed."""
        buffers = list[pickle.PickleBuffer]()
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        self._make_room(sizes)
        for part, place in zip(parts, self._places(sizes), strict=True):
            place[:] = part
        return sizes

    def read(self, sizes: list[int], allocate: Allocate = new_bytes) -> Any:
        """Return the value of these sizes, its arrays in memory that `allocate` returns for a number of bytes."""
        pickled, *shared = self._places(sizes)
        buffers = [allocate(place.nbytes) for place in shared]
        for buffer, place in zip(buffers, shared, strict=True):
            buffer[:] = place
        return pickle.loads(pickled, buffers=buffers)

    def view(self, sizes: list[int]) -> Any:
        """Return the value of these sizes, its arrays read-only in the page itself, which must not be written again."""
        pickled, *shared = self._places(sizes)
        return pickle.loads(pickled, buffers=[place.toreadonly() for place in shared])

    def numbers(self, count: int) -> memoryview:
        """Return the page as integers, which start as 0."""
        self._make_room([8 * count])
        (place,) = self._places([8 * count])
        return place.cast("q")

    def close(self) -> None:
        self._mapped = memoryview(b"")
        os.close(self.file)

    def _make_room(self, sizes: list[int]) -> None:
        size = _starts(sizes)[-1]
        if size <= len(self._mapped):
            return
        try:
            os.posix_fallocate(self.file, 0, size)  # without room, writing would be a SIGBUS
        except OSError as error:
            what = f"cannot allocate {with_unit(size, 'B')} of shared memory for worker processes: {error.strerror}"
            raise RunFailed(f"{what}; {FEWER}, or more memory, which /dev/shm may limit") from error

    def _places(self, sizes: list[int]) -> list[memoryview]:
        *starts, end = _starts(sizes)
        if end > len(self._mapped):
            self._mapped = memoryview(mmap.mmap(self.file, end))
        return [self._mapped[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _starts(sizes: list[int]) -> list[int]:
    """Return the start of each part of a page, and the end of the last. Arrays at these offsets are aligned."""
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def sendable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be pickled or is too long."""
    with suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        if len(pickled) <= MOST_TEXT:
            return error
    if isinstance(error, UserError | RunFailed):
        kind = UserError if isinstance(error, UserError) else RunFailed
        return kind(str(error)[:MOST_TEXT])
    return RuntimeError(f"{type(error).__name__}: {error}"[:MOST_TEXT])
