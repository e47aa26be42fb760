"""The checkpoint of the best validation: which one, kept beyond the others, and the same after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from summit_train.core.comm import World
from summit_train.core.run_folder import best_checkpoint, best_path, checkpoint_path, find_checkpoints, step_of
from summit_train.core.watch import Watchdog
from summit_train.models.network import initial_network
from summit_train.spec import Spec, load_spec
from summit_train.training.inputs import read_inputs
from summit_train.training.run import Rank, Run
from summit_train.training.validation import decide
from tests.conftest import WriteSpec, made_once, spec_writer
from tests.runs import assert_bit_equal, final_state, load_any, records
from tests.worlds import forked, main_without_reports, train

CPU = torch.device("cpu")


def _rank(spec: Spec) -> Rank:
    return Rank(World(), CPU, initial_network(spec, CPU), Watchdog(World(), None))


def test_a_damaged_newest_checkpoint_leaves_a_best_that_is_there(write_spec: WriteSpec) -> None:
    """The checkpoint of step 20, from which the run resumes, names that of step 10, which was deleted for step 30's."""
    checkpoint = {"keep": 2, "keep_best": "top1"}
    inputs = read_inputs(load_spec(write_spec("run", evaluate={"every_epochs": 1}, checkpoint=checkpoint)), 1)
    folder = inputs.spec.run_path

    def steps() -> list[int]:
        return [step_of(path) for path in find_checkpoints(folder)]

    run = Run(inputs, _rank(inputs.spec))
    for step, top1 in ((10, 50.0), (20, 40.0), (30, 60.0)):
        run.save(step)
        decide(run, None, step // 10, {"top1": top1})
    assert steps() == [20, 30] and best_checkpoint(folder) == checkpoint_path(folder, 30)
    checkpoint_path(folder, 30).write_bytes(b"damaged")

    run = Run(inputs, _rank(inputs.spec))
    assert (run.start_step, run.decisions.best_checkpoint) == (20, None)
    decide(run, None, 2, {"top1": 40.0})  # as a run does that starts at a validation
    assert best_checkpoint(folder) == checkpoint_path(folder, 20)
    for step in (25, 28):
        run.save(step)
    assert steps() == [20, 28, 30]
    run.save(30)
    decide(run, None, 3, {"top1": 30.0})
    run.save(40)
    assert steps() == [20, 30, 40] and best_checkpoint(folder) == checkpoint_path(folder, 20)


_KEYS = {
    "schedule": {"epochs": 3},
    "evaluate": {"every_epochs": 1},
    "checkpoint": {"every_epochs": 2, "keep": 1, "keep_best": "top1"},
}


@pytest.fixture(scope="module")
def whole(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three epochs that nothing interrupted: validated after each, saved after 2 and 3."""

    def make(folder: Path) -> None:
        train(0, spec_writer(motion_set, folder)("run", **_KEYS))

    return made_once(tmp_path_factory, "kept_best", make) / "runs/run"


def test_a_run_keeps_the_checkpoint_of_its_best_validation_and_the_last(whole: Path) -> None:
    """The first epoch has no checkpoint of its own; it has one because it is validated."""
    validations = {record["step"]: record["top1"] for record in records(whole, "eval")}
    best = max(validations, key=lambda step: (validations[step], -step))
    named = json.loads(best_path(whole).read_text())
    assert list(validations) == [10, 20, 30] and named == {"step": best, "measure": "top1", "value": validations[best]}
    assert [record["step"] for record in records(whole, "checkpoint")] == [10, 20, 30]
    assert {step_of(path) for path in find_checkpoints(whole)} == {best, 30}
    assert load_any(best_checkpoint(whole))["step"] == best
    assert [row["step"] for row in json.loads((whole / "eval.json").read_text())["checkpoints"]] == [30]


def test_a_kill_when_the_best_is_named_changes_nothing(write_spec: WriteSpec, tmp_path: Path, whole: Path) -> None:
    """It is killed when best.json is to get its name for the first time; the next start finds the validation done."""
    spec, run = write_spec("run", **_KEYS), tmp_path / "runs/run"

    def die(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("best.json"):
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> int:
        sys.addaudithook(die)
        return main_without_reports(["train", str(spec), "checkpoint.background=true"])

    assert forked(0, work)[0] == -signal.SIGKILL
    train(0, spec)
    assert {record["step"]: record["top1"] for record in records(run, "eval")} == {
        record["step"]: record["top1"] for record in records(whole, "eval")
    }
    assert best_path(run).read_text() == best_path(whole).read_text()
    assert {path.name for path in find_checkpoints(run)} == {path.name for path in find_checkpoints(whole)}
    assert_bit_equal(final_state(whole), final_state(run))
    assert final_state(run)["best_top1"] == final_state(whole)["best_top1"]


def test_more_epochs_begin_a_line_of_checkpoints_with_a_best_and_a_mean_of_its_own(
    write_spec: WriteSpec, tmp_path: Path
) -> None:
    keys = _KEYS | {"schedule": {"epochs": 2}, "checkpoint": {"keep": 9, "keep_best": "top1"}}
    spec, run = write_spec("run", **keys), tmp_path / "runs/run"
    train(0, spec, "schedule.epochs=1", "schedule.warmup_epochs=0.5")
    assert json.loads(best_path(run).read_text())["step"] == 10
    train(0, run, "--more-epochs", "1", "evaluate.last_checkpoints=2")
    assert json.loads(best_path(run).read_text())["step"] == 20
    assert [row["step"] for row in json.loads((run / "eval.json").read_text())["checkpoints"]] == [20]
    assert final_state(run)["line"] == 10 and [step_of(path) for path in find_checkpoints(run)] == [10, 20]
