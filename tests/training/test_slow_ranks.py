"""Slow ranks: the detector on given seconds, the windows of a run, and real ranks, one of them slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.run_folder import EXCLUDE_SLOW
from summit_train.data.batches.loader import Batches
from summit_train.models import VideoNetwork
from summit_train.training import slow_ranks
from summit_train.training.metrics import RunLog
from summit_train.training.slow_ranks import RankTimes, SlowRank, SlowRankDetector, SlowRanks, rank_times
from summit_train.training.timer import Mark, StepTimer
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state, records
from tests.worlds import forked, main_without_reports, train

RANKS, SLOW = 4, 1
CPU = torch.device("cpu")


@dataclass
class At:
    """A mark at a time of the device."""

    seconds: float

    def seconds_to(self, later: At) -> float:
        return later.seconds - self.seconds


def _timer(number: int, *phases: tuple[str, float]) -> StepTimer:
    """The timer of a step; phases: their names and seconds."""
    timer = StepTimer(CPU, number)
    now = 5.0
    timer.laps = [("", cast(Mark, At(now)))]
    for phase, seconds in phases:
        now += seconds
        timer.laps.append((phase, cast(Mark, At(now))))
    return timer


def test_a_ranks_seconds_are_those_in_which_it_waits_for_no_other() -> None:
    """Two micro-batches, then what follows: the wait for the others and the checkpoint do not count."""
    each = [("data_wait", 0.5), ("other", 0.25), ("forward", 1.0), ("other", 0.25), ("backward", 2.0)]
    end = [("allreduce", 64.0), ("other", 0.5), ("allreduce", 32.0), ("update", 0.125), ("other", 0.5)]
    timer = _timer(1, *each, *each, *end, ("checkpoint", 16.0))
    assert rank_times(timer, 2) == RankTimes(compute=3.5 + 0.5 + 0.125, data_wait=0.5)


def test_of_learners_each_has_an_update() -> None:
    learner = [("data_wait", 0.5), ("forward", 1.0), ("backward", 2.0), ("update", 0.25)]
    assert rank_times(_timer(1, *learner), 1) == rank_times(_timer(1, *learner, *learner), 2) == RankTimes(3.25, 0.5)


def _reports(*windows: Sequence[RankTimes]) -> list[list[SlowRank]]:
    detector = SlowRankDetector()
    return [detector.add(window) for window in windows]


def _ranks(*seconds: float, waits: Sequence[float] = (0.0,) * 8) -> list[RankTimes]:
    return [RankTimes(compute, wait) for compute, wait in zip(seconds, waits, strict=False)]


EVEN, UNEVEN = _ranks(1.0, 1.0, 1.0, 1.0), _ranks(1.0, 1.0, 2.0, 1.0)


def test_a_rank_is_reported_once_after_three_consecutive_windows() -> None:
    named = [SlowRank(2, "compute", 2.0, 1.0)]
    assert _reports(UNEVEN, UNEVEN, UNEVEN, UNEVEN, UNEVEN) == [[], [], named, [], []]
    assert _reports(UNEVEN, UNEVEN, EVEN, UNEVEN, UNEVEN, UNEVEN, EVEN, *[UNEVEN] * 3) == [*[[]] * 5, named, *[[]] * 4]
    other = _ranks(1.0, 2.0, 1.0, 1.0)
    assert _reports(UNEVEN, other, UNEVEN, other, UNEVEN, other) == [[]] * 6, "the consecutive windows of one rank"


@pytest.mark.parametrize(("seconds", "is_slow"), [(1.3, False), (1.31, True), (0.1, False)])
def test_a_rank_is_slow_over_1_3_times_the_median(seconds: float, is_slow: bool) -> None:
    assert bool(_reports(*[_ranks(1.0, 1.0, 1.0, seconds)] * 3)[-1]) == is_slow


def test_a_wait_of_microseconds_is_no_alarm() -> None:
    assert _reports(*[_ranks(1.0, 1.0, 1.0, 1.0, waits=[9e-6, 1e-6, 1e-6, 1e-6])] * 3)[-1] == []


def test_the_part_is_the_one_that_makes_most_of_the_excess() -> None:
    waits = [0.1, 0.1, 0.9, 0.1, 0.1]
    window = _ranks(1.0, 1.0, 1.2, 1.0, 1.9, waits=waits)
    assert _reports(window, window, window)[-1] == [
        SlowRank(2, "data_wait", pytest.approx(2.1), 1.1),
        SlowRank(4, "compute", 2.0, 1.1),
    ]


class Four(World):
    """Rank 0 of four; the seconds of the others are given by window. It counts what it is asked for."""

    size = RANKS

    def __init__(self, others: Iterator[Sequence[RankTimes]]) -> None:
        super().__init__()
        self._others, self.asked = others, list[str]()

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        tensor[1:] += torch.tensor(next(self._others), dtype=tensor.dtype)
        self.asked.append(name)
        return lambda: self.asked.append("read")

    def gather(self, value: Any) -> list[Any]:
        self.asked.append("gather")
        return [(f"rank {rank} on h{rank}", f"n{rank}") for rank in range(self.size)]


def _follow(folder: Path, world: World, steps: range, own: Callable[[int], RankTimes]) -> None:
    """Follow `steps` of a run, each with this rank's own seconds, which then ends."""
    run: Any = SimpleNamespace(world=world, device=CPU, spec=SimpleNamespace(run_path=folder))
    with RunLog(folder, "r", 0, 1000) as log:
        ranks = SlowRanks(run, log)
        for step in steps:
            seconds = own(step)
            ranks.end_step(_timer(step, ("data_wait", seconds.data_wait), ("forward", seconds.compute)), 1)
        ranks.finish()


