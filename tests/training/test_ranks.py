"""Promises 1, 2 and 8 with real ranks: equal runs on any number of them, and one rank's failure ends all, by name."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.core.comm.launch import this_launch
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, difference, final_state, records
from tests.worlds import PATIENCE_S, command, joined, lines, needs_ranks, run, train, train_each, under_mpirun

pytestmark = needs_ranks
HOST = socket.gethostname()


def test_6_virtual_gpus_train_the_same_network_on_any_ranks(write_spec: WriteSpec, tmp_path: Path) -> None:
    """6 steps in fp64, dropout and running statistics included, over both back ends."""
    places = {1: "torch", 2: "torch", 3: "horovod", 6: "torch"}
    for ranks, comm in places.items():
        scale = {"gpus": 6, "clips_per_gpu": 2}
        train(ranks, write_spec(f"on{ranks}", precision="fp64", scale=scale, schedule={"epochs": 1}), comm=comm)
    alone = final_state(tmp_path / "runs/on1")
    assert alone["step"] == int(alone["model"]["bn1.num_batches_tracked"]) == 6
    for ranks in places:
        assert difference(alone, final_state(tmp_path / f"runs/on{ranks}")) <= 1e-12, ranks
    plan = json.loads((tmp_path / "runs/on3/plan.json").read_text())
    assert (plan["ranks"], plan["virtual_gpus"], plan["accumulation"]) == (3, 6, 2)


def test_every_video_is_scored_once_on_any_number_of_ranks(done: str, tmp_path: Path) -> None:
    """11 videos, which neither 2 nor 4 divides; 4 does not divide the 6 virtual GPUs either."""
    results = []
    for ranks in (1, 2, 4):
        status, output = command(ranks, "eval", done, "scale.gpus=6", "--json")
        assert status == 0, output
        results.append(json.loads(next(line for line in lines(output) if line.startswith("{"))))
        scores = np.load(tmp_path / "runs/run/predictions/step_00000010.npz")
        assert scores["video"].tolist() == list(range(11))
        assert scores["scores"].shape == (11, 4)
    assert results[0]["videos"] == 11
    assert results[1] == results[0] and results[2] == results[0]


def test_a_bad_video_ends_all_ranks_and_is_named(write_spec: WriteSpec, tmp_path: Path, motion_set: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"this is no video" * 100)
    rows = (motion_set / "train.csv").read_text().splitlines()
    rows = [rows[0], *(f"{motion_set}/{row}" for row in rows[1:])]
    rows[7] = f"{broken}," + rows[7].split(",", 1)[1]
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "classes.txt").write_text((motion_set / "classes.txt").read_text())
    status, output = command(2, "train", str(write_spec(data={"train": str(tmp_path / "train.csv")})))
    assert status not in (0, 2)
    assert str(broken) in output and "rank " in output and "step " in output


def _only_error(output: str) -> str:
    """The line of the error that the ranks found together."""
    assert "Traceback" not in output, output
    (line,) = (line for line in lines(output) if line.startswith("summit-train"))
    return line


def test_a_failed_checkpoint_in_the_background_ends_all_ranks(write_spec: WriteSpec, tmp_path: Path) -> None:
    """A folder has the name of its digest's file."""
    (tmp_path / "runs/run/checkpoints/step_00000010.pt.sha256").mkdir(parents=True)
    status, output = command(2, "train", str(write_spec(schedule={"epochs": 3}, checkpoint={"background": True})))
    assert status == 1
    assert "step_00000010.pt: the checkpoint could not be written: Is a directory" in _only_error(output)
    assert max(record["step"] for record in records(tmp_path / "runs/run", "step")) <= 20


def test_a_known_error_of_rank_0_ends_all_ranks_in_order(done: str) -> None:
    """Rank 0 alone reads the checkpoint."""
    status, output = command(2, "train", done, "optimizer.momentum=0.5")
    assert status == 2
    assert "is of another experiment: optimizer.momentum: the checkpoint has 0.9" in _only_error(output)


# What each rank does before it trains.
_NAN_ON_RANK_1 = """
from summit_train.models import VideoNetwork
honest, calls = VideoNetwork.forward, 0
def forward(self, clips):
    global calls
    calls += not clips.is_meta  # the plan counts the network on the meta device
    logits = honest(self, clips)
    return logits * float("nan") if RANK == 1 and calls >= 5 else logits
VideoNetwork.forward = forward
"""
_BUG = """
from summit_train.training.step import TrainStep
honest = TrainStep.accumulate
def accumulate(self, batch):
    if batch.step == 2 and RANK in FAULTY:
        raise ValueError("a bug put here on purpose")
    honest(self, batch)
TrainStep.accumulate = accumulate
"""
# Until the fourth step the watchdogs are patient, as a busy machine may take long to get there.
_STALL = """
import signal, time
from summit_train.training.step import TrainStep
from summit_train.core.watch import Watchdog
honest, fault, patience = TrainStep._forward, Watchdog._fault, []
def forward(self, batch):
    if batch.step == 3:
        patience.append(6)
        if RANK in FAULTY:
            os.kill(os.getpid(), signal.SIGSTOP) if STOPPED else time.sleep(1000)
    return honest(self, batch)
TrainStep._forward = forward
Watchdog._fault = lambda self, seconds, before: fault(self, patience[0] if patience else seconds, before)
"""


def _train_with(ranks: int, fault: str, comm: str, *words: str, grace_s: float = 1, **names: object) -> tuple[int, str]:
    """Train on ranks that run `fault` first, which knows RANK and the other names; see `worlds.joined`.

    A rank that fails ends the others after `grace_s`, as a launcher does; a rank that failed too says so after 3 s.
    """

    def work() -> int:
        exec(fault, {"os": os, "RANK": this_launch().rank, **names})
        return main(["train", *words])

    return joined(ranks, work, comm, grace_s=grace_s)


