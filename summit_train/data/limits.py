"""What one video may take before it counts as bad: a damaged or malicious header can ask for anything.

Far above what a video that is trained on needs; nothing here depends on the machine but the seconds.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from summit_train.data.video import DecodeError

# Beyond it a frame is no picture: scaled to a short side of 256 it would be 16,384 pixels long.
_MAX_SIDE_RATIO = 64
# What a worker process may have beside what it began with: frames of the largest size, several times.
_WORKER_BYTES = 4 << 30


@dataclass(frozen=True)
class Limits:
    """pixels: of a frame (8K has half as many); packets: of a video (46 hours at 25 a second); seconds: to read it."""

    pixels: int = 1 << 26
    packets: int = 1 << 22
    seconds: float = 120.0


LIMITS = Limits()
# To decode a long video in full.
NO_HURRY = Limits(seconds=3600.0)


class Budget:
    """The limits of one video while it is read. Every function raises DecodeError where one is passed."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self.limits = limits
        self._began = time.monotonic()

    def size(self, width: int, height: int) -> None:
        """A frame's size as a header gives it."""
        is_long = max(width, height) > _MAX_SIDE_RATIO * max(1, min(width, height))
        if width * height > self.limits.pixels or (is_long and width and height):
            raise DecodeError(self._name, f"a frame of {width} x {height} pixels is not read: its header is damaged?")

    def packet(self, number: int) -> None:
        """The packet of this number has come."""
        if number >= self.limits.packets:
            raise DecodeError(self._name, f"does not end after {self.limits.packets:,} packets")
        self.time()

    def time(self) -> None:
        """Look at the clock."""
        if time.monotonic() - self._began > self.limits.seconds:
            raise DecodeError(self._name, f"is not read within {self.limits.seconds:g} s")


def bound_memory() -> None:
    """Bound what this process may allocate from now on: an allocation beyond it fails, and the machine lives on.

    For workers that decode. Not the address space is bounded but the data (RLIMIT_DATA): libraries reserve addresses
    in plenty that they never use.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])
    limit = pages * resource.getpagesize() + _WORKER_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
