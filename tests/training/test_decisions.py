"""Decisions of validations by hand and in runs: the best checkpoint, the early stop, Algorithm 1 of AAVG."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.run_folder import best_checkpoint, best_path, checkpoint_path, find_checkpoints, step_of
from summit_train.core.watch import Watchdog
from summit_train.models.network import initial_network
from summit_train.plan import BatchSize, is_due
from summit_train.report.records import RunRecord
from summit_train.report.tables import notes_of
from summit_train.spec import Spec, load_spec, smallest_spec
from summit_train.spec.keys import EarlyStopSpec, FreezeSpec, GrowBatchSpec
from summit_train.training.decisions import Decisions
from summit_train.training.inputs import read_inputs
from summit_train.training.run import Rank, Run
from summit_train.training.validation import decide
from tests.conftest import WriteSpec, made_once, spec_writer
from tests.runs import assert_bit_equal, final_state, load_any, records, rewound, small_checkpoints, steps_of
from tests.worlds import command, forked, main_without_reports, needs_ranks, train

LADDER = [BatchSize(size, 2 * size, 24 // size) for size in (4, 8, 12)]
EPOCHS = 100  # more than any test has


def _spec(folder: Path = Path("runs/a"), **sections: dict[str, Any]) -> Spec:
    spec = smallest_spec().model_copy(update={"name": folder.name, "run_dir": str(folder.parent)})
    sections["schedule"] = {"epochs": EPOCHS} | sections.get("schedule", {})
    sections["evaluate"] = {"every_epochs": 1} | sections.get("evaluate", {})
    changed = {name: getattr(spec, name).model_copy(update=keys) for name, keys in sections.items()}
    return spec.model_copy(update=changed)


def _again(decisions: Decisions, spec: Spec) -> Decisions:
    """The decisions of a run that resumes from a checkpoint with those of this one."""
    again = Decisions(spec, LADDER)
    again.load_state_dict(json.loads(json.dumps(decisions.state_dict())))
    return again


def test_the_first_of_the_highest_is_the_best(tmp_path: Path) -> None:
    spec = _spec(tmp_path, checkpoint={"keep_best": "top1"})
    best = Decisions(spec, LADDER)
    assert best.best_checkpoint is None
    values = [0.0, 50.0, 50.0, 49.9, 50.1, math.nan, None]
    found = [best.update(epoch, 10 * epoch, {"top1": value}).is_best for epoch, value in enumerate(values, 1)]
    assert found == [True, True, False, False, True, False, False]
    assert not best.update(8, 80, {"top5": 99.0}).is_best
    assert best.best_checkpoint == tmp_path / "checkpoints/step_00000050.pt"
    assert best.update(EPOCHS, 1000, {"top1": 60.0}).is_best  # after the last epoch, too
    assert not Decisions(_spec(tmp_path), LADDER).update(1, 10, {"top1": 50.0}).is_best


def test_the_best_is_named_in_a_file(tmp_path: Path) -> None:
    spec = _spec(tmp_path, checkpoint={"keep_best": "top1"})
    one = Decisions(spec, LADDER)
    one.update(2, 20, {"top1": 50.0})
    (path,) = small_checkpoints(tmp_path, 20)
    other = _again(one, spec)
    other.write_best()
    assert json.loads(best_path(tmp_path).read_text()) == {"step": 20, "measure": "top1", "value": 50.0}
    assert best_checkpoint(tmp_path) == other.best_checkpoint == path
    assert not other.update(3, 30, {"top1": 50.0}).is_best
    other.forget_best()
    other.write_best()
    assert not best_path(tmp_path).exists() and other.update(3, 30, {"top1": 0.0}).is_best


def test_another_measure_and_a_longer_run_begin_with_no_best() -> None:
    best = Decisions(_spec(checkpoint={"keep_best": "top1"}), LADDER)
    best.line = 10  # the checkpoint at which it was extended is not its best
    assert not best.update(1, 10, {"top1": 50.0}).is_best and best.update(2, 20, {"top1": 1.0}).is_best
    assert _again(best, _spec(checkpoint={"keep_best": "top5"})).best_step == 0


@pytest.mark.parametrize(
    ("measure", "epochs", "validations", "expected"),
    [
        # (epoch, value): the last one is where it stops
        ("top1", 2, [(1, 50.0), (2, 50.0), (3, 49.0)], (1, 50.0)),  # equal is no better
        ("top1", 2, [(1, 50.0), (2, 40.0), (3, 50.1), (4, 50.0), (5, 50.1)], (3, 50.1)),
        ("val_loss", 2, [(1, 1.5), (2, 1.6), (3, 1.4), (4, 1.4), (5, 9.0)], (3, 1.4)),
        ("val_loss", 1, [(1, 0.5), (2, math.nan)], (1, 0.5)),
        ("map", 3, [(1, None), (2, 10.0), (3, None), (4, None), (5, None)], (2, 10.0)),  # unknown is no better
        ("top1", 5, [(5, 10.0), (10, 20.0), (15, 20.0)], (10, 20.0)),  # a validation every 5 epochs
        ("top1", 6, [(5, 10.0), (10, 9.0), (15, 8.0)], (5, 10.0)),
        ("top1", 2, [(1, None), (2, None), (3, 0.0), (4, None), (5, None)], (3, 0.0)),  # counts from the first known
        ("val_loss", 2, [(1, math.nan), (2, None), (3, 7.0), (4, 7.5), (5, 8.0)], (3, 7.0)),
        ("map", 2, [(6, None), (7, None), (8, 9.0), (9, 8.0), (10, 7.0)], (8, 9.0)),  # after --more-epochs
    ],
)
def test_a_run_stops_n_epochs_after_its_best_validation(
    measure: str, epochs: int, validations: list[tuple[int, float | None]], expected: tuple[int, float]
) -> None:
    spec = _spec(schedule={"early_stop": EarlyStopSpec(measure=measure, epochs=epochs)})
    run, never = Decisions(spec, LADDER), Decisions(_spec(), LADDER)
    for epoch, value in validations:
        assert not run.is_stop_reached
        again = _again(run, spec)
        stops = run.update(epoch, epoch, {measure: value}).stops
        again.update(epoch, epoch, {measure: value})
        again.update(epoch, epoch, {measure: value})  # as a resumed run may
        assert again.state_dict() == run.state_dict() and again.is_stop_reached == stops
        assert not never.update(epoch, epoch, {measure: value}).stops
    assert run.is_stop_reached and (run.stop_best_epoch, run.stop_best_value) == expected


def test_the_last_epoch_is_not_stopped_after() -> None:
    run = Decisions(_spec(schedule={"epochs": 2, "early_stop": EarlyStopSpec(measure="top1", epochs=1)}), LADDER)
    assert not run.update(1, 1, {"top1": 50.0}).stops and not run.update(2, 2, {"top1": 40.0}).stops


def test_the_stop_begins_to_count_where_the_last_frozen_part_is_trained() -> None:
    """The best validation is that of epoch 2; the body is trained from epoch 4 on, a part never."""
    freeze = tuple(FreezeSpec(names=("a",), until_epoch=epoch) for epoch in (1, 4, None))
    stop = {"early_stop": EarlyStopSpec(measure="top1", epochs=2)}
    run = Decisions(_spec(schedule=stop, optimizer={"freeze": freeze}), LADDER)
    values = (50.0, 60.0, 40.0, 40.0, 40.0, 40.0)
    ended = [run.update(epoch, epoch, {"top1": value}).stops for epoch, value in enumerate(values, 1)]
    assert ended == [False] * 5 + [True] and (run.stop_best_epoch, run.stop_best_value) == (2, 60.0)


def _growing(**keys: Any) -> Spec:
    return _spec(parallel={"method": "averaging", "grow_batch": GrowBatchSpec.model_validate(keys)})


def _grown(accuracies: Sequence[float | None], **keys: Any) -> list[int | None]:
    run = Decisions(_growing(**keys), LADDER)
    decisions = [run.update(epoch, epoch, {"top1": accuracy}).growth for epoch, accuracy in enumerate(accuracies, 1)]
    return [decision and decision.after.clips_per_gpu for decision in decisions]


def test_growth_by_hand() -> None:
    # Below the best: grow. Equal: stay. The largest stays. The first never grows, even at 0.
    assert _grown([0.0, 10.0, 10.0, 9.0, 12.0, 11.9, 1.0]) == [4, 4, 4, 8, 8, 12, 12]
    assert _grown([10.0, None, 9.0, 9.5]) == [4, None, 8, 12]
    # A factor of 1.1: after 10 comes 10.9 < 11, then 12 >= 11.99 (the best is 10.9), then 13.1 < 13.2.
    assert _grown([10.0, 10.9, 12.0, 13.1], margin=1.1) == [4, 8, 8, 12]
    assert _grown([10.0, 9.5, 8.9], margin=0.9) == [4, 4, 8]
    assert _grown([50.0, 10.0, 60.0, 9.0, 0.0, 11.0], every=2) == [None, 4, None, 8, None, 8]


def test_the_batch_goes_on_from_a_checkpoint() -> None:
    spec = _growing()
    run = Decisions(spec, LADDER)
    for epoch, accuracy in ((1, 10.0), (2, 9.0)):
        run.update(epoch, epoch, {"top1": accuracy})
    again = _again(run, spec)
    assert again.batch_size == LADDER[1]
    assert again.update(2, 2, {"top1": 0.0}).growth is None  # it was taken in before
    growth = again.update(3, 3, {"top1": 9.5}).growth
    assert growth is not None
    assert (growth.before, growth.after, growth.accuracy, growth.best) == (LADDER[1], LADDER[2], 9.5, 10.0)
    assert Decisions(_spec(), LADDER[:1]).update(1, 1, {"top1": 0.0}).growth is None


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
    validated, expected = ({one["step"]: one["top1"] for one in records(folder, "eval")} for folder in (run, whole))
    assert validated == expected
    assert best_path(run).read_text() == best_path(whole).read_text()
    assert {path.name for path in find_checkpoints(run)} == {path.name for path in find_checkpoints(whole)}
    assert_bit_equal(final_state(whole), final_state(run))
    assert final_state(run)["best_top1"] == final_state(whole)["best_top1"]


def test_more_epochs_have_a_best_and_a_mean_of_their_own(write_spec: WriteSpec, tmp_path: Path) -> None:
    keys = _KEYS | {"schedule": {"epochs": 2}, "checkpoint": {"keep": 9, "keep_best": "top1"}}
    spec, run = write_spec("run", **keys), tmp_path / "runs/run"
    train(0, spec, "schedule.epochs=1", "schedule.warmup_epochs=0.5")
    assert json.loads(best_path(run).read_text())["step"] == 10
    train(0, run, "--more-epochs", "1", "evaluate.last_checkpoints=2")
    assert json.loads(best_path(run).read_text())["step"] == 20
    assert [row["step"] for row in json.loads((run / "eval.json").read_text())["checkpoints"]] == [20]
    assert final_state(run)["line"] == 10 and [step_of(path) for path in find_checkpoints(run)] == [10, 20]


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("evaluate.every_epochs=0", r"early_stop: must be null if evaluate\.every_epochs is 0"),
        ("schedule.early_stop.measure=top5", r"measure: must be top1 or val_loss with loss\.kind softmax, got top5"),
        ("loss.kind=binary", r"measure: must be map or val_loss with loss\.kind binary, got top1"),
    ],
)
def test_what_no_validation_can_decide_is_refused(write_spec: WriteSpec, word: str, wrong: str) -> None:
    schedule = {"early_stop": {"measure": "top1", "epochs": 2}}
    with pytest.raises(UserError, match=rf"schedule\.(early_stop\.)?{wrong}"):
        load_spec(write_spec(schedule=schedule, evaluate={"every_epochs": 1}), [word])


# The LR is next to nothing and no statistic moves, so that every validation is as good as the first one.
SECTIONS: dict[str, Any] = {
    "scale": {"gpus": 6, "clips_per_gpu": 2},
    "optimizer": {"base_lr": 1e-12, "freeze": ["*bn*", "*downsample.1*"]},
    "schedule": {"epochs": 6, "early_stop": {"measure": "top1", "epochs": 2}},
    "evaluate": {"every_epochs": 1, "last_checkpoints": 2},
    "checkpoint": {"every_epochs": 5},
}


@pytest.fixture(scope="module")
def stopped(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of at most 6 epochs of 6 steps, which stops after 3."""

    def make(folder: Path) -> None:
        out = train(0, spec_writer(motion_set, folder)("whole", **SECTIONS))
        best = "without improvement: the best top1, "
        assert f"epoch 3: stops early, 2 epochs {best}" in out and "whole: done in" in out

    return made_once(tmp_path_factory, "early_stopped", make) / "runs/whole"


