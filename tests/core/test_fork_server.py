"""The process that forks workers: what it imports, and what follows when it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from summit_train.core import workers
from summit_train.core.errors import RunFailed
from summit_train.core.fork_server import ForkServer, fork_server
from summit_train.core.workers import SECONDS_TO_DIE, ReadLimit, Workers
from tests.core.work import Trap, Unreadable, modules, squares, squares_slower
from tests.worlds import PATIENCE_S, children, until, workers_of

LIMIT = ReadLimit(Unreadable, PATIENCE_S)


def test_a_process_has_one_and_its_fork_another() -> None:
    assert fork_server(os.getpid()) is fork_server(os.getpid())
    assert fork_server(os.getpid()) is not fork_server(0)


def test_modules_are_imported_before_the_fork_if_they_can_be() -> None:
    for names in (["no.such", "colorsys"], []):  # the server has it from then on
        (found,) = Workers(modules, ["key"], 1, modules=names, limit=LIMIT)
        assert "colorsys" in found


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_a_failing_module_does_not_end_the_server(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results_with_module(f"raise {error}('odd')", tmp_path, monkeypatch)
    assert [key for key, _ in found] == [0, 1, 2]


NO_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
NO_FORK = """
import os
def fork(): raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
"""


@pytest.mark.parametrize(
    ("module", "reason"), [(NO_FILES, "Too many open files"), (NO_FORK, "Resource temporarily unavailable")]
)
def test_a_failed_fork_is_one_line(module: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=f"^cannot start a worker process: {reason}; try fewer of them"):
        results_with_module(module, tmp_path, monkeypatch)


def test_where_no_fork_server_can_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RunFailed, match=r"^cannot start a worker process: No such file or directory; try fewer"):
        ForkServer()


def results_with_module(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the results of workers whose fork server imports a module of this text."""
    (folder / "odd_module.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    server = ForkServer()
    monkeypatch.setattr(workers, "fork_server", lambda process: server)
    return list(Workers(squares, range(3), 2, modules=["odd_module"], limit=LIMIT))


def test_the_exit_status_of_a_worker_arrives_and_its_connection_ends() -> None:
    server = ForkServer()
    mine, theirs = Pipe()
    with theirs:
        number = server.fork([], theirs.fileno(), theirs.fileno())  # one file more, as it is no request to kill
    server.kill(number)
    assert mine.recv() == -signal.SIGKILL
    assert mine.poll(PATIENCE_S)
    with pytest.raises((EOFError, ConnectionError)):
        mine.recv()


@pytest.mark.parametrize("num_workers", [1, 4])
def test_no_worker_outlives_the_fork_server_and_closing_waits_for_none(num_workers: int, tmp_path: Path) -> None:
    make = Trap("hang", tmp_path)
    results = Workers(make, [3] * num_workers, num_workers, modules=[], limit=LIMIT)
    falls = tmp_path / "falls"
    assert until(lambda: falls.exists() and falls.read_text() == num_workers * "x")
    killed = kill_server()
    assert len(killed) == num_workers
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed))
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < SECONDS_TO_DIE / 2


def test_results_are_whole_though_the_fork_server_is_killed() -> None:
    with Workers(squares_slower, range(60), 2, modules=[], limit=LIMIT) as results:
        found = [next(results)[0]]
        killed = kill_server()
        found += [next(results)[0] for _ in range(5)]
        assert not set(killed) & set(workers_of(os.getpid()))
        found += [key for key, _ in results]
    assert found == list(range(60))


def test_what_a_worker_reads_when_the_fork_server_is_killed_is_read_again(tmp_path: Path) -> None:
    make = Trap("hang once", tmp_path)
    with Workers(make, [3, 4], 1, modules=[], limit=LIMIT) as results:
        assert until(lambda: (tmp_path / "falls").exists())
        kill_server()
        assert list(results) == [(3, "read"), (4, "read")]


def kill_server() -> list[int]:
    """Kill this process's fork server, and return its workers."""
    server = fork_server(os.getpid())._process
    killed = children(server.pid)
    server.kill()
    server.wait()
    return killed
