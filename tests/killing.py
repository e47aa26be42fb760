"""Helpers of tests with a process that is killed, at any file operation or while it holds a lock, or slowed down."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from summit_train.core.files import locked
from tests.worlds import PATIENCE_S

_OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime"})


def killed_at(number: int, below: Path, work: Callable[[], object], timeout: float = PATIENCE_S) -> bool:
    """Do `work` in a child process that kills itself at its `number`-th operation on a file below a folder, from 1.

    An operation counts when Python is about to do it (its audit events), so what came before it is done. False where
    the work ended before it came to so many. No cleaning up: SIGKILL lets nothing run.
    """
    child = os.fork()
    if child == 0:
        _work_and_die(number, str(below), work)
    deadline = time.monotonic() + timeout
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail(f"the work of operation {number} did not end within {timeout:g} s")
        time.sleep(0.001)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed before it was killed"
    return False


def _work_and_die(number: int, below: str, work: Callable[[], object]) -> None:
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _OPERATIONS and isinstance(arguments[0], str | bytes | Path):
            if not os.fsdecode(arguments[0]).startswith(below):  # type: ignore[arg-type]
                return
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(count)
        work()
        status = 0
    finally:
        os._exit(status)


@contextmanager
def another_holds(lock: Path) -> Iterator[None]:
    """Within the block another process holds the lock on this file. SIGKILL ends it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(lock):
            os.write(writer, b"1")
            signal.pause()
    try:
        assert os.read(reader, 1) == b"1"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def slowed(stopped_s: float = 0.08, runs_s: float = 0.02) -> Iterator[None]:
    """Within the block another process stops this one again and again: it has a fifth of its time."""
    reader, writer = os.pipe()
    this = os.getpid()
    child = os.fork()
    if child == 0:
        while os.getppid() == this:
            os.kill(this, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(this, signal.SIGCONT)
            if select.select([reader], [], [], runs_s)[0]:  # asked to end, and this process runs
                break
        os._exit(0)
    try:
        yield
    finally:
        os.write(writer, b"1")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