def test_a_run_that_stops_early_is_a_finished_run(stopped: Path) -> None:
    assert steps_of(stopped) == list(range(1, 19))
    (record,) = records(stopped, "early_stop")
    first = records(stopped, "eval")[0]["top1"]
    about = {"epoch": 3, "step": 18, "measure": "top1", "best": first, "best_epoch": 1}
    assert {key: record[key] for key in about} == about
    # each validated epoch has a checkpoint, and the last two are in the mean
    assert [step_of(path) for path in find_checkpoints(stopped)] == [6, 12, 18]
    assert [row["step"] for row in json.loads((stopped / "eval.json").read_text())["checkpoints"]] == [12, 18]
    run = RunRecord(stopped)
    assert run.is_done and run.log.early_stop is not None
    note = f"Stopped early after epoch 3, step 18 of at most 36: no better top1 in 2 epochs than the {first:.4g} of "
    assert f"{note}epoch 1" in notes_of(run) and not any("Unfinished" in one for one in notes_of(run))


def test_checkpoints_of_validated_epochs_are_due(stopped: Path) -> None:
    spec = load_spec(stopped / "spec.yaml", ["evaluate.every_epochs=4"])
    assert [epoch for epoch in range(1, 7) if is_due(spec, epoch)] == [4, 5, 6]
    without = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"early_stop": None})})
    assert [epoch for epoch in range(1, 7) if is_due(without, epoch)] == [5, 6]


