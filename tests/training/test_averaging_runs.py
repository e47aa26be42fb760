"""Whole runs of model averaging: the same on any number of ranks, killed and resumed in the middle of a round."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core import saved
from summit_train.core.checkpoints import learner_path
from summit_train.core.files import file_sha256
from summit_train.core.saved import load_newest
from summit_train.core.watch import Watchdog
from summit_train.training.averaging import AveragingStep
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
def runs(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four learners for two epochs on 1 rank, on 2 and on 4."""
    folder = tmp_path_factory.mktemp("averaging")
    for ranks in (1, 2, 4):
        train(ranks, spec_writer(motion_set, folder)(f"on{ranks}", **FOUR))
    return folder / "runs"


def test_4_learners_on_4_ranks_are_those_on_2_and_on_1(runs: Path) -> None:
    alone = final_state(runs / "on1")
    for ranks in (2, 4):
        other = final_state(runs / f"on{ranks}")
        assert difference(alone, other) <= 1e-10
        for state, theirs in zip(*(one["optimizer"]["state"].values() for one in (alone, other)), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert_near(state[name], theirs[name], 1e-7, name)
            assert state["step"] == theirs["step"] == 10
        losses = [[record["loss"] for record in records(runs / name, "step")] for name in ("on1", f"on{ranks}")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_the_averages_are_recorded_and_whole_epochs_need_no_learners_files(runs: Path) -> None:
    for ranks in (1, 2, 4):
        averages = records(runs / f"on{ranks}", "average")
        assert [(record["step"], record["epoch"]) for record in averages] == [(3, 0), (5, 0), (8, 1), (10, 1)]
        assert all(record["seconds"] > 0 and record["bytes"] > 0 for record in averages)
        assert list((runs / f"on{ranks}/checkpoints").glob("*learner*")) == []
        assert len(records(runs / f"on{ranks}", "step")) == 10


LONG_ROUNDS = {**FOUR, "parallel": {"method": "averaging", "period": 7}}


@pytest.fixture(scope="module")
def killed(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four learners on one rank whose rounds end after steps 5 and 10, killed in step 10. It checkpoints
    every second step, so its newest is of step 9; it is copied before it continues."""
    folder = tmp_path_factory.mktemp("killed")
    spec = spec_writer(motion_set, folder)("killed", **LONG_ROUNDS)
    often = "checkpoint.every_minutes=1e-9"
    assert train_signalled(spec, signal.SIGKILL, 10, often, kind=AveragingStep)[0] == -signal.SIGKILL
    return folder


def _resumed(killed: Path, name: str, motion_set: Path, ranks: int) -> str:
    """Continue a copy of the killed run as `name`; its output."""
    shutil.copytree(killed / "runs/killed", killed / "runs" / name)
    return train(ranks, spec_writer(motion_set, killed)(name, **LONG_ROUNDS))


def test_a_killed_run_left_each_learners_state(killed: Path) -> None:
    files = sorted(path.name for path in (killed / "runs/killed/checkpoints").glob("step_00000009.*pt"))
    assert files == [*(f"step_00000009.learner_{number:04d}.pt" for number in range(4)), "step_00000009.pt"]
    path, state, complaints = load_newest(killed / "runs/killed", LARGE)
    assert path is not None and path.name == files[-1] and complaints == []
    assert (state["in_round"], len(state["learner_digests"])) == (4, 4)
    learners = [load_any(learner_path(path, number))["model"] for number in range(4)]
    for name, value in state["model"].items():
        if name.endswith(("weight", "bias")):
            mean = torch.stack([learner[name] for learner in learners]).mean(0)
            assert_near(value, mean, 1e-12, name)


def test_a_run_killed_in_mid_round_ends_bit_equal(killed: Path, motion_set: Path) -> None:
    train(0, spec_writer(motion_set, killed)("whole", **LONG_ROUNDS))
    assert "step_00000009.pt" in _resumed(killed, "again", motion_set, 0)
    whole, again = final_state(killed / "runs/whole"), final_state(killed / "runs/again")
    assert_bit_equal(whole, again)
    assert list((killed / "runs/again/checkpoints").glob("*learner*")) == []


def test_it_continues_on_other_ranks_to_rounding(killed: Path, motion_set: Path) -> None:
    again, other = _resumed(killed, "alone", motion_set, 0), _resumed(killed, "together", motion_set, 2)
    assert "step_00000009.pt" in again and "step_00000009.pt" in other
    one, two = (final_state(killed / f"runs/{name}") for name in ("alone", "together"))
    assert difference(one, two) <= 1e-10


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_checkpoint_whose_learner_is_damaged_is_passed_over(killed: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(killed / "runs/killed", tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_00000009.pt"
    learner = learner_path(path, 3)
    learner.write_bytes(learner.read_bytes()[:-1]) if harm == "cut" else learner.unlink()
    found, _, complaints = load_newest(tmp_path / "run", LARGE)
    assert found is not None and found.name == "step_00000005.pt"
    assert f"{learner} is {'damaged' if harm == 'cut' else 'missing'}" in complaints[0]


@pytest.mark.parametrize(("ranks", "is_torn"), [(1, True), (2, False), (4, True)])
def test_each_rank_checks_the_files_that_it_loads_once_and_all_pass_over_a_checkpoint_together(
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
    newest = killed / f"runs/torn{ranks}/checkpoints/step_00000009.pt"
    learner = learner_path(newest, 3)
    if is_torn:
        learner.write_bytes(learner.read_bytes()[:-1])
    output = train(ranks, spec_writer(motion_set, killed)(f"torn{ranks}", **LONG_ROUNDS))
    complaint = f"passed over: {newest}: {learner} is damaged: its SHA-256 is not that in the checkpoint\n"
    assert (complaint in output) == is_torn
    assert f"resumes from {newest.with_stem('step_00000005') if is_torn else newest}\n" in output
    for number in range(4):
        file, owner = learner_path(newest, number), f"rank {number * ranks // 4}"
        taken = [line for line in lines(output) if line.endswith(f"takes the digest of {file.name}")]
        assert taken == [f"{owner} takes the digest of {file.name}"]
        assert f"{owner} is at checking {file}" in output


def test_learners_with_a_state_of_their_own_are_saved_at_every_epoch_and_pruned_with_it(
    write_spec: WriteSpec, tmp_path: Path
) -> None:
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


def test_an_averaging_run_is_another_experiment(runs: Path, motion_set: Path) -> None:
    spec = spec_writer(motion_set, runs.parent)("on1", **{**FOUR, "parallel": {"method": "averaging", "period": 2}})
    status, output = command(0, "train", str(spec))
    assert status == 2 and "parallel.period: the checkpoint has 3, this run 2" in output
