"""Signals, stalls, and ranks that leave together."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from summit_train.core import watch
from summit_train.core.comm import World
from summit_train.core.watch import Ballot, Neighbour, Stopped, StopRequest, Watchdog, leave_if_asked
from tests.worlds import forked, run


def test_a_rank_that_stalls_says_where_ends_all_and_names_its_node(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/spares").write_text("1 1\n")

    def work() -> int:
        os.environ["SUMMIT_TRAIN_FAILURE"] = str(tmp_path / "job/failure.1.0")
        world = World()
        world.host = "node7"
        world.who = "rank 3 on node7"
        with Watchdog(world, 0.2) as watchdog:
            watchdog.at("loading the clips of step 2")
            time.sleep(60)
        return 0

    status, output = forked(0, work)
    assert status == 1
    assert "rank 3 on node7: no progress for" in output and "while loading the clips of step 2" in output
    assert re.search(r'File ".*test_watch.py", line \d+ in work', output)  # where every thread stood
    assert (tmp_path / "job/bad_nodes").read_text().startswith("node7 rank 3 on node7: no progress for")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the module `time`; its `now` is set by hand."""
    hand = SimpleNamespace(now=0.0)
    hand.monotonic = lambda: hand.now
    monkeypatch.setattr(watch, "time", hand)
    return hand


class _Before(Neighbour):
    """A rank before this one that was heard `silent` seconds ago; None: never."""

    who = "rank 6 on node3"
    where = "in step 8"

    def __init__(self, silent: float | None) -> None:
        self._silent = silent
        self._refused = 0.0

    def silent_seconds(self) -> float | None:
        return self._silent


def test_a_rank_that_makes_progress_is_left_alone(clock: SimpleNamespace) -> None:
    before = set(threading.enumerate())
    with Watchdog(World(), None) as watchdog:
        assert set(threading.enumerate()) <= before  # without a stall time nothing is watched
    for step in range(8):
        watchdog.at(f"in step {step}")
        clock.now += 100.0
        assert watchdog._fault(100.0, None) is None
    clock.now += 1.0
    assert watchdog._fault(100.0, None) == "no progress for 101 s while in step 7"


@pytest.mark.parametrize(
    ("rank", "waits", "silent", "speaks", "says"),
    [
        # A silent rank is named before any other one.
        (0, True, 60.0, 100, "has been silent for 60 s: stopped, or cut off? Last report: in step 8"),
        (0, False, 2.0, 125, "is alive"),
        (7, False, 2.0, 136, "is alive"),
        (0, True, 2.0, 150, "is alive"),
        (7, True, None, 161, "was never heard (is UDP blocked between the hosts?)"),
    ],
)
def test_a_rank_that_is_busy_speaks_before_all_that_wait(
    clock: SimpleNamespace, rank: int, waits: bool, silent: float | None, speaks: int, says: str
) -> None:
    world = World()
    world.rank = rank
    world.size = 8
    watchdog = Watchdog(world, None)
    watchdog.at("in step 8", waits=waits)
    clock.now = speaks - 1.0
    assert watchdog._fault(100.0, _Before(silent)) is None
    clock.now = speaks + 1.0
    text = f"no progress for {speaks + 1} s while in step 8; rank 6 on node3 {says}"
    assert watchdog._fault(100.0, _Before(silent)) == text


class _Rank(World):
    """A rank of a world that lives in threads of this process. Its hosts are two names of this machine."""

    hosts = ("localhost", "127.0.0.1", "no-such-host.invalid")

    def __init__(self, rank: int, size: int, local_size: int, table: list[Any], met: threading.Barrier) -> None:
        self.rank, self.size, self.local_size, self.host = rank, size, local_size, self.hosts[rank]
        self.who = f"rank {rank} on {self.host}"
        self._table, self._met = table, met

    def gather(self, value: Any) -> Any:
        self._table[self.rank] = value
        self._met.wait()
        return self._table if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        self._met.wait()
        return self._table


def _neighbours(size: int, local_size: int = 1) -> list[Neighbour]:
    table, met = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: Neighbour(_Rank(rank, size, local_size, table, met)), range(size)))


def _heard(neighbour: Neighbour) -> float | None:
    for _ in range(200):
        neighbour.exchange("in step 7")
        if neighbour.silent_seconds() is not None:
            break
        time.sleep(0.02)
    return neighbour.silent_seconds()


