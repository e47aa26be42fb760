"""Times of steps: phases, clocks that were set apart, slices and tables by hand, and real ranks, one of them slow."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from summit_train.core.comm import World, open_world
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.data.batches.loader import MicroBatch
from summit_train.models import build_model
from summit_train.training.timer import PHASES, Mark, StepTimer
from summit_train.training.trace import (
    RankTrace,
    Slice,
    compare_clocks,
    slices_of,
    slowest_ranks,
    slowest_text,
    traced_steps,
    write_trace,
)
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state, records
from tests.training.test_step import _step
from tests.worlds import Say, forked, lines, main_without_reports, refused, take_step, train, train_signalled

RANKS = 3


def test_the_steps_to_trace_are_checked_at_the_border() -> None:
    assert list(traced_steps("3:5", 20)) == [3, 4, 5] and list(traced_steps("20:20", 20)) == [20]
    assert not traced_steps(None, 20) and len(traced_steps("1:100", 100)) == 100
    for wrong in ("5", "3-5", "0:4", "5:3", "3:21", "a:b", "1:101", "-1:2", "3:5:7", f"1:{10**30}", "\u0663:\u0665"):
        with pytest.raises(UserError, match=r"--trace must be FROM:TO, at most 100 of the steps 1 to \d+, got "):
            traced_steps(wrong, 1000 if wrong == "1:101" else 20)


class Distant(World):
    """Rank 1 of 2. Rank 0's clock is 100 s ahead; a message takes the seconds of `delays`, to it and back in turn."""

    rank, size = 1, 2

    def __init__(self, delays: Iterable[float]) -> None:
        super().__init__()
        self.now, self._delays = 50.0, iter(delays)

    def gather(self, value: Any) -> None:
        self.now += next(self._delays)

    def broadcast(self, value: Any) -> Any:
        ahead = self.now + 100
        self.now += next(self._delays)
        return ahead


def test_the_quickest_message_each_way_bounds_the_clock() -> None:
    """One round says: between 95 and 101 s; another: between 98 and 104. Both together: 98 to 101."""
    world = Distant([1.0, 5.0, 4.0, 2.0, *[9.0] * 100])
    assert compare_clocks(world, lambda: world.now) == (99.5, 1.5)


def test_clocks_that_are_set_apart_are_brought_together(tmp_path: Path) -> None:
    """Forked ranks of one host share a clock, so what was added to each rank's is known exactly."""

    def work() -> int:
        world = open_world(this_launch())
        ahead = (0.0, 5.0, -3.0)[world.rank]
        offset, error = compare_clocks(world, lambda: time.perf_counter() + ahead)
        (tmp_path / str(world.rank)).write_text(json.dumps([offset + ahead, error]))
        world.close()
        return 0

    status, output = forked(RANKS, work)
    assert status == 0, output
    first, *others = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS))
    assert first == [0, 0]
    for wrong, error in others:
        assert 0 < error < 1 and abs(wrong) <= error + 1e-9


def _at(seconds: float) -> Mark:
    """A mark at a time of the host's clock."""
    return cast(Mark, SimpleNamespace(host_time=lambda now: seconds))


def _slices(number: int, data_wait: float, forward: float, end: float, offset: float = 0.0) -> list[Slice]:
    """A step that begins at 10 * number and ends at `end` after that, in which two messages are exchanged."""
    began = 10.0 * number
    laps = {"": 0.0, "data_wait": data_wait, "forward": data_wait + forward}
    laps |= {"backward": laps["forward"] + 1, "allreduce": end - 0.5, "update": end}
    timer = StepTimer(torch.device("cpu"), number)
    timer.laps = [(phase, _at(began + second)) for phase, second in laps.items()]
    timer.sent["gradients.0"] = _at(began + laps["forward"] + 0.5), 800
    timer.sent["gradients.1"] = _at(began + laps["backward"]), 20
    timer.arrived["gradients.0"] = _at(began + end - 1)
    timer.arrived["gradients.1"] = _at(began + end - 0.75)
    return list(slices_of(timer, _at(0), offset))


