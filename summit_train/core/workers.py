"""Worker processes that make results by key: watched, replaced where one dies or hangs, and always ended.

A worker is forked by the fork server, which has imported what `make` needs: no torch, unless that needs it. Keys reach
it through its connection. It writes each result into one of its pages, memory that both processes map, and sends the
sizes to read it by; this process copies the result and returns the page. Pages have no name, so that a killed run
leaves nothing behind. They are used in turn, as page faults of new memory cost more than copying a clip.

A worker notes in shared memory what it reads. If it dies meanwhile, or is killed because it takes far too long, a new
one makes the same key, and there reading it raises an error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, TypeVar

from summit_train.core.errors import RunFailed
from summit_train.core.fork_server import fork_server
from summit_train.core.machine import bound_memory, keep_freed_frames, raise_open_files
from summit_train.core.pages import FEWER, MOST_TEXT, Allocate, Page, new_bytes, sendable

Result = TypeVar("Result")
Key = Any
# Enters a block that reads something: its number, and its name in the error if reading it ends the worker.
Reading = Callable[[int, str], AbstractContextManager[None]]
# Returns the result of a key, or an iterator over several. Workers unpickle it; its arrays are read-only there.
Make = Callable[[Key, Reading], Result | Iterator[Result]]

READ_AHEAD = 2  # keys for each worker that are made before they are asked for
_KEYS_SENT = 2  # to each worker: the one that it makes, and the next
_PAGES = 2  # of each worker: results that were not taken
OPEN_FILES = 1 + 2 * (1 + _PAGES)  # of this process for each worker: a page has one more that maps it
_PATIENCE = 2.0  # times the seconds: what reads checks the time itself, and is killed only where it cannot
SECONDS_TO_DIE = 5.0  # of all workers together; a process that waits for a file system cannot be killed
# At most this long is a wait, and as much of it counts: a process that was stopped has waited for longer.
_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class _Raised:
    """An error that `make` raised in a worker, and the traceback there."""

    error: Exception
    traceback: str


# The sizes of a result in the next page, or what was raised, or neither after the last of several; is it the last?
_Answer = tuple[list[int] | _Raised | None, bool]


@dataclass(eq=False)
class _Task(Generic[Result]):
    """A key, and its results that have come and were not taken.

    num_results: that have come, and are not sent by another worker that makes it again. has_failed: a worker died at it
    while it read nothing.
    """

    key: Key
    results: deque[Result | _Raised] = field(default_factory=deque)
    num_results: int = 0
    is_done: bool = False
    has_failed: bool = False


class _Worker:
    """A process and its tasks that are not done, the current one first.

    ending: its exit status, or why it could not be started; None before its end, and if the fork server has died, and
    all its workers with it. reading: the number of what it reads + 1, or 0, and which of its readings that is. pages:
    the one of the next result first.
    """

    def __init__(self, work: Page, sizes: list[int], modules: Sequence[str]) -> None:
        self.tasks = deque[_Task[Any]]()
        self.ending: int | str | None = None
        self._waited = (0, 0.0)  # a reading, and the seconds for which this process has waited for it
        with ExitStack() as opened:  # closes the files so far where the next cannot be opened
            self.pages = deque(opened.enter_context(closing(Page())) for _ in range(_PAGES))
            self._notes = opened.enter_context(closing(Page()))
            self.reading = self._notes.numbers(2)
            connection, theirs = Pipe()
            self.connection = opened.enter_context(connection)
            with theirs:
                self._server = fork_server(os.getpid())
                files = [work.file, self._notes.file, *(page.file for page in self.pages)]
                self._number = self._server.fork(modules, theirs.fileno(), *files)
            opened.pop_all()
        with suppress(ConnectionError):
            self.connection.send((sizes, os.getcwd(), sys.path))

    def send(self, task: _Task[Any], given_up: dict[int, str]) -> None:
        self.tasks.append(task)
        with suppress(OSError):  # it has died: its connection will say so
            self.connection.send((task.key, given_up, task.num_results))

    def is_late(self, seconds: float, waited: float) -> bool:
        """Add the seconds that were waited, and return whether it takes longer than `seconds` to read something."""
        number, reading = self.reading
        before, total = self._waited
        self._waited = reading, waited + (total if reading == before else 0.0)
        return number > 0 and self._waited[1] > seconds

    def kill(self) -> None:
        self._server.kill(self._number)

    def receive(self) -> _Answer | None:
        """Return the next answer, or None if the process has died."""
        try:
            answer: _Answer | int | str = self.connection.recv()
        except (EOFError, OSError):  # it died in the middle of an answer, or the fork server has died, too
            return None
        if isinstance(answer, tuple):
            return answer
        self.ending = answer
        return None

    def has_ended(self, deadline: float) -> bool:
        """Wait until the deadline for the end of a process that was killed."""
        while self.ending is None and self.connection.poll(max(0.0, deadline - time.monotonic())):
            if self.receive() is None:
                return True
        return self.ending is not None

    def close(self) -> None:
        self.connection.close()
        for page in (self._notes, *self.pages):
            page.close()


@dataclass(frozen=True)
class ReadLimit:
    """The seconds that reading may take, and the error of what cannot be read, made of its name and a reason.

    A worker is killed after twice that time. advice: ends the reason then.
    """

    error: Callable[[str, str], Exception]
    seconds: float
    advice: str = ""


class Workers(Iterator[Result]):
    """An iterator over the results that `make` makes of the keys, in the order of the keys.

    It owns its worker processes until its end, an error or `close()`. num_workers: 0 makes each result in this process,
    when it is asked for; nothing is then killed, and neither time nor memory is bounded. modules: those of `make`,
    which are imported once for all workers. ahead: keys for each worker that may be made before they are asked for.
    allocate: see Page.read.

    Raises in its turn what `make` raised, and RunFailed where two workers die at the same key while they read nothing.
    """

    def __init__(
        self,
        make: Make[Result],
        keys: Iterable[Key],
        num_workers: int,
        *,
        modules: Sequence[str],
        limit: ReadLimit,
        ahead: int = READ_AHEAD,
        allocate: Allocate = new_bytes,
    ) -> None:
        if num_workers:
            raise_open_files()  # a large node's workers need more than is usual
        self._keys = iter(keys)
        self._limit = limit
        self._most_tasks = ahead * num_workers
        self._allocate = allocate
        self._tasks = deque[_Task[Result]]()
        self._given_up = dict[int, str]()  # the numbers of what cannot be read, and why
        self._made_here = chain.from_iterable(_several(make(key, _reading_here)) for key in self._keys)
        self._workers = list[_Worker]()
        self._work = Page()
        self._modules = modules
        self._end = weakref.finalize(self, _end_all, os.getpid(), self._workers, self._work)
        self._sizes = self._work.write((make, limit.error)) if num_workers else []
        for _ in range(num_workers):
            self._workers.append(_Worker(self._work, self._sizes, self._modules))
        self._send_keys()

    def __enter__(self) -> Workers[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and drop the results that were made ahead. May be called again."""
        self._keys = iter(())
        self._made_here = chain()
        self._tasks.clear()
        self._end()

    def __next__(self) -> Result:
        try:
            result = self._next_result()
            if isinstance(result, _Raised):
                raise result.error from RuntimeError(f"in a worker process:\n{result.traceback}")
            return result
        except BaseException:
            self.close()
            raise

    def _next_result(self) -> Result | _Raised:
        while self._tasks:
            task = self._tasks[0]
            while not task.results and not task.is_done:
                self._receive()
            results = [task.results.popleft()] if task.results else []
            if task.is_done and not task.results:
                self._tasks.popleft()
                self._send_keys()
            if results:
                return results[0]
        return next(self._made_here)

    def _send_keys(self) -> None:
        """Send keys, each to the worker that has the fewest, as far as results may wait here."""
        while len(self._tasks) < self._most_tasks:
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) == _KEYS_SENT:
                return
            try:
                task = _Task[Result](next(self._keys))
            except StopIteration:
                return
            self._tasks.append(task)
            worker.send(task, self._given_up)

    def _receive(self) -> None:
        """Wait for answers, and replace the workers that have died or are late."""
        # The results of a later key stay in its worker's pages, which have room for few.
        current = self._tasks[0]
        busy = [worker for worker in self._workers if worker.tasks]
        heard = {
            worker.connection: worker
            for worker in busy
            if worker.tasks[0] is current or len(worker.tasks[0].results) < _PAGES
        }
        start = time.monotonic()
        ready = wait([*heard], _WAIT_SECONDS)
        waited = min(time.monotonic() - start, _WAIT_SECONDS)
        seconds = self._limit.seconds
        late = [worker for worker in busy if worker.is_late(_PATIENCE * seconds, waited)]
        for connection in ready:
            worker = heard[connection]  # type: ignore[index]
            if (answer := worker.receive()) is not None:
                self._take(worker, answer)
            else:
                self._replace(worker)
        for worker in late if not ready else ():
            reason = f"takes longer than {seconds:g} s to read: its reader never came back{self._limit.advice}"
            self._replace(worker, reason)

    def _take(self, worker: _Worker, answer: _Answer) -> None:
        """Add an answer to the worker's current task."""
        task = worker.tasks[0]
        result, task.is_done = answer
        if task.is_done:
            worker.tasks.popleft()
        if isinstance(result, _Raised):
            task.results.append(result)
        elif result is not None:
            task.results.append(worker.pages[0].read(result, self._allocate))
            task.num_results += 1
        if isinstance(result, list):
            worker.pages.rotate(-1)
            with suppress(ConnectionError):
                worker.connection.send(None)  # that page may be used again
        if task.is_done:
            self._send_keys()

    def _replace(self, worker: _Worker, reason: str | None = None) -> None:
        """Start a worker for the tasks of one that has died. reason: why it is killed."""
        self._workers.remove(worker)
        _end_workers([worker])
        if isinstance(worker.ending, str):
            raise RunFailed(worker.ending)
        ending = f"exit status {'unknown' if worker.ending is None else worker.ending}"
        if worker.ending == -signal.SIGKILL:
            ending += ": killed, or out of memory?"
        number, _ = worker.reading
        if number and (reason or worker.ending is not None):
            self._given_up[number - 1] = reason or f"kills the process that reads it ({ending})"
            worker.tasks[0].num_results = 0
        elif worker.tasks:
            task = worker.tasks[0]
            if task.has_failed:
                raise RunFailed(f"two worker processes died at the same work ({ending}); {FEWER}")
            task.has_failed = True
        new = _Worker(self._work, self._sizes, self._modules)
        self._workers.append(new)
        for task in worker.tasks:
            new.send(task, self._given_up)


