"""Runs of model averaging: killed in the middle of a round, learners' files, and the batch that grows."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from summit_train.core import saved
from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256
from summit_train.core.run_folder import learner_path
from summit_train.core.saved import load_newest
from summit_train.core.watch import Watchdog
from summit_train.data.batches.order import Order
from summit_train.plan import BatchSize, make_plan
from summit_train.spec import Spec, spec_from_values
from tests.closeness import assert_near
from tests.conftest import WriteSpec, spec_writer
from tests.runs import LARGE, assert_bit_equal, difference, final_state, load_any, records
from tests.worlds import command, lines, train, train_signalled

ADAM = {"name": "adam", "base_lr": 1e-3, "lr_scaling": "none"}
# 80 clips: 5 steps an epoch for 4 learners of 4 clips, so the rounds of 3 steps end after steps 3, 5, 8 and 10.
FOUR: dict[str, Any] = {
    "scale": {"gpus": 4, "clips_per_gpu": 4},
    "optimizer": ADAM,
    "parallel": {"method": "averaging", "period": 3},
    "precision": "fp64",
}


@pytest.fixture(scope="module")
def together(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four learners for two epochs on 2 ranks. What they come to: test_golden_runs.py, test_uneven_shares.py."""
    folder = tmp_path_factory.mktemp("averaging")
    train(2, spec_writer(motion_set, folder)("together", **FOUR))
    return folder / "runs/together"


def test_the_averages_are_recorded_and_whole_epochs_need_no_learners_files(together: Path) -> None:
    averages = records(together, "average")
    assert [(record["step"], record["epoch"]) for record in averages] == [(3, 0), (5, 0), (8, 1), (10, 1)]
    assert all(record["seconds"] > 0 and record["bytes"] > 0 for record in averages)
    assert list((together / "checkpoints").glob("*learner*")) == []
    assert len(records(together, "step")) == 10


