"""What the workers of test_workers.py do. They import this module, so it is small."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.workers import Reading


class Unreadable(UserError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)


def squares(key: int, reading: Reading) -> tuple[int, np.ndarray]:
    return key, np.full(key * 1000, key * key, np.int32)


def squares_slower(key: int, reading: Reading) -> tuple[int, np.ndarray]:
    time.sleep(0.05 * (key % 3 == 0))
    return squares(key, reading)


def several(key: int, reading: Reading) -> Iterator[tuple[int, int]]:
    for number in range(key):
        yield key, number


@dataclass(frozen=True)
class WaitAtFirst:
    """Notes each key in the folder. Key 0 is made when `others` more have begun, or after a minute without them."""

    folder: Path
    others: int

    def __call__(self, key: int, reading: Reading) -> tuple[int, int]:
        (self.folder / str(key)).touch()
        deadline = time.monotonic() + 60
        while key == 0 and self.begun() <= self.others and time.monotonic() < deadline:
            time.sleep(0.01)
        if key == 0:
            time.sleep(0.3)  # time for more than may begin
        return key, self.begun()

    def begun(self) -> int:
        return len(list(self.folder.iterdir()))


def modules(key: str, reading: Reading) -> list[str]:
    return sorted(sys.modules)


def many_arrays(key: int, reading: Reading) -> list[np.ndarray]:
    """Return arrays whose sizes are more than a connection holds."""
    return [*np.zeros((200_000, 300), np.uint8)]


@dataclass(frozen=True)
class OwnMemory:
    """Returns the bytes of its process's memory that are not shared, and the sum of its list."""

    numbers: np.ndarray

    def __call__(self, key: int, reading: Reading) -> tuple[int, int]:
        total = int(self.numbers.sum())
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0]), total


def fill(key: int, reading: Reading) -> np.ndarray:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
    time.sleep(key == 0)
    return np.zeros(key, np.uint8)


def read_slowly(key: int, reading: Reading) -> int:
    """Read for half a second of those in which the process runs."""
    with reading(key, f"{key}.mp4"):
        for _ in range(10 if key else 0):
            time.sleep(0.05)
    return key


@dataclass(frozen=True)
class Trap:
    """Reads its key, but what is 3 for it ends its process, or does not come back, or takes all memory."""

    kind: str
    folder: Path
    several: bool = False

    def __call__(self, key: int, reading: Reading) -> Any:
        return self.blocks(key, reading) if self.several else self.result(key, reading)

    def result(self, key: int, reading: Reading) -> tuple[int, str]:
        try:
            with reading(key, f"{key}.mp4"):
                if key == 3:
                    self.fall()
        except Unreadable as error:
            return key, str(error)
        return key, "read"

    def blocks(self, key: int, reading: Reading) -> Iterator[tuple[int, str]]:
        for number in range(3):
            try:
                with reading(key, f"{key}.mp4"):
                    if key == 3 and number == 2:
                        self.fall()
            except Unreadable as error:
                yield key, str(error)
                return
            yield key, str(number)

    def fall(self) -> None:
        falls = self.folder / "falls"
        if self.kind == "hang once" and falls.exists():
            return
        with falls.open("a") as file:
            file.write("x")
        if self.kind.startswith("hang"):
            time.sleep(1000)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "memory":
            np.ones(1 << 33, np.uint8)
        if self.kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        os.kill(os.getpid(), signal.SIGKILL)


def die_once(key: Path, reading: Reading) -> Iterator[str]:
    for number in range(4):
        yield f"{key.name} {number}"
        if number == 1 and key.name == "once" and not key.exists():
            key.touch()
            os._exit(5)
        if number == 1 and key.name == "always":
            os._exit(5)


def fail(key: int, reading: Reading) -> int:
    if key == 2:
        raise UserError("two is wrong")
    if key == 3:
        raise BlockingIOError(7, "odd")
    if key == 4:
        raise type("Local", (Exception,), {})("cannot be pickled")
    if key == 5:
        raise ValueError("long " * 1_000_000)
    if key == 6:
        raise Unreadable("name", "long " * 1_000_000)
    return key


class Unloadable:
    def __reduce__(self) -> Any:
        return _unloadable, (os.getpid(),)


def _unloadable(pid: int) -> None:
    if pid != os.getpid():
        raise ImportError("cannot be loaded")