def test_slices_are_phases_messages_and_the_waits_for_them() -> None:
    assert _slices(1, 0.25, 1.0, 4.0, offset=100.0) == [
        Slice("phases", "step 1", 1, 110.0, 114.0),
        Slice("phases", "data_wait", 1, 110.0, 110.25),
        Slice("phases", "forward", 1, 110.25, 111.25),
        Slice("phases", "backward", 1, 111.25, 112.25),
        Slice("phases", "allreduce", 1, 112.25, 113.5),
        Slice("phases", "update", 1, 113.5, 114.0),
        Slice("gradients.0", "gradients.0", 1, 111.75, 113.0, 800),
        Slice("gradients.0", "wait", 1, 112.25, 113.0),
        Slice("gradients.1", "gradients.1", 1, 112.25, 113.25, 20),
        Slice("gradients.1", "wait", 1, 113.0, 113.25),
    ]


def _three_ranks() -> list[RankTrace]:
    """Two steps in which rank 2 is slow, in the first by its data, in the second by its forward pass. Else all tie."""
    of_rank = [
        [*_slices(1, 0.0, 1.0, 6.0), *_slices(2, 0.25, 1.0, 4.0)],
        [*_slices(1, 0.5, 1.0, 6.0), *_slices(2, 0.0, 1.0, 4.0)],
        [*_slices(1, 3.0, 1.0, 6.0), *_slices(2, 0.0, 1.5, 4.0)],
    ]
    return [RankTrace(f"rank {rank} on h", 0.0, 0.0, slices) for rank, slices in enumerate(of_rank)]


def test_the_slowest_rank_is_the_late_one_and_not_those_that_wait_for_it() -> None:
    ranks = _three_ranks()
    rows = slowest_ranks(ranks)
    table = [(r.phase, r.rank, r.seconds, r.median_s, r.times_slowest, r.steps) for r in rows]
    assert table == [
        ("data_wait", 2, 1.5, 0.25, 1, 2),
        ("forward", 2, 1.25, 1.0, 2, 2),
        ("backward", 0, 1.0, 1.0, 2, 2),
        ("allreduce", 2, 0.75, 2.25, 2, 2),
        ("update", 0, 0.5, 0.5, 2, 2),
    ]
    assert slowest_text(ranks, rows) == [
        "  phase      slowest rank                     its time     median    slowest in\n"
        "  data_wait  rank 2 on h                     1500.0 ms   250.0 ms  1 of 2 steps\n"
        "  forward    rank 2 on h                     1250.0 ms  1000.0 ms  2 of 2 steps\n"
        "  backward   rank 0 on h                     1000.0 ms  1000.0 ms  2 of 2 steps\n"
        "  allreduce  rank 2 on h, which waits least   750.0 ms  2250.0 ms  2 of 2 steps\n"
        "  update     rank 0 on h                      500.0 ms   500.0 ms  2 of 2 steps",
        "the others wait 1500.0 ms a step for rank 2 on h, the last in 2 of 2 steps, most by its data_wait: 1250.0 ms "
        "over the median",
    ]
    ranks[2] = replace(ranks[2], virtual_gpus=2)  # it has a reason
    assert slowest_text(ranks, rows)[1].endswith("over the median; it has 2 virtual GPUs, others have 1")