@needs_ranks
def test_a_run_killed_in_the_validation_that_ends_it_stops_there_on_other_ranks(stopped: Path) -> None:
    """Nothing is trained again. From an earlier checkpoint: "early stop, keep best" of test_golden_runs.py."""
    again = rewound(stopped, "again", 24)
    log = (again / "metrics.jsonl").read_text()
    (again / "metrics.jsonl").write_text(log[: log.rindex('{"kind": "eval"')])
    (again / "eval.json").unlink()
    (again / "checkpoints/step_00000018.measures.json").unlink()
    out = train(2, again)
    assert "step_00000018.pt" in out and "epoch 3: stops early" in out
    assert steps_of(again) == list(range(1, 19))
    assert records(again, "early_stop")[-1]["step"] == 18 and RunRecord(again).is_done
    states = [load_any(run / "checkpoints/step_00000018.pt") for run in (stopped, again)]
    assert states[0]["early_stop"] == states[1]["early_stop"]


def test_more_epochs_continue_from_the_stop_and_may_stop_again(stopped: Path) -> None:
    """1 more than the 3 that were trained; then 5 more, of which 2 are trained: patience begins at the 4th."""
    run = rewound(stopped, "more", 99)
    assert "more epochs: 4 instead of 3; LR continues at" in train(0, run, "--more-epochs", "1")
    assert steps_of(run) == list(range(1, 25)) and (run / "evals/epochs-3/eval.json").exists()
    found = RunRecord(run)
    assert found.is_done and found.log.early_stop is None
    assert [row["step"] for row in json.loads((run / "eval.json").read_text())["checkpoints"]] == [24]
    out = train(0, run, "--more-epochs", "5")
    assert "more epochs: 9 instead of 4" in out and "epoch 6: stops early, 2 epochs without improvement" in out
    assert "is that of epoch 4" in out and steps_of(run) == list(range(1, 37))
    # The result is there, so that the same command adds its epochs to the 6 that were trained.
    status, out = command(0, "train", str(run), "--more-epochs", "5", "--trace", "99:99")
    assert status == 2 and "at most 100 of the steps 1 to 66" in out