@pytest.fixture(scope="module")
def killed(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four learners on one rank, killed in step 8, with which a round of three steps ends. It checkpoints
    every second step, so its newest is of step 7; it is copied before it continues."""
    folder = tmp_path_factory.mktemp("killed")
    spec = spec_writer(motion_set, folder)("killed", **FOUR)
    often = "checkpoint.every_minutes=1e-9"
    assert train_signalled(spec, signal.SIGKILL, 8, often)[0] == -signal.SIGKILL
    return folder


def _resumed(killed: Path, name: str, motion_set: Path, ranks: int) -> str:
    """Continue a copy of the killed run as `name`; its output."""
    shutil.copytree(killed / "runs/killed", killed / "runs" / name)
    return train(ranks, spec_writer(motion_set, killed)(name, **FOUR))


def test_a_killed_run_left_each_learners_state(killed: Path) -> None:
    files = sorted(path.name for path in (killed / "runs/killed/checkpoints").glob("step_00000007.*pt"))
    assert files == [*(f"step_00000007.learner_{number:04d}.pt" for number in range(4)), "step_00000007.pt"]
    path, state, complaints = load_newest(killed / "runs/killed", LARGE)
    assert path is not None and path.name == files[-1] and complaints == []
    assert (state["in_round"], len(state["learner_digests"])) == (2, 4)
    learners = [load_any(learner_path(path, number))["model"] for number in range(4)]
    for name, value in state["model"].items():
        if name.endswith(("weight", "bias")):
            mean = torch.stack([learner[name] for learner in learners]).mean(0)
            assert_near(value, mean, 1e-12, name)


@pytest.mark.nightly
def test_a_run_killed_in_mid_round_ends_bit_equal_on_other_ranks_to_rounding(killed: Path, motion_set: Path) -> None:
    train(0, spec_writer(motion_set, killed)("whole", **FOUR))
    assert "step_00000007.pt" in _resumed(killed, "again", motion_set, 0)
    assert "step_00000007.pt" in _resumed(killed, "together", motion_set, 2)
    whole, again, other = (final_state(killed / f"runs/{name}") for name in ("whole", "again", "together"))
    assert_bit_equal(whole, again)
    assert difference(whole, other) <= 1e-10
    assert list((killed / "runs/again/checkpoints").glob("*learner*")) == []


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_checkpoint_whose_learner_is_damaged_is_passed_over(killed: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(killed / "runs/killed", tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_00000007.pt"
    learner = learner_path(path, 3)
    learner.write_bytes(learner.read_bytes()[:-1]) if harm == "cut" else learner.unlink()
    found, _, complaints = load_newest(tmp_path / "run", LARGE)
    assert found is not None and found.name == "step_00000005.pt"
    assert f"{learner} is {'damaged' if harm == 'cut' else 'missing'}" in complaints[0]


@pytest.mark.parametrize(("ranks", "is_torn"), [(2, False), (4, True)])
def test_each_rank_checks_its_files_once(
    killed: Path, motion_set: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, is_torn: bool
) -> None:
    def digest(path: Path) -> str:
        os.write(1, f"rank {os.environ['RANK']} takes the digest of {path.name}\n".encode())
        return file_sha256(path)

    def at(self: Watchdog, where: str, *, waits: bool = False) -> None:
        os.write(1, f"rank {os.environ['RANK']} is at {where}\n".encode())

    monkeypatch.setattr(saved, "file_sha256", digest)
    monkeypatch.setattr(Watchdog, "at", at)
    shutil.copytree(killed / "runs/killed", killed / f"runs/torn{ranks}")
    newest = killed / f"runs/torn{ranks}/checkpoints/step_00000007.pt"
    learner = learner_path(newest, 3)
    if is_torn:
        learner.write_bytes(learner.read_bytes()[:-1])
    output = train(ranks, spec_writer(motion_set, killed)(f"torn{ranks}", **FOUR))
    complaint = f"passed over: {newest}: {learner} is damaged: its SHA-256 is not that in the checkpoint\n"
    assert (complaint in output) == is_torn
    assert f"resumes from {newest.with_stem('step_00000005') if is_torn else newest}\n" in output
    for number in range(4):
        file, owner = learner_path(newest, number), f"rank {number * ranks // 4}"
        taken = [line for line in lines(output) if line.endswith(f"takes the digest of {file.name}")]
        assert taken == [f"{owner} takes the digest of {file.name}"]
        assert f"{owner} is at checking {file}" in output


def test_learners_with_local_state_are_saved_and_pruned_with_their_epoch(write_spec: WriteSpec, tmp_path: Path) -> None:
    parallel = {"method": "averaging", "optimizer_state": "local", "bn": "local"}
    spec = write_spec(**{**FOUR, "parallel": parallel}, checkpoint={"keep": 1})
    train(0, spec)
    saved = sorted(path.name for path in (tmp_path / "runs/run/checkpoints").iterdir())
    names = [*(f"step_00000010.learner_{number:04d}.pt" for number in range(4)), "step_00000010.pt"]
    assert saved == sorted([*names, *(f"{name}.sha256" for name in names)])
    path = tmp_path / "runs/run/checkpoints/step_00000010.pt"
    one, other = (load_any(learner_path(path, number)) for number in (0, 1))
    assert torch.equal(one["model"]["fc.weight"], other["model"]["fc.weight"])
    assert not torch.equal(one["model"]["bn1.running_mean"], other["model"]["bn1.running_mean"])


def test_an_averaging_run_is_another_experiment(together: Path) -> None:
    status, output = command(0, "train", str(together), "parallel.period=2")
    assert status == 2 and "parallel.period: the checkpoint has 3, this run 2" in output


UCF101 = 596 * 16  # 9,536 clips: 596 for each of the paper's 16 learners


def _spec(clips_per_gpu: int = 32, epochs: int = 10, **grow: Any) -> Spec:
    values = {
        "name": "a",
        "model": {"arch": "tsn", "backbone": "resnet18", "width": 0.125, "num_classes": 4},
        "data": {"train": "train.csv", "val": "val.csv"},
        "scale": {"gpus": 16, "clips_per_gpu": clips_per_gpu},
        "parallel": {"method": "averaging", "grow_batch": grow},
        "schedule": {"epochs": epochs, "warmup_epochs": 1},
        "evaluate": {"every_epochs": 1},
    }
    return spec_from_values(values, "here")


def test_the_ladder_is_that_of_the_paper() -> None:
    """Section III: 576 is the largest multiple of 32 that a learner's 596 clips hold; 18 steps an epoch at first."""
    ladder = [(32, 18), (64, 9), (128, 4), (256, 2), (512, 1), (576, 1)]
    plan = make_plan(_spec(), 16, UCF101)
    assert list(plan.ladder) == [BatchSize(clips, 16 * clips, steps) for clips, steps in ladder]
    assert plan.values()["ladder"][1] == {"clips_per_gpu": 64, "global_batch": 1024, "steps_per_epoch": 9}
    assert [size.clips_per_gpu for size in make_plan(_spec(64), 16, UCF101).ladder] == [64, 128, 256, 512, 576]
    assert [size.clips_per_gpu for size in make_plan(_spec(factor=4, max=300), 16, UCF101).ladder] == [32, 128, 300]
    make_plan(_spec(max=596), 16, UCF101)
    with pytest.raises(UserError, match=r"max: 597 clips do not fit a learner's epoch: 16 learners have 596"):
        make_plan(_spec(max=597), 16, UCF101)


def test_the_steps_of_a_grown_batch_have_the_last_numbers_of_the_epoch() -> None:
    """6 numbers an epoch, 2 steps: 4, 5, 10, 11, with the clips of steps 0 to 3 of an order that has 2 an epoch."""
    grown, plain = Order(24, 7, 2, 6, 2, step_numbers_per_epoch=6), Order(24, 7, 2, 6, 2)
    found = list(grown.micro_batches(0, 1, range(12)))
    wanted = list(plain.micro_batches(0, 1, range(4)))
    assert [key[0] for key in found] == [4, 4, 5, 5, 10, 10, 11, 11]
    for (_, *mine, clips), (_, *theirs, others) in zip(found, wanted, strict=True):
        assert mine == theirs and np.array_equal(clips, others)
    assert [key[0] for key in grown.micro_batches(1, 2, range(5, 9))] == [5]


def test_the_learning_rate_is_read_by_the_progress_of_the_epoch() -> None:
    """18 numbers an epoch; 4 steps of the third size are read at 0, 4.5, 9 and 13.5 of them."""
    plan = make_plan(_spec(), 16, UCF101)
    grown = plan.ladder[2]
    assert plan.first_step(3, grown) == 4 * 18 - 4 and plan.first_step(3, plan.ladder[0]) == 54
    rates = [plan.learning_rate(step, grown) for step in range(4 * 18 - 4, 4 * 18)]
    assert rates == [plan.schedule.learning_rate(54 + place) for place in (0, 4.5, 9, 13.5)]
    assert plan.learning_rate(60, plan.ladder[0]) == plan.learning_rate(60)


def test_a_run_whose_batch_grows_keeps_it_when_it_goes_on(write_spec: WriteSpec, tmp_path: Path) -> None:
    """4 learners of 2 clips with 20 each: with this margin every decision but the first grows the batch.

    Epochs of 10, 10, 5 and 2 steps; then once more from the end of epoch 2, whose validation decides on epoch 3.
    """
    parallel = {"method": "averaging", "period": 4, "grow_batch": {"margin": 1000.0}}
    checkpoint = {"keep": 9, "keep_best": "top1"}
    common = {"evaluate": {"every_epochs": 1}, "schedule": {"epochs": 4}, "precision": "fp64", "optimizer": ADAM}
    growing, run = write_spec(parallel=parallel, checkpoint=checkpoint, **common), tmp_path / "runs/run"
    output = train(0, growing)
    assert "epoch 2: batch of a learner grows from 2 clips to 4, 5 steps an epoch" in output
    steps = [record["step"] for record in records(run, "step")]
    assert steps == [*range(1, 21), *range(26, 31), 39, 40]
    batches = [(one["epoch"], one["clips_per_gpu"], one["global_batch"]) for one in records(run, "batch")]
    assert batches == [(1, 2, 8), (2, 4, 16), (3, 8, 32)]
    accuracies = [record["top1"] for record in records(run, "eval")][:3]
    assert [record["accuracy"] for record in records(run, "batch")] == accuracies
    assert [record["step"] for record in records(run, "average")] == [4, 8, 10, 14, 18, 20, 29, 30, 40]
    whole = final_state(run)
    assert whole["growth"] == {"clips_per_gpu": 8, "best": max(accuracies), "validations": 3}
    for later in (*run.glob("checkpoints/step_00000040*"), *run.glob("checkpoints/step_00000030*")):
        later.unlink()
    (run / "metrics.jsonl").unlink()  # no decision is read from it
    best = (run / "checkpoints/best.json").read_text()
    shutil.copytree(run, tmp_path / "kept")
    train(0, growing)
    assert (run / "checkpoints/best.json").read_text() == best
    assert [record["step"] for record in records(run, "step")][-7:] == [*range(26, 31), 39, 40]
    assert_bit_equal(whole, final_state(run))