def test_each_rank_hears_the_one_before_it_on_another_host_and_no_stranger() -> None:
    first, second = _neighbours(2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for words in (b"12345678in step 9", b""):
            stranger.sendto(words, ("127.0.0.1", second._socket.getsockname()[1]))
    first.exchange("loading the clips of step 3")
    assert _heard(second) is not None
    assert (second.who, second.where) == ("rank 0 on localhost", "loading the clips of step 3")
    assert _heard(first) is not None
    assert (first.who, first.where) == ("rank 1 on 127.0.0.1", "in step 7")


def test_a_rank_whose_next_one_cannot_be_reached_continues() -> None:
    """Rank 1's next host has no address, so rank 2 hears nothing, and the ring is whole elsewhere."""
    zero, one, two = _neighbours(3)
    for neighbour in (zero, one, two):
        neighbour.exchange("in step 1")
    assert _heard(one) is not None and one.who == "rank 0 on localhost"
    assert _heard(zero) is not None and zero.who == "rank 2 on no-such-host.invalid"
    two.exchange("in step 2")
    assert two.silent_seconds() is None


def test_ranks_of_one_node_hear_each_other_whatever_its_names() -> None:
    neighbours = _neighbours(3, local_size=3)
    for neighbour in neighbours:
        neighbour.exchange("in step 1")
    assert all(_heard(neighbour) is not None for neighbour in neighbours)


@pytest.mark.parametrize(("heard_before", "ends"), [(4, True), (0, False)])
def test_a_next_rank_that_has_ended_ends_this_one_later(clock: SimpleNamespace, heard_before: int, ends: bool) -> None:
    """Not one whose host refuses datagrams from the beginning, as a firewall does."""
    first, second = _neighbours(2, local_size=2)
    for _ in range(heard_before):
        first.exchange("in step 1")
    second._socket.close()
    clock.now = 100.0
    watchdog = Watchdog(World(), None)
    watchdog.at("in step 2", waits=True)
    for _ in range(8):
        first.exchange("in step 2")
    assert watchdog._fault(900.0, first) is None  # it may still say why
    clock.now = 110.5
    text = "no progress for 10 s while in step 2; rank 1 on 127.0.0.1 has ended"
    assert watchdog._fault(900.0, first) == (text if ends else None)
    watchdog.at("in step 3")
    assert watchdog._fault(900.0, first) is None


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_is_a_request_within_the_block_only(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopRequest().listening() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number.name
    assert signal.getsignal(number) is former


def test_a_process_that_leaves_on_request_is_not_ended_by_another_signal() -> None:
    """Not even when Python has taken down its own handlers, at the very end."""
    program = """
import atexit, os, signal, sys
from summit_train.core.watch import StopRequest
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
with StopRequest().listening() as stop:
    stop.leave()
os.kill(os.getpid(), signal.SIGUSR2)
sys.exit(85)
"""
    assert run(0, "-c", program) == (85, "")


class _Votes(World):
    """A rank of two; a round of their votes is over when both have voted."""

    size = 2

    def __init__(self, rounds: Mapping[int, list[list[int]]]) -> None:
        super().__init__()
        self._rounds = rounds
        self._next = count()

    def start_sum(self, numbers: Any) -> Any:
        votes = self._rounds[next(self._next)]
        votes.append([int(number) for number in numbers])
        return lambda: [sum(column) for column in zip(*votes, strict=True)] if len(votes) == self.size else None


def _ballots() -> tuple[Ballot, Ballot, StopRequest]:
    """The ballots of two ranks, and the first one's requests."""
    rounds = defaultdict[int, list[list[int]]](list)
    asked = StopRequest()
    return Ballot(_Votes(rounds), asked), Ballot(_Votes(rounds), StopRequest()), asked


def test_ranks_leave_together_when_the_last_one_is_done() -> None:
    first, second, _ = _ballots()
    assert not first.is_over(busy=False)
    assert not first.is_over(busy=False)  # it waits for the first vote of the other one
    assert not second.is_over(busy=True)
    assert not first.is_over(busy=False) and not first.is_over(busy=False)  # the second round
    assert second.is_over(busy=False) and first.is_over(busy=False)
    assert not first.is_stopped and not second.is_stopped


def test_a_rank_that_waits_is_told_of_each_round_of_the_busy_one() -> None:
    first, second, _ = _ballots()
    assert not second.is_over(busy=True)
    number = 0
    for number, _ in enumerate(first.rounds(), 1):
        assert not second.is_over(busy=True)  # the end of this round
        assert not second.is_over(busy=number < 3)
    assert number == 3 and second.is_over(busy=False)


def test_a_request_to_one_rank_stops_all_after_the_same_round() -> None:
    first, second, asked = _ballots()
    assert not first.is_over(busy=True)
    asked.receive(signal.SIGUSR2, None)  # after its vote
    assert not second.is_over(busy=True)
    assert not first.is_over(busy=True) and not first.is_over(busy=True)  # the second round
    assert second.is_over(busy=True) and first.is_over(busy=True)
    assert first.is_stopped and second.is_stopped


def test_alone_a_request_is_heard_at_once() -> None:
    stop = StopRequest()
    leave_if_asked(World(), stop)
    stop.receive(signal.SIGUSR2, None)
    with pytest.raises(Stopped):
        leave_if_asked(World(), stop)


def test_a_request_interrupts_within_its_block_only() -> None:
    with StopRequest().listening() as stop:
        with pytest.raises(Stopped), stop.interrupting():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), stop.interrupting():
            pytest.fail("the request came before the block")
