"""Checkpoints: written whole or not at all, and kept as long as they are needed."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.run_folder import checkpoint_path, digest_path, find_checkpoints, learner_path, step_of
from summit_train.core.saved import load_newest, tensors_of, without_numbers
from summit_train.optim.solvers import build_solver, set_learning_rate
from summit_train.spec import CheckpointSpec, Spec, smallest_spec
from summit_train.spec.keys import OptimizerSpec, ScheduleSpec
from summit_train.training import checkpoint
from summit_train.training.agreement import experiment_differences
from tests.killing import killed_at
from tests.runs import LARGE, full_disk, load_any, small_checkpoints
from tests.worlds import PATIENCE_S


def _keeping(run: Path, **keys: Any) -> Spec:
    """The spec of a run of five epochs in this folder."""
    own = {"name": run.name, "run_dir": str(run.parent), "checkpoint": CheckpointSpec(**keys)}
    return smallest_spec().model_copy(update=own | {"schedule": ScheduleSpec(epochs=5)})


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    (path,) = small_checkpoints(tmp_path, 12)
    assert path.name == "step_00000012.pt" and step_of(path) == 12
    for state in (load_any(path), torch.load(path, weights_only=True)):
        assert state["step"] == 12 and torch.equal(state["model"]["w"], torch.arange(1000.0) + 12)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.sha256"]
    subprocess.run(["sha256sum", "-c", digest_path(path).name], cwd=path.parent, capture_output=True, check=True)


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    (old,) = small_checkpoints(tmp_path, 10)
    with pytest.raises(RunFailed) as caught, full_disk():
        small_checkpoints(tmp_path, 20)
    assert "step_00000020.pt: the checkpoint could not be written: File too large" in str(caught.value)
    assert f"the last good one is {old}" in str(caught.value)
    assert find_checkpoints(tmp_path) == [old] and load_any(old)["step"] == 10
    assert sorted(p.name for p in old.parent.iterdir()) == [old.name, digest_path(old).name]


def test_a_checkpoint_holds_what_was_there_when_its_bytes_were_taken(tmp_path: Path) -> None:
    weights = {"w": torch.arange(5.0)}
    content = checkpoint.serialised({"model": weights, "optimizer": {}, "step": 1})
    weights["w"] += 1
    path = checkpoint_path(tmp_path, 1)
    digest = checkpoint.write_checkpoint(path, content)
    assert torch.equal(load_any(path)["model"]["w"], torch.arange(5.0))
    assert digest_path(path).read_text() == f"{digest}  {path.name}\n"


@pytest.mark.parametrize("background", [False, True])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, background: bool) -> None:
    """And once the new one is whole it stays; only then the old one is deleted."""
    found = []
    for number in itertools.count(1):
        run = tmp_path / str(number)
        small_checkpoints(run, 10)

        def write(run: Path = run) -> None:
            small_checkpoints(run, 20)
            checkpoint.prune_checkpoints(_keeping(run, keep=1), 10, checkpoint_path(run, 20))

        def save(write: Callable[[], None] = write) -> None:
            writer = checkpoint.Writer(background=background)
            writer.start(write)
            writer.wait()

        is_killed = killed_at(number, tmp_path, save)
        path, state, complaints = load_newest(run, LARGE)
        assert path is not None and step_of(path) == state["step"] and complaints == []
        found.append(state["step"])
        if not is_killed:
            break
    assert found == sorted(found) and (found[0], found[-1]) == (10, 20) and found.count(10) > 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [path.name, digest_path(path).name]


def test_a_checkpoint_in_the_background_is_waited_for_and_its_error_is_raised_once() -> None:
    writer, gate, done = checkpoint.Writer(background=True), threading.Event(), list[str]()

    def write() -> None:
        assert gate.wait(PATIENCE_S)
        done.append("written")

    def fail() -> None:
        raise RunFailed("no room")

    writer.wait()  # nothing was started
    writer.start(write)
    assert done == [] and not writer.has_failed
    gate.set()
    writer.wait()
    assert done == ["written"] and not writer.has_failed
    writer.start(fail)
    with pytest.raises(RunFailed, match="no room"):
        writer.wait()
    writer.wait()
    assert not writer.has_failed


def test_whole_epochs_are_kept_and_the_newest(tmp_path: Path) -> None:
    """10 steps an epoch, two kept: 13 was asked for by a signal and is passed by 20."""
    small_checkpoints(tmp_path, 10, 13, 20, 30, 34)
    spec = _keeping(tmp_path, keep=2)
    checkpoint.prune_checkpoints(spec, 10, checkpoint_path(tmp_path, 34))
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [20, 30, 34]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6
    assert [step_of(path) for path in checkpoint.epoch_checkpoints(spec, 10)] == [20, 30]


def test_the_best_stays_and_epochs_that_are_not_due_count_for_nothing(tmp_path: Path) -> None:
    """A checkpoint every second epoch of five: the fifth is due as the last; the best is of the first."""
    small_checkpoints(tmp_path, 10, 20, 30, 40, 50)
    spec = _keeping(tmp_path, keep=2, every_epochs=2)
    assert [step_of(path) for path in checkpoint.epoch_checkpoints(spec, 10)] == [20, 40, 50]
    checkpoint.prune_checkpoints(spec, 10, *(checkpoint_path(tmp_path, step) for step in (50, 10)))
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [10, 40, 50]
    small_checkpoints(tmp_path, 53)
    checkpoint.prune_checkpoints(spec, 10, *(checkpoint_path(tmp_path, step) for step in (53, 50)))
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [40, 50, 53]


def test_a_damaged_newer_checkpoint_takes_the_place_of_no_other(tmp_path: Path) -> None:
    """The run passed over the one of step 40 and has come to step 25 again. The learner's file of step 10 is left."""
    *_, damaged = small_checkpoints(tmp_path, 10, 20, 25, 40)
    for step in (10, 40):
        learner_path(checkpoint_path(tmp_path, step), 0).touch()
    damaged.write_bytes(b"damaged")
    checkpoint.prune_checkpoints(_keeping(tmp_path, keep=1), 10, checkpoint_path(tmp_path, 25))
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [20, 25, 40] and damaged.read_bytes() == b"damaged"
    assert [path.name for path in damaged.parent.glob("*.learner_*")] == ["step_00000040.learner_0000.pt"]


