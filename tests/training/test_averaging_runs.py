"""Whole runs of model averaging: killed and resumed in the middle of a round, and the files of the learners."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core import saved
from summit_train.core.files import file_sha256
from summit_train.core.run_folder import learner_path
from summit_train.core.saved import load_newest
from summit_train.core.watch import Watchdog
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
def test_a_run_killed_in_mid_round_ends_bit_equal_and_on_other_ranks_to_rounding(
    killed: Path, motion_set: Path
) -> None:
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


def test_an_averaging_run_is_another_experiment(together: Path) -> None:
    status, output = command(0, "train", str(together), "parallel.period=2")
    assert status == 2 and "parallel.period: the checkpoint has 3, this run 2" in output