def test_more_epochs_up_to_the_length_before_the_stop_are_trained(stopped: Path) -> None:
    """3 more than the 3 that were trained are the 6 of the spec; also after a kill before the first checkpoint."""
    run = rewound(stopped, "same", 99)
    out = train(0, run, "--more-epochs", "3")
    assert "more epochs: 6 instead of 3" in out and "epoch 5: stops early" in out and "is that of epoch 3" in out
    assert steps_of(run) == list(range(1, 31))
    for later in [path for step in (24, 30) for path in (run / "checkpoints").glob(f"step_{step:08d}*")]:
        later.unlink()
    assert "more epochs: 6 instead of 3" in train(0, run) and steps_of(run)[30:] == list(range(19, 31))
    assert "more epochs:" not in train(0, run) and len(steps_of(run)) == 42  # it has stopped, and stays so


def test_the_validation_loss_decides_the_less_the_better(write_spec: WriteSpec, tmp_path: Path) -> None:
    keys = {**SECTIONS, "model": {}, "optimizer": {"base_lr": 0.1}}
    train(0, write_spec(**keys | {"schedule": {"epochs": 9, "early_stop": {"measure": "val_loss", "epochs": 1}}}))
    losses = [record["val_loss"] for record in records(tmp_path / "runs/run", "eval")]
    assert 1 < len(losses) < 9 and losses[-1] >= losses[-2]
    assert all(after < before for before, after in pairwise(losses[:-1]))
