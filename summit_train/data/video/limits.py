"""What reading a video may cost, because a damaged or malicious header can ask for anything.

The limits are far above what a training video needs. Only the seconds depend on the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from summit_train.data.video.source import DecodeError
from summit_train.memory import keep_freed_frames

# Beyond it a frame is no picture: scaled to a short side of 256 it would be 16,384 pixels long.
_MAX_SIDE_RATIO = 64
# The memory of a worker process besides what it starts with: several frames of the largest size.
_WORKER_BYTES = 4 << 30


@dataclass(frozen=True)
class Limits:
    """pixels: of a frame (8K has half as many); packets: of a video (46 hours at 25 a second); seconds: to read it."""

    pixels: int = 1 << 26
    packets: int = 1 << 22
    seconds: float = 120.0


LIMITS = Limits()
# For decoding a long video in full.
NO_HURRY = Limits(seconds=3600.0)


class Budget:
    """The limits of one video while it is read. Every method raises DecodeError where one is exceeded."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self.limits = limits
        self._began = time.monotonic()

    def size(self, width: int, height: int) -> None:
        """Check a frame's size as a header gives it."""
        is_long = max(width, height) > _MAX_SIDE_RATIO * max(1, min(width, height))
        if width * height > self.limits.pixels or (is_long and width and height):
            raise DecodeError(self._name, f"a frame of {width} x {height} pixels is not read: its header is damaged?")

    def packet(self, number: int) -> None:
        """Check the number of a packet, and the time."""
        if number >= self.limits.packets:
            raise DecodeError(self._name, f"does not end after {self.limits.packets:,} packets")
        self.time()

    def time(self) -> None:
        """Check the time."""
        if time.monotonic() - self._began > self.limits.seconds:
            raise DecodeError(self._name, f"is not read within {self.limits.seconds:g} s")


def bound_memory() -> None:
    """Limit what this process may allocate from now on, so that a decoder cannot exhaust the node's memory.

    The limit is on the data (RLIMIT_DATA), not on the address space: libraries reserve many addresses that they never
    use.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])
    limit = pages * resource.getpagesize() + _WORKER_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def prepare_reader(worker: int = 0) -> None:
    """Set up a worker process: limit its memory, reuse freed frames, and end it when the main process dies.

    Otherwise it would wait for work for ever: the DataLoader watches the parent, which is the fork server and lives as
    long as a worker does. worker: passed by the DataLoader, unused.
    """
    bound_memory()
    keep_freed_frames()
    main = multiprocessing.parent_process()
    assert main is not None

    def watch() -> None:
        main.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Return processes for work on clips, with limited memory; they end with this process."""
    # Not fork: a child of a process with threads (MPI's, torch's) can hang.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=prepare_reader)
