"""Worker processes: the order of their results, their memory, and how they die."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core import workers
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.fork_server import fork_server
from summit_train.core.pages import Page
from summit_train.core.workers import OPEN_FILES, SECONDS_TO_DIE, ReadLimit, Workers
from tests.core import work
from tests.worlds import PATIENCE_S, ROOT, start, until, workers_of


def started(make: Any, keys: Any, num_workers: int, **options: Any) -> Workers[Any]:
    usual = {"modules": [work.__name__], "limit": ReadLimit(work.Unreadable, PATIENCE_S)}
    return Workers(make, keys, num_workers, **usual | options)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [work.squares, work.squares_slower])
def test_results_have_the_order_of_their_keys(make: Any, num_workers: int) -> None:
    found = list(started(make, iter(range(20)), num_workers))
    assert [key for key, _ in found] == list(range(20))
    for key, values in found:
        np.testing.assert_array_equal(values, np.full(key * 1000, key * key))
        assert values.flags.writeable and values.dtype == np.int32


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_key_may_have_several_results_or_none(num_workers: int) -> None:
    keys = [3, 0, 1, 9, 0]
    found = list(started(work.several, keys, num_workers))
    assert found == [(key, number) for key in keys for number in range(key)]


@pytest.mark.parametrize(("ahead", "begun"), [(2, 7), (5, 19), (16, 63)])
def test_while_a_key_is_made_as_many_later_ones_are_as_may_wait(ahead: int, begun: int, tmp_path: Path) -> None:
    found = list(started(work.WaitAtFirst(tmp_path, begun - 1), range(80), 4, ahead=ahead))
    assert [key for key, _ in found] == list(range(80))
    assert found[0][1] == begun  # all but the one that waits for the same worker


_LOADED = """
import torch
from summit_train.core.workers import ReadLimit, Workers
from tests.core.work import Unreadable, modules
print(*next(Workers(modules, ["key"], 1, modules=[], limit=ReadLimit(Unreadable, 600))))
"""


def test_a_worker_loads_no_torch_and_nothing_of_the_package_that_its_work_does_not_need() -> None:
    found = python(_LOADED).stdout.split()
    ours = {"errors", "files", "fork_server", "machine", "pages", "result", "text", "workers"}
    loaded = {name for name in found if name.startswith("summit_train")}
    assert loaded == {"summit_train", "summit_train.core"} | {f"summit_train.core.{name}" for name in ours}
    assert "torch" not in found and "numpy" in found


def python(script: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environ)


# Memory.


@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_page_takes_values_in_turn_and_grows_with_them(monkeypatch: pytest.MonkeyPatch, has_memfd: bool) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    mine = Page()
    theirs = Page(os.dup(mine.file))
    held = []
    for size in (3, 100_000, 5, 200_000):
        value = {"name": "a", "pixels": np.arange(size, dtype=np.uint8), "back": np.arange(size)[::-1], "none": []}
        held.append((value, theirs.read(mine.write(value))))
    for value, found in held:
        np.testing.assert_equal(found, value)
    assert os.fstat(mine.file).st_nlink == 0


def test_a_view_of_a_page_has_aligned_arrays_that_are_read_only() -> None:
    page = Page()
    value = {"odd": np.arange(3, dtype=np.uint8), "wide": np.arange(5.0), "last": np.arange(7)}
    found = page.view(page.write(value))
    for name, array in value.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.aligned and not found[name].flags.writeable


def test_workers_share_the_arrays_of_their_work() -> None:
    numbers = np.ones(25_000_000)
    for private, total in started(work.OwnMemory(numbers), range(4), 2):
        assert total == len(numbers) and private < numbers.nbytes / 2


def test_arrays_lie_in_memory_that_the_caller_allocates() -> None:
    memory = list[np.ndarray]()

    def allocate(size: int) -> np.ndarray:
        memory.append(np.zeros(size, np.uint8))
        return memory[-1]

    found = list(started(work.squares, range(1, 6), 2, allocate=allocate))
    assert sorted(map(len, memory)) == [4000 * key for key in range(1, 6)]
    assert all(any(np.shares_memory(values, piece) for piece in memory) for _, values in found)


def test_a_result_without_room_in_shared_memory_is_one_line() -> None:
    results = started(work.fill, [0, 2 << 20, 1000, 2000], 2)  # the last is made before the first
    assert len(next(results)) == 0
    why = os.strerror(errno.EFBIG)
    with pytest.raises(RunFailed, match=rf"^cannot allocate 2\.097 MB .*: {why}; try fewer of them "):
        next(results)
    assert list(results) == []


def test_the_open_files_are_those_that_are_counted_and_all_are_closed() -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_files()
    with started(work.squares, range(100), 3) as results:
        assert [next(results)[0] for _ in range(20)] == list(range(20))  # all pages are in use
        assert num_files() == before + 3 * OPEN_FILES + 2
    assert num_files() == before


@pytest.fixture
def few_files() -> Iterator[Callable[[int], int]]:
    """Lets this process open so many files more than it has, and returns how many it has."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(more: int) -> int:
        gc.collect()
        open_files = [int(name) for name in os.listdir("/proc/self/fd")]
        # A limit is on the numbers: the free ones below the highest are to be taken, too.
        free = (number for number in count() if number not in open_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (list(islice(free, more + 1))[-1], usual[1]))
        return len(open_files)

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_workers_may_open_as_many_files_as_they_need(few_files: Callable[[int], int]) -> None:
    assert len(list(started(work.squares, range(3), 1))) == 3  # also starts the fork server
    few_files(OPEN_FILES)
    assert [key for key, _ in started(work.squares, range(20), 3)] == list(range(20))


