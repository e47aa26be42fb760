"""What ends a run that goes wrong, or is asked to stop: signals, stalls, numbers that are not finite."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from summit_train.errors import RunFailed

_STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class TrainingError(RunFailed):
    """The run failed; the message names rank, host, step and clips."""


class StopRequest:
    """Set by SIGUSR2 or SIGTERM: checkpoint at the next step that all ranks agree on, then leave."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._leaving = False

    def __bool__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.signal = signal.Signals(number).name

    def leave(self) -> None:
        """The request is met and the process ends; the signals are ignored from here on.

        srun --kill-on-bad-exit sends SIGTERM to the ranks that are still there when the first one has left with a
        status that is not 0. One that dies of it would hide the 85 of the others.
        """
        self._leaving = True
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals within the block; the former handlers come back after it, but not after `leave`."""
        former = {number: signal.signal(number, self.receive) for number in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                if not self._leaving:
                    signal.signal(number, handler)


class Watchdog:
    """Ends the run when this rank makes no progress, and says where it stands.

    A rank that waits for the others in a collective is not the one at fault, so it waits half as long again: the rank
    that hangs in its data or its computation speaks first.
    """

    def __init__(self, who: str, seconds: float | None, end: Callable[[], None]) -> None:
        self._who, self._seconds, self._end = who, seconds, end
        self._where, self._waits = "starting", False
        self._since = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def at(self, where: str, *, waits: bool = False) -> None:
        """This rank has just begun `where`; `waits`: it depends on the other ranks there."""
        self._where, self._waits, self._since = where, waits, time.monotonic()

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._done.wait(min(1.0, self._seconds / 4)):
            stood = time.monotonic() - self._since
            if stood > self._seconds * (1.5 if self._waits else 1):
                print(f"{self._who}: no progress for {stood:.0f} s while {self._where}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
                self._end()
                os._exit(1)
