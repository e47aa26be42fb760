"""The process that forks workers: what it imports, and what follows when it is killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Pipe
from pathlib import Path

from summit_train.core.fork_server import ForkServer, fork_server
from summit_train.core.workers import Workers
from tests.core.work import Unreadable, modules, squares_slower
from tests.worlds import PATIENCE_S, children, until, workers_of


def test_a_process_has_one_and_its_fork_another() -> None:
    assert fork_server(os.getpid()) is fork_server(os.getpid())
    assert fork_server(os.getpid()) is not fork_server(0)


def test_modules_are_imported_before_the_fork_if_they_can_be() -> None:
    names = ["no.such", "colorsys"]
    (found,) = Workers(modules, ["key"], 1, modules=names, error=Unreadable, seconds=PATIENCE_S)
    assert "colorsys" in found
    (found,) = Workers(modules, ["key"], 1, modules=[], error=Unreadable, seconds=PATIENCE_S)
    assert "colorsys" in found


def test_the_exit_status_of_a_worker_arrives_and_its_connection_ends() -> None:
    server = ForkServer()
    mine, theirs = Pipe()
    with theirs:
        number = server.fork([], theirs.fileno(), theirs.fileno())  # one file more, as it is no request to kill
    server.kill(number)
    assert mine.recv() == -signal.SIGKILL
    assert mine.poll(PATIENCE_S)
    try:
        mine.recv()
    except (EOFError, ConnectionError):
        return
    raise AssertionError("the connection is open")


def test_results_are_whole_though_the_fork_server_is_killed_and_then_a_worker() -> None:
    with Workers(squares_slower, range(60), 2, modules=[], error=Unreadable, seconds=PATIENCE_S) as results:
        found = [next(results)[0]]
        server = fork_server(os.getpid())._process.pid
        workers = workers_of(os.getpid())
        os.kill(server, signal.SIGKILL)
        found += [next(results)[0] for _ in range(5)]
        os.kill(workers[0], signal.SIGKILL)
        found += [key for key, _ in results]
    assert found == list(range(60))
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_it_ends_with_its_process_and_kills_its_workers() -> None:
    server = ForkServer()
    mine, theirs = Pipe()
    with theirs:
        server.fork([], theirs.fileno(), theirs.fileno())
    pid = server._process.pid
    assert until(lambda: len(children(pid)) == 1)
    (worker,) = children(pid)
    server._requests.close()
    assert server._process.wait(PATIENCE_S) == 0 and until(lambda: not Path(f"/proc/{worker}").exists())
    mine.close()