@pytest.mark.parametrize("more", range(1, 3 + 2 * OPEN_FILES, 2))
def test_a_failed_start_closes_its_files(
    few_files: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    assert len(list(started(work.squares, range(3), 1))) == 3  # also starts the fork server
    monkeypatch.setattr(workers, "raise_open_files", lambda: None)
    before = few_files(more)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        started(work.squares, range(20), 3)
    few_files(100)
    assert len(os.listdir("/proc/self/fd")) == before


# What goes wrong.


LATE = "takes longer than 0.2 s to read: its reader never came back; raise it"
TRAPS = [
    ("kill", "kills the process that reads it (exit status -9: killed, or out of memory?)"),
    ("crash", f"kills the process that reads it (exit status {-signal.SIGSEGV})"),
    ("hang", LATE),
    ("stop", LATE),
    ("memory", "needs more memory than a worker process may have"),
]


@pytest.mark.parametrize(("kind", "reason"), TRAPS)
def test_what_ends_or_holds_its_reader_is_named_and_the_rest_is_whole(kind: str, reason: str, tmp_path: Path) -> None:
    num_workers = 1 if kind in ("kill", "hang") else 2
    seconds = 0.2 if reason == LATE else PATIENCE_S
    keys = [0, 1, 2, 3, 4, 5, 6, 7, 3, 8]  # the second 3 is sent after the first is answered
    found = list(
        started(work.Trap(kind, tmp_path), keys, num_workers, limit=ReadLimit(work.Unreadable, seconds, "; raise it"))
    )
    assert found == [(key, f"3.mp4\n{reason}" if key == 3 else "read") for key in keys]
    times = 2 if kind == "memory" else 1  # what was given up is not tried again
    assert (tmp_path / "falls").read_text() == times * "x"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_results_before_a_death_come_once_and_then_the_error(num_workers: int, tmp_path: Path) -> None:
    found = list(started(work.Trap("kill", tmp_path, several=True), [2, 3, 4], num_workers))
    assert found[:5] == [(2, "0"), (2, "1"), (2, "2"), (3, "0"), (3, "1")]
    assert found[5][1].startswith("3.mp4\nkills the process") and found[6:] == [(4, "0"), (4, "1"), (4, "2")]


def test_a_key_at_which_a_worker_dies_without_reading_is_made_again_but_once(tmp_path: Path) -> None:
    results = started(work.die_once, [tmp_path / name for name in ("never", "once", "always")], 1)
    with pytest.raises(RunFailed, match=r"^two worker processes died at the same work \(exit status 5\)"):
        for wanted in [f"{name} {number}" for name in ("never", "once") for number in range(4)]:
            assert next(results) == wanted
        assert [next(results), next(results)] == ["always 0", "always 1"]
        next(results)
    assert list(results) == []


def test_an_idle_worker_that_is_killed_is_replaced() -> None:
    results = started(work.squares, range(30), 2)
    assert next(results)[0] == 0
    for pid in workers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    assert [key for key, _ in results] == list(range(1, 30))


_STOPPED = """
from summit_train.core.workers import ReadLimit, Workers
from tests.core.work import Unreadable, read_slowly
with Workers(read_slowly, range(3), 1, modules=[], limit=ReadLimit(Unreadable, 2.0)) as results:
    for result in results:
        print(result, flush=True)
"""


def test_a_job_that_was_stopped_goes_on() -> None:
    """The time in which none of its processes ran is not the time that reading took."""
    program = start(0, "-c", _STOPPED)
    assert program.stdout is not None and program.stdout.readline() == "0\n"  # 1 is being read
    time.sleep(0.2)
    os.killpg(program.pid, signal.SIGSTOP)
    time.sleep(6.0)  # a reading that takes 4 s is late
    os.killpg(program.pid, signal.SIGCONT)
    assert program.communicate(timeout=PATIENCE_S)[0] == "1\n2\n" and program.returncode == 0


def test_workers_that_do_not_end_are_waited_for_together(caplog: pytest.LogCaptureFixture) -> None:
    """A stopped fork server kills none, as if all of them waited for a file system."""
    results = started(work.squares, range(100), 3)
    next(results)
    assert until(lambda: len(workers_of(os.getpid())) == 3)
    server = fork_server(os.getpid())._process
    server.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    results.close()
    assert SECONDS_TO_DIE <= time.monotonic() - begun < 2 * SECONDS_TO_DIE
    assert "3 of 3 killed worker processes have not ended" in caplog.text
    server.send_signal(signal.SIGCONT)
    assert until(lambda: not workers_of(os.getpid()))


def test_a_worker_that_is_killed_in_the_middle_of_an_answer_is_replaced() -> None:
    results = started(work.many_arrays, [0], 1)  # a key that it has not read would reset the connection
    assert until(results._workers[0].connection.poll)  # the rest waits for room
    (pid,) = workers_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    assert [len(result) for result in results] == [200_000]


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([0, 2, 1], UserError, "two is wrong"),
        ([0, 3, 1], BlockingIOError, "odd"),
        ([0, 4, 1], RuntimeError, "Local: cannot be pickled"),
        ([0, 5, 1], RuntimeError, "ValueError: long long"),
        ([0, 6, 1], UserError, "long long"),
    ],
)
def test_an_error_is_raised_in_its_turn_and_ends_the_workers(keys: list[int], error: Any, text: str) -> None:
    results = started(work.fail, keys, 2)
    assert next(results) == 0
    with pytest.raises(error, match=text) as caught:
        next(results)
    assert "in fail" in str(caught.value.__cause__) or keys[1] > 4  # of a long error it has the end
    assert len(str(caught.value)) < 17_000 and len(str(caught.value.__cause__)) < 17_000
    assert list(results) == [] and not workers_of(os.getpid())
    with pytest.raises(error if keys[1] < 4 else Exception, match=text.split(": ")[-1]):
        list(started(work.fail, keys, 0))