def _end_all(process: int, workers: list[_Worker], work: Page) -> None:
    """End the workers of a process, unless this one is a copy of it that was forked."""
    if os.getpid() != process:
        return
    _end_workers(workers)
    workers.clear()
    work.close()


def _end_workers(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + SECONDS_TO_DIE
    num_left = sum(not worker.has_ended(deadline) for worker in workers)
    if num_left:
        text = "summit-train: note: %d of %d killed worker processes have not ended; does a file system hang?"
        logging.getLogger(__name__).warning(text, num_left, len(workers))
    for worker in workers:
        worker.close()


def _several(made: Result | Iterator[Result]) -> Iterator[Result]:
    return made if isinstance(made, Iterator) else iter([made])


@contextmanager
def _reading_here(number: int, name: str) -> Iterator[None]:
    yield


# In a worker.


class _Process:
    """Receives keys and answers with their results. files: of the work, the notes and the pages."""

    def __init__(self, connection: Connection, sizes: list[int], files: Sequence[int]) -> None:
        self._connection = connection
        self._sizes = sizes
        self._work, notes, *pages = map(Page, files)
        self._pages = deque(pages)
        self._notes = notes.numbers(2)
        self._free_pages = len(self._pages)
        self._keys = deque[tuple[Key, dict[int, str], int]]()
        self._given_up = dict[int, str]()

    @cached_property
    def _loaded(self) -> tuple[Make[Any], Callable[[str, str], Exception]]:
        make, error = self._work.view(self._sizes)
        bound_memory()
        return make, error

    def serve(self) -> None:
        while True:
            while not self._keys:
                self._receive()
            key, self._given_up, to_skip = self._keys.popleft()
            for answer in self._answers(key, to_skip):
                self._connection.send(answer)

    def _answers(self, key: Key, to_skip: int) -> Iterator[_Answer]:
        try:
            make, _ = self._loaded
            made = make(key, self._reading)
            for result in islice(_several(made), to_skip, None):
                while not self._free_pages:
                    self._receive()
                sizes = self._pages[0].write(result)
                self._pages.rotate(-1)  # as the other process does with a result, and not with an error
                self._free_pages -= 1
                yield sizes, made is result
            if isinstance(made, Iterator):
                yield None, True
        except Exception as error:
            yield _Raised(sendable(error), traceback.format_exc()[-MOST_TEXT:]), True

    def _receive(self) -> None:
        message = self._connection.recv()
        if message is None:
            self._free_pages += 1
        else:
            self._keys.append(message)

    @contextmanager
    def _reading(self, number: int, name: str) -> Iterator[None]:
        """Note what is read in the block. Raises an error if it was given up, or needs too much memory."""
        _, error = self._loaded
        if number in self._given_up:
            raise error(name, self._given_up[number])
        self._notes[1] += 1
        self._notes[0] = number + 1
        try:
            yield
        except MemoryError as problem:
            raise error(name, "needs more memory than a worker process may have") from problem
        finally:
            self._notes[0] = 0


def work(files: Sequence[int]) -> None:
    """Make results for the process that asked for this one. files: its connection, and those of `_Process`."""
    connection = Connection(files[0])
    with suppress(EOFError, ConnectionError):  # the other process has ended
        sizes, folder, path = connection.recv()
        os.chdir(folder)
        sys.path.extend(name for name in path if name not in sys.path)  # since the fork server was started
        keep_freed_frames()
        _Process(connection, sizes, files[1:]).serve()