def test_windows_end_with_every_hundredth_step_and_are_read_with_the_next(tmp_path: Path) -> None:
    """Resumed after step 150: the first window has 50 steps. The last one has just been begun when the run ends."""
    world = Four(iter([_ranks(2.0, 1.0, 1.0)] * 4))
    _follow(tmp_path, world, range(151, 501), lambda step: RankTimes(1.0 + (step > 400), 0.25))
    assert world.asked == ["slow_ranks", "read"] * 3 + ["gather", "slow_ranks", "read"]
    times = records(tmp_path, "rank_times")
    assert [one["step"] for one in times] == [200, 300, 400, 500]
    assert [one["compute_s"] for one in times] == [[1.0, 2.0, 1.0, 1.0]] * 3 + [[2.0, 2.0, 1.0, 1.0]]
    assert [one["data_wait_s"] for one in times] == [[0.25, 0.0, 0.0, 0.0]] * 4
    (slow,) = records(tmp_path, "slow_rank")
    del slow["time"]
    where = {"kind": "slow_rank", "step": 400, "rank": 1, "host": "n1", "part": "compute"}
    assert slow == where | {"seconds": 2.0, "median_s": 1.125}
    (warning,) = records(tmp_path, "warning")
    own = "in the last 100 it took 2e+03 ms of its own for each micro-batch, 1.78 times the median of 4 ranks"
    assert warning["text"] == f"rank 1 on h1 is slow in steps 101 to 400, mostly in its compute: {own}"


def test_fewer_than_three_ranks_are_not_compared(tmp_path: Path) -> None:
    world = Four(iter([]))
    world.size = 2
    _follow(tmp_path, world, range(1, 201), lambda step: RankTimes(1.0, 0.25))
    assert world.asked == []


@pytest.mark.parametrize(
    ("asked", "spares", "before", "after"),
    [
        (False, "1 1", "", []),
        (True, "", "", []),  # a full disk
        (True, "0 1", "", []),  # the job would go on without it, but not faster
        (True, "1 1", "", ["n1"]),
        (True, "1 1", "n1 mine\n", ["n1", "n2"]),  # is named already
        (True, "2 2", "# mine\nn7 broken\n", ["#", "n7", "n1", "n2"]),
    ],
)
def test_the_node_is_left_out_at_the_next_start_where_the_job_has_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, spares: str, before: str, after: list[str]
) -> None:
    if asked:
        monkeypatch.setenv(EXCLUDE_SLOW, "1")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/spares").write_text(spares)
    (tmp_path / "job/bad_nodes").write_text(before)
    first, slow = RankTimes(1.0, 0.0), RankTimes(1.0, 1.0)
    windows = [[slow, first, first]] * 3 + [[first, slow, first]] * 3
    _follow(tmp_path, Four(iter(windows)), range(1, 601), lambda step: RankTimes(1.0, 0.0))
    assert [one["part"] for one in records(tmp_path, "slow_rank")] == ["data_wait", "data_wait"]
    assert [line.split()[0] for line in (tmp_path / "job/bad_nodes").read_text().splitlines()] == after


def _slow_loader() -> None:
    honest = Batches.__next__

    def following(self: Any) -> Any:
        time.sleep(0.25)
        return honest(self)

    Batches.__next__ = following  # type: ignore[method-assign]


def _slow_forward() -> None:
    honest = VideoNetwork.forward

    def forward(self: Any, clips: torch.Tensor) -> Any:
        if not clips.is_meta:  # the plan counts the network on the meta device
            time.sleep(0.25)
        return honest(self, clips)

    VideoNetwork.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "part", "method"),
    [
        pytest.param(_slow_loader, "data_wait", "synchronous", marks=pytest.mark.nightly),
        (_slow_forward, "compute", "averaging"),
    ],
)
def test_a_slow_rank_changes_no_bit(
    write_spec: WriteSpec, tmp_path: Path, fault: Callable[[], None], part: str, method: str
) -> None:
    """Windows of 3 steps; the fault costs several times what a step of so small a network takes."""

    def work() -> int:
        slow_ranks.WINDOW = 3
        if this_launch().rank == SLOW:
            fault()
        return main_without_reports(["train", str(spec)])

    more = {"schedule": {"epochs": 1}, "parallel": {"method": method}}
    spec, run = write_spec("slow", **more), tmp_path / "runs/slow"
    status, output = forked(RANKS, work)
    assert status == 0, output
    assert [one["step"] for one in records(run, "rank_times")] == [3, 6, 9]
    slow = {one["rank"]: one for one in records(run, "slow_rank")}
    assert slow[SLOW]["step"] == 9 and slow[SLOW]["part"] == part and slow[SLOW]["host"] == os.uname().nodename
    assert output.count(f"slow: WARNING: rank {SLOW} on {os.uname().nodename} is slow in steps ") == 1
    if method == "synchronous":
        train(RANKS, write_spec("plain", **more))
        assert_bit_equal(final_state(run), final_state(tmp_path / "runs/plain"))
        assert records(tmp_path / "runs/plain", "rank_times") == []