def _read(path: Path) -> dict[tuple[str, str], list[tuple[str, float, float, int]]]:
    """(process, thread) -> its slices (name, start, end, depth) of a trace, which must be as Perfetto wants it.

    The Trace Event Format: complete events (X) of a thread are nested; Perfetto: and process 0 is not used.
    """
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    names = {(e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M"}
    threads: dict[tuple[str, str], list[tuple[str, float, float, int]]] = defaultdict(list)
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    assert len({e["tid"] for e in events if "tid" in e}) == sum(kind == "thread_name" for kind, _, _ in names)
    for event in (e for e in events if e["ph"] == "X"):
        place, start, end = (event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"]
        assert place[0] >= 1 and isinstance(start, int) and 0 <= start <= end
        ends = open_ends[place]
        while ends and ends[-1] <= start and (end > ends[-1] or start > ends[-1]):
            ends.pop()
        assert not ends or end <= ends[-1], f"{event} overlaps one that ends at {ends[-1]}"
        key = names["process_name", place[0], None], names["thread_name", place[0], place[1]]
        threads[key].append((event["name"], start, end, len(ends)))
        ends.append(end)
    return threads


def test_the_file_has_a_process_for_each_rank_and_a_thread_for_each_message(tmp_path: Path) -> None:
    path = tmp_path / "trace/steps_1-2.json"
    write_trace(path, _three_ranks(), {"steps": [1, 2]})
    content = json.loads(path.read_text())
    assert content["otherData"] == {"steps": [1, 2]} and content["displayTimeUnit"] == "ms"
    threads = _read(path)
    names = ("phases", "gradients.0", "gradients.1")
    assert list(threads) == [(f"rank {rank} on h", name) for rank in range(RANKS) for name in names]
    second = 1_000_000  # in microseconds, from the first slice of all on
    assert threads["rank 2 on h", "phases"][:3] == [
        ("step 1", 0, 6 * second, 0),
        ("data_wait", 0, 3 * second, 1),
        ("forward", 3 * second, 4 * second, 1),
    ]
    assert threads["rank 2 on h", "phases"][6:8] == [
        ("step 2", 10 * second, 14 * second, 0),
        ("data_wait", 10 * second, 10 * second, 1),
    ]
    assert threads["rank 0 on h", "gradients.1"][:2] == [
        ("gradients.1", 2 * second, 5.25 * second, 0),
        ("wait", 5 * second, 5.25 * second, 1),
    ]
    sizes = [e["args"] for e in content["traceEvents"] if e["name"] == "gradients.0" and e["ph"] == "X"]
    assert sizes == [{"step": step, "bytes": 800} for _ in range(RANKS) for step in (1, 2)]


# A rank that is slow in steps 3 to 5, in its network.
_SLOW_FORWARD = """
import time
from summit_train.models import VideoNetwork
honest, calls = VideoNetwork.forward, 0
def forward(self, clips):
    global calls
    calls += not clips.is_meta  # the plan counts the network on the meta device
    if RANK == 1 and 4 < calls <= 10:  # two passes a step
        time.sleep(0.3)
    return honest(self, clips)
VideoNetwork.forward = forward
"""


def test_a_slow_rank_is_named_in_its_phase_and_training_is_the_same(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Two virtual GPUs on each of three ranks; the fault costs 0.6 s in each of the three traced steps."""

    def work() -> int:
        exec(_SLOW_FORWARD, {"RANK": this_launch().rank})
        return main_without_reports(["train", str(spec), "--trace", "3:5"])

    scale, short = {"gpus": 6, "clips_per_gpu": 2}, {"epochs": 1}
    spec = write_spec("slow", scale=scale, schedule=short)
    status, output = forked(RANKS, work)
    assert status == 0, output
    run, plain = tmp_path / "runs/slow", tmp_path / "runs/plain"
    content = json.loads((run / "trace/steps_3-5.json").read_text())["otherData"]
    rows = {row["phase"]: row for row in content["slowest"]}
    for name in ("forward", "allreduce"):
        assert (rows[name]["rank"], rows[name]["times_slowest"], rows[name]["steps"]) == (1, 3, 3), name
    assert rows["forward"]["seconds"] >= 0.6 and rows["allreduce"]["median_s"] > rows["allreduce"]["seconds"]
    assert content["steps"] == [3, 5] and content["clock_offset_s"][0] == content["clock_error_s"][0] == 0
    # Ranks of one host share a clock.
    pairs = zip(content["clock_offset_s"], content["clock_error_s"], strict=True)
    assert all(abs(offset) <= error + 1e-9 for offset, error in pairs)
    said = next(line for line in lines(output) if line.startswith("the others wait"))
    assert re.search(r" a step for rank 1 on \S+, the last in 3 of 3 steps, most by its forward: ", said)
    threads = _read(run / "trace/steps_3-5.json")
    assert {thread for _, thread in threads} == {"phases", "gradients.0"} and len(threads) == 2 * RANKS
    for (_, thread), slices in threads.items():
        names = [name for name, _, _, depth in slices if depth == 1]
        if thread == "phases":
            assert [name for name, _, _, depth in slices if depth == 0] == ["step 3", "step 4", "step 5"]
            work_of_3 = [*["data_wait", "forward", "backward"] * 2, "allreduce", "update", "allreduce"]
            assert [name for name in names if name != "other"] == work_of_3 * 3
        else:
            assert names == ["wait"] * 3

    train(RANKS, write_spec("plain", scale=scale, schedule=short))
    plain = tmp_path / "runs/plain"
    assert_bit_equal(final_state(run), final_state(plain))
    assert (run / "spec.yaml").read_text() == (plain / "spec.yaml").read_text().replace("plain", "slow")
    assert not (plain / "trace").exists() and [r["step"] for r in records(run, "step")] == [*range(1, 7)]


def test_a_stop_within_the_traced_steps_writes_those_that_are_done(write_spec: WriteSpec, tmp_path: Path) -> None:
    """The same command continues, as a requeued job does, with the steps that are left, and later with none."""
    spec, folder = write_spec(schedule={"epochs": 1}), tmp_path / "runs/run/trace"
    status, output = train_signalled(spec, signal.SIGUSR2, 4, "--trace", "3:9")
    assert status == 85 and f"trace: {folder}/steps_3-5.json" in output, output
    threads = _read(folder / "steps_3-5.json")
    ((_, slices),) = threads.items()
    assert [name for name, _, _, depth in slices if depth == 0] == ["step 3", "step 4", "step 5"]
    assert slices[-1][0] == "checkpoint" and "the others wait" not in output
    train(0, spec, "--trace", "3:9")
    assert sorted(path.name for path in folder.iterdir()) == ["steps_3-5.json", "steps_6-9.json"]
    output = train(0, spec, "--trace", "3:9")
    assert "trace: steps 3 to 9 were done before this start; nothing is traced" in output
    assert len(list(folder.iterdir())) == 2


def test_a_wrong_trace_is_the_users_mistake(write_spec: WriteSpec, tmp_path: Path, say: Say) -> None:
    line = refused(say("train", write_spec(), "--trace", "7:25"))
    assert line == "--trace must be FROM:TO, at most 100 of the steps 1 to 20, got '7:25'; try 16:20"
    assert not (tmp_path / "runs").exists()


def test_model_averaging_is_traced_too(write_spec: WriteSpec, tmp_path: Path) -> None:
    train(0, write_spec(parallel={"method": "averaging"}, schedule={"epochs": 1}), "--trace", "9:10")
    slices = _read(tmp_path / "runs/run/trace/steps_9-10.json")
    ((_, phases),) = slices.items()
    assert {name for name, *_ in phases} >= {"forward", "backward", "allreduce", "update", "checkpoint", "step 10"}


CPU = torch.device("cpu")


def test_a_step_names_its_phases_in_their_order() -> None:
    model = build_model("tsm", "resnet18", 2, 3, width=0.125, generator=torch.Generator().manual_seed(1))
    frames = torch.arange(2 * 2 * 16 * 16 * 3).reshape(2, 2, 16, 16, 3).remainder(256).to(torch.uint8)
    labels, ids = torch.tensor([0, 2]), torch.arange(2)
    batches = [MicroBatch(0, number, frames, labels, ids) for number in range(2)]
    timer = StepTimer(CPU, 1)
    take_step(_step(model, 2, "fp32"), batches, 0.1, timer=timer)
    work = [phase for phase, _ in timer.laps if phase != "other"]
    assert work == [""] + ["forward", "backward"] * 2 + ["allreduce", "update"]
    seconds = timer.seconds()
    assert set(seconds) == set(PHASES) and seconds["data_wait"] == 0
    assert all(seconds[phase] > 0 for phase in PHASES if phase != "data_wait")


def test_the_laps_of_a_step_leave_no_time_between_them() -> None:
    timer = StepTimer(CPU)
    time.sleep(0.02)
    timer.lap("data_wait")
    timer.lap("forward")
    time.sleep(0.01)
    timer.lap("data_wait")
    timer.lap("checkpoint")
    seconds = timer.seconds()
    assert seconds["data_wait"] >= 0.03 and seconds["forward"] < seconds["data_wait"]
    assert sum(seconds.values()) == pytest.approx(timer.start.seconds_to(timer.laps[-1][1]))
    assert set(seconds) == {*PHASES, "checkpoint"} and seconds["update"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timing_on_a_gpu_does_not_wait_for_it() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(2048, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer = StepTimer(device)
        x @ x
        timer.lap("forward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert timer.seconds()["forward"] > 0