def test_two_steps_that_are_not_finite_end_the_run_and_name_the_rank(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Rank 1's loss is NaN from its third step on (two virtual GPUs a rank); rank 0 alone would never know."""
    status, output = _train_with(2, _NAN_ON_RANK_1, "torch", str(write_spec()), grace_s=60)
    assert status not in (0, 2)
    message = next(line for line in lines(output) if "steps in a row" in line)
    assert "rank 1 on" in message and "rank 0 on" not in message
    assert "step 3" in message and "step 4" in message and "videos/train_" in message
    skipped = {record["step"]: record["skipped"] for record in records(tmp_path / "runs/run", "step")}
    assert skipped[1] == skipped[2] == 0 and skipped[3] == 1


def test_a_mistake_that_one_rank_sees_is_not_silent(write_spec: WriteSpec, tmp_path: Path) -> None:
    """As on a cluster where one node lacks the manifest."""
    spec = str(write_spec())
    status, output = under_mpirun(2, lambda: main(["train", spec, *["data.train=gone.csv"] * this_launch().rank]))
    assert status != 0
    assert "rank 1 on" in output and "data.train: gone.csv not found" in output


@pytest.mark.parametrize(
    ("ranks", "faulty", "comm"),
    [(0, 0, "torch"), (2, 1, "horovod"), pytest.param(3, 2, "torch", marks=pytest.mark.nightly)],
)
def test_a_bug_in_the_step_shows_its_traceback_once(write_spec: WriteSpec, ranks: int, faulty: int, comm: str) -> None:
    """A ValueError too, which Python's int() and torch raise, is no mistake of the user."""
    status, output = _train_with(ranks, _BUG, comm, str(write_spec()), FAULTY=[faulty])
    assert status == 1
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.count("ValueError: a bug put here on purpose") == 1
    if ranks > 1:
        assert f"summit-train, rank {faulty} on {HOST}:\nTraceback" in output


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "culprit", "comm"), [(3, 1, "horovod"), (3, 2, "torch")])
def test_a_stopped_rank_is_named_by_the_others(write_spec: WriteSpec, ranks: int, culprit: int, comm: str) -> None:
    """SIGSTOP, as when a node hangs. The rank after it hears nothing more, and is the first to speak."""
    words = (str(write_spec(scale={"gpus": ranks, "clips_per_gpu": 2})), "watch.stall_seconds=600")
    status, output = _train_with(ranks, _STALL, comm, *words, FAULTY=[culprit], STOPPED=True)
    assert status not in (0, 2)
    line = next(line for line in lines(output) if "no progress" in line)
    assert line.startswith(f"rank {(culprit + 1) % ranks} on {HOST}: no progress for "), output
    assert "while waiting for the other ranks in step 4" in line
    assert f"rank {culprit} on {HOST} has been silent for " in line
    assert re.search(r"Last report: (starting|\w+ing .*step [1-4])", line)  # it spoke once a second


def test_a_rank_that_hangs_in_its_own_code_names_itself(write_spec: WriteSpec) -> None:
    words = (str(write_spec()), "watch.stall_seconds=600")
    status, output = _train_with(2, _STALL, "torch", *words, FAULTY=[1], STOPPED=False)
    assert status not in (0, 2)
    line = next(line for line in lines(output) if "no progress" in line)
    assert line.startswith(f"rank 1 on {HOST}: no progress for "), output
    assert "while computing step 4" in line and line.endswith(" is alive")
    assert "in forward" in output  # where every thread stood


def test_a_launcher_without_a_usable_horovod_is_refused(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Two processes that each train a model of their own would look like a run."""
    hidden = tmp_path / "hidden" / "horovod"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    program = f"import sys; sys.path.insert(0, {str(hidden.parent)!r})\n"
    program += "from summit_train.__main__ import main; sys.exit(main())"
    status, output = run(0, "-c", program, "train", str(write_spec()), env=env)
    assert status == 2
    assert "2 processes were started, but Horovod does not start" in output and "Traceback" not in output


@contextmanager
def _other_work() -> Iterator[None]:
    """Keep a core busy within the block."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("ranks", "epochs", "backend"), [pytest.param(3, 2, "horovod", marks=pytest.mark.nightly), (6, 1, "torch")]
)
def test_equal_runs_end_in_equal_bits(
    write_spec: WriteSpec, eight_videos: dict[str, str], tmp_path: Path, ranks: int, epochs: int, backend: str
) -> None:
    """Of 11 MB of gradients: one bucket, and one of 1 MB at the end.

    Over Horovod the second run has other work beside it and looks for what is ready at other moments.
    """
    common = {"model": {"width": 0.5}, "scale": {"gpus": ranks, "clips_per_gpu": 1}, "schedule": {"epochs": epochs}}
    data = eight_videos | {"num_frames": 2}
    specs = [write_spec(name, data=data, **common) for name in ("first", "second")]
    if backend == "torch":
        train_each(ranks, specs, backend)
    else:
        train_each(ranks, specs[:1], backend)
        with pytest.MonkeyPatch.context() as patch, _other_work():
            patch.setenv("HOROVOD_CYCLE_TIME", "7")
            train_each(ranks, specs[1:], backend)
    first, second = (final_state(tmp_path / "runs" / name) for name in ("first", "second"))
    assert str(first["backend"]).startswith(backend)
    assert_bit_equal(first, second)