def test_an_error_of_loading_the_work_is_raised() -> None:
    make = work.Trap("kill", Path())
    object.__setattr__(make, "folder", work.Unloadable())
    with pytest.raises(ImportError, match="cannot be loaded"):
        next(started(make, [0], 1))


# Their end.


@pytest.mark.parametrize("way", ["close", "end", "forget"])
def test_workers_end_with_their_results(way: str) -> None:
    results = started(work.squares, range(10), 2)
    assert next(results)[0] == 0
    assert until(lambda: len(workers_of(os.getpid())) == 2)  # the second may come later
    if way == "end":
        assert len(list(results)) == 9
    elif way == "close":
        results.close()
        assert list(results) == []
        results.close()
    else:
        del results
        gc.collect()
    assert until(lambda: not workers_of(os.getpid()))


_SCRIPT = """
import os, pathlib, time
from summit_train.core.workers import ReadLimit, Workers
from tests.core.work import Trap, Unreadable, squares
from tests.worlds import until, workers_of
results = Workers({make}, range(3, 1000), 2, modules=[], limit=ReadLimit(Unreadable, 600))
{ask}
assert until(lambda: len(workers_of(os.getpid())) == 2)
print(*workers_of(os.getpid()), flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("is_busy", "ending"),
    [(False, "raise SystemExit(7)"), (True, "os.kill(os.getpid(), 9)"), (False, "os._exit(7)"), (True, "os._exit(7)")],
)
def test_workers_end_with_the_process_whatever_ends_it(is_busy: bool, ending: str, tmp_path: Path) -> None:
    make, ask = "squares", "next(results)"
    if is_busy:
        make = f"Trap('hang', pathlib.Path({str(tmp_path)!r}))"
        ask = f"while not os.path.exists({str(tmp_path / 'falls')!r}): time.sleep(0.01)"
    done = python(_SCRIPT.format(make=make, ask=ask, ending=ending))
    assert done.returncode in (7, -9) and done.stderr == ""
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2 and until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


_FORK = """
if os.fork() == 0:
    {ending}
assert os.wait()[1] == 0
pids = workers_of(os.getpid())
assert [key for key, _ in results] == list(range(4, 1000))
print(*pids, flush=True)
"""


@pytest.mark.parametrize("ending", ["raise SystemExit", "results.close(); os._exit(0)"])
def test_a_forked_copy_of_the_process_leaves_it_its_workers(ending: str) -> None:
    done = python(_SCRIPT.format(make="squares", ask="next(results)", ending=_FORK.format(ending=ending)))
    assert done.stderr == ""
    before, after = done.stdout.splitlines()
    assert before == after and len(after.split()) == 2


def test_signals_to_a_job_reach_the_main_process_alone() -> None:
    held = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, _: held.append(number))
    try:
        with started(work.squares_slower, range(40), 2) as results:
            found = [next(results)]
            assert until(lambda: len(workers_of(os.getpid())) == 2)
            os.kill(os.getpid(), signal.SIGUSR1)
            for pid in workers_of(os.getpid()):
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(pid, number)
            workers = workers_of(os.getpid())
            found += [next(results) for _ in range(20)]
            assert workers_of(os.getpid()) == workers
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [key for key, _ in found] == list(range(21)) and held == [signal.SIGUSR1]