def test_differences_are_named_key_by_key() -> None:
    saved, wanted = {"seed": 0, "model.width": 1.0, "old": 1}, {"seed": 1, "model.width": 1.0}
    assert experiment_differences(saved, wanted) == {
        "old": "old: the checkpoint has 1, this run None",
        "seed": "seed: the checkpoint has 0, this run 1",
    }


SOLVERS = ("sgd", "adam", "rmsprop", "adagrad", "lamb")


def _solver(name: str, **options: Any) -> torch.optim.Optimizer:
    """A solver after one update of two parameters."""
    spec = OptimizerSpec.model_validate({"name": name, "base_lr": 0.1, "base_batch": 8, **options})
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    solver = build_solver(spec, [{"params": weights, "weight_decay": spec.weight_decay}])
    solver.step()
    return solver


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_takes_its_state_and_keeps_its_own_options(name: str) -> None:
    saved, solver = _solver(name, weight_decay=0.5).state_dict(), _solver(name, weight_decay=0.25)
    for state in solver.state.values():
        for value in state.values():
            value.fill_(9)
    _restore(solver, saved)
    assert solver.param_groups[0]["weight_decay"] == 0.25
    found = solver.state_dict()["state"]
    assert found.keys() == saved["state"].keys() == {0, 1}
    for number, state in saved["state"].items():
        assert all(torch.equal(found[number][key], value) for key, value in state.items())


def _restore(solver: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    numbers = tensors_of(saved, "optimizer")
    for name, target in checkpoint.begin_solver_state(Path("a.pt"), solver, without_numbers(saved)).items():
        target.copy_(numbers[name])


def _renamed(saved: dict[str, Any]) -> None:
    saved["state"][0] = {f"x{key}": value for key, value in saved["state"][0].items()}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_renamed, r"optimizer\.state\.0 "),
        (lambda saved: saved["state"].update({1: saved["state"][0]}), r"optimizer\.state\.1\.\w+ must be float32"),
        (lambda saved: saved["state"].update({2: saved["state"][0]}), "other groups of parameters"),
        (lambda saved: saved["param_groups"][0].update(params=[0]), "other groups of parameters"),
        (lambda saved: saved.update(state=[1]), "other groups of parameters"),
        (lambda saved: saved.pop("state"), "must hold a solver's state"),
        (lambda saved: saved.update(param_groups=7), "must hold a solver's state"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_named(name: str, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    solver = _solver(name)
    saved = solver.state_dict()
    change(saved)
    with pytest.raises(UserError, match=rf"^a\.pt: .*{reason}") as caught:
        checkpoint.begin_solver_state(Path("a.pt"), solver, saved)
    assert "\n" not in str(caught.value)


def test_a_frozen_parameter_has_no_state_and_an_earlier_versions_is_left_out() -> None:
    earlier = _solver("sgd", momentum=0.9).state_dict()
    assert earlier["state"].keys() == {0, 1}
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    spec = OptimizerSpec.model_validate({"name": "sgd", "momentum": 0.9})
    solver = build_solver(spec, [{"params": weights, "weight_decay": 0.0}])
    assert solver.state_dict()["state"].keys() == {0}
    _restore(solver, earlier)
    found = solver.state_dict()["state"]
    assert found.keys() == {0} and torch.equal(found[0]["momentum_buffer"], earlier["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("name", SOLVERS)
def test_a_state_in_another_layout_steps_as_in_that_of_its_weight(name: str) -> None:
    """From a run without accelerated networks, or from another rank: the fused solvers ignore strides."""
    spec, results = OptimizerSpec.model_validate({"name": name}), []
    for state_format in (torch.channels_last, torch.contiguous_format):
        weight = torch.nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        weight.grad = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        solver = build_solver(spec, [{"params": [weight], "weight_decay": 0.0}])
        set_learning_rate(solver, 0.5)
        solver.step()
        saved = solver.state_dict()
        for key, value in saved["state"][0].items():
            if value.ndim:
                saved["state"][0][key] = value.contiguous(memory_format=state_format)
        _restore(solver, saved)
        weight.grad = weight.grad.flip(0).contiguous(memory_format=torch.channels_last)
        solver.step()
        results.append(weight)
    assert torch.equal(*results)
