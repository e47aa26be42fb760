"""The decisions of validations by hand, and their state: the best checkpoint, the early stop, Algorithm 1 of AAVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.run_folder import best_checkpoint, best_path
from summit_train.plan import BatchSize
from summit_train.spec import Spec, smallest_spec
from summit_train.spec.keys import EarlyStopSpec, FreezeSpec, GrowBatchSpec
from summit_train.training.decisions import Decisions
from tests.runs import small_checkpoints

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


def test_the_checkpoint_at_which_a_line_begins_is_not_its_best() -> None:
    best = Decisions(_spec(checkpoint={"keep_best": "top1"}), LADDER)
    best.line = 10
    assert not best.update(1, 10, {"top1": 50.0}).is_best and best.update(2, 20, {"top1": 1.0}).is_best


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


def test_another_measure_begins_with_no_best() -> None:
    one = Decisions(_spec(checkpoint={"keep_best": "top1"}), LADDER)
    one.update(1, 10, {"top1": 50.0})
    assert _again(one, _spec(checkpoint={"keep_best": "top5"})).best_step == 0


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
    """Below the best: grow. Equal: stay. The largest stays. The first never grows, even at 0."""
    assert _grown([0.0, 10.0, 10.0, 9.0, 12.0, 11.9, 1.0]) == [4, 4, 4, 8, 8, 12, 12]


def test_an_unknown_accuracy_decides_nothing() -> None:
    assert _grown([10.0, None, 9.0, 9.5]) == [4, None, 8, 12]


def test_a_margin_demands_an_improvement_by_that_factor() -> None:
    """1.1: after 10 comes 10.9 < 11, then 12 >= 11.99 (the best is 10.9), then 13.1 < 13.2."""
    assert _grown([10.0, 10.9, 12.0, 13.1], margin=1.1) == [4, 8, 8, 12]
    assert _grown([10.0, 9.5, 8.9], margin=0.9) == [4, 4, 8]


def test_every_second_validation_decides_and_the_others_are_not_looked_at() -> None:
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
