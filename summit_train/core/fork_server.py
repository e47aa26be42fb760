"""A process that forks workers.

A fork takes milliseconds and shares what was imported before, but a process that has threads, MPI or CUDA must not
fork. So this process starts another one, which has none of them, once for all of its workers.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait

from summit_train.core.errors import RunFailed
from summit_train.core.machine import PR_SET_PDEATHSIG
from summit_train.core.pages import FEWER

_START = """
import sys
sys.path[:] = sys.argv[2:]
from summit_train.core import fork_server, workers
fork_server.serve(int(sys.argv[1]), workers.work)
"""
# A scheduler signals all processes of a job. The main one decides what to do, and still needs its workers.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_MOST_BYTES = 1 << 16  # of a request
_MOST_FILES = 16


class ForkServer:
    """The process, which lives as long as this one. Its workers end with it. It is replaced if it dies."""

    def __init__(self) -> None:
        self._numbers = count()
        self._start()

    def _start(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        utf8 = f"utf8={sys.flags.utf8_mode}"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the process and its workers inherit it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", utf8, "-c", _START, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # the workers share the cores
            )
        except OSError as error:
            raise RunFailed(_cannot_start(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def fork(self, modules: Sequence[str], connection: int, *files: int) -> int:
        """Fork a worker and return its number, by which it can be killed. It receives the files.

        modules: are imported first, if they can be. When the worker ends, its exit status is sent through the
        connection; if it cannot be started, a text that says why.
        """
        number = next(self._numbers)
        request = json.dumps([number, modules]).encode()
        try:
            socket.send_fds(self._requests, [request], [connection, *files])
        except ConnectionError:  # it was killed
            self._start()
            socket.send_fds(self._requests, [request], [connection, *files])
        return number

    def kill(self, number: int) -> None:
        with suppress(ConnectionError):
            self._requests.send(json.dumps([number, []]).encode())


@cache
def fork_server(process: int) -> ForkServer:
    """Return the fork server of this process. process: its number, as a copy of it that was forked has its own."""
    return ForkServer()


def _cannot_start(error: OSError) -> str:
    return f"cannot start a worker process: {error.strerror or error}; {FEWER}"


# In the fork server.


@dataclass(frozen=True)
class _Forked:
    """A worker. alive: ends with it."""

    pid: int
    alive: Connection
    connection: Connection

    def close(self) -> None:
        self.alive.close()
        self.connection.close()


def serve(channel: int, work: Callable[[Sequence[int]], None]) -> None:
    """Fork workers as requested, each of which does `work` with its files, until the requests end.

    The kernel then kills those that are left.
    """
    workers = dict[int, _Forked]()
    with socket.socket(fileno=channel) as requests:
        while True:
            ready = wait([requests, *(worker.alive for worker in workers.values())])
            for number, worker in list(workers.items()):
                if worker.alive in ready:
                    _, status = os.waitpid(worker.pid, 0)
                    with suppress(ConnectionError):
                        worker.connection.send(os.waitstatus_to_exitcode(status))
                    workers.pop(number).close()
            if requests not in ready:
                continue
            request, files, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_FILES)
            if not request:
                break
            number, modules = json.loads(request)
            if files:
                try:
                    workers[number] = _fork(work, modules, files, [requests, *workers.values()])
                except OSError as error:
                    with suppress(ConnectionError), Connection(files[0]) as connection:
                        connection.send(_cannot_start(error))
                    for file in files[1:]:
                        os.close(file)
            elif number in workers:
                os.kill(workers[number].pid, signal.SIGKILL)


def _fork(
    work: Callable[[Sequence[int]], None],
    modules: Sequence[str],
    files: Sequence[int],
    others: Collection[socket.socket | _Forked],
) -> _Forked:
    """Fork a worker. others: what it inherits and must not hold open."""
    for module in modules:
        with suppress(Exception, SystemExit):  # the worker will say so
            import_module(module)
    libc = ctypes.CDLL(None)
    server = os.getpid()
    alive, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for other in others:
                other.close()
            if os.getppid() == server:  # else the server died before prctl took effect
                work(files)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    theirs.close()
    for file in files[1:]:
        os.close(file)
    return _Forked(pid, alive, Connection(files[0]))
