"""The batch that grows: Algorithm 1's decisions by hand, the ladder of the paper, and runs whose batch grows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.batches.order import Order
from summit_train.plan import Rung, make_plan
from summit_train.spec import Spec, spec_from_values
from summit_train.spec.optimizer import GrowBatchSpec
from summit_train.training.averaging import GrowingBatch
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state, records
from tests.worlds import train

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
    plan = make_plan(_spec(), 16, UCF101)
    assert [rung.clips_per_gpu for rung in plan.ladder] == [32, 64, 128, 256, 512, 576]
    assert [rung.steps_per_epoch for rung in plan.ladder] == [18, 9, 4, 2, 1, 1]
    assert [rung.global_batch for rung in plan.ladder] == [16 * rung.clips_per_gpu for rung in plan.ladder]
    assert [rung.clips_per_gpu for rung in make_plan(_spec(64), 16, UCF101).ladder] == [64, 128, 256, 512, 576]
    assert [rung.clips_per_gpu for rung in make_plan(_spec(factor=4, max=300), 16, UCF101).ladder] == [32, 128, 300]
    assert plan.values()["ladder"][1] == {"clips_per_gpu": 64, "global_batch": 1024, "steps_per_epoch": 9}


def test_a_batch_beyond_the_share_is_refused() -> None:
    make_plan(_spec(max=596), 16, UCF101)
    with pytest.raises(UserError, match=r"max: 597 clips do not fit a learner's epoch: 16 learners have 596"):
        make_plan(_spec(max=597), 16, UCF101)


LADDER = [Rung(size, 2 * size, 24 // size) for size in (4, 8, 12)]


def _grown(accuracies: Sequence[float | None], **keys: Any) -> list[int | None]:
    batch = GrowingBatch(GrowBatchSpec.model_validate(keys), LADDER)
    decisions = [batch.decide(accuracy) for accuracy in accuracies]
    return [decision and decision[1].clips_per_gpu for decision in decisions]


def test_decisions_by_hand() -> None:
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
    one, other = (GrowingBatch(GrowBatchSpec(), LADDER) for _ in range(2))
    for accuracy in (10.0, 9.0):
        one.decide(accuracy)
    other.load_state_dict(one.state_dict())
    assert other.rung == LADDER[1] and other.lacks(3) and not other.lacks(2)
    assert other.decide(9.5) == (10.0, LADDER[2])
    assert not GrowingBatch(None, LADDER[:1]).lacks(3)


def test_the_steps_of_a_grown_batch_have_the_last_numbers_of_the_epoch() -> None:
    """6 numbers an epoch, 2 steps: 4, 5, 10, 11, with the clips of steps 0 to 3 of an order that has 2 an epoch."""
    grown, plain = Order(24, 7, 2, 6, 2, numbers_per_epoch=6), Order(24, 7, 2, 6, 2)
    found = list(grown.micro_batches(0, 1, range(12)))
    wanted = list(plain.micro_batches(0, 1, range(4)))
    assert [key[0] for key in found] == [4, 4, 5, 5, 10, 10, 11, 11]
    for (_, *mine, clips), (_, *theirs, others) in zip(found, wanted, strict=True):
        assert mine == theirs and np.array_equal(clips, others)
    assert [key[0] for key in grown.micro_batches(1, 2, range(5, 9))] == [5]


def test_the_learning_rate_is_read_by_the_progress_of_the_epoch() -> None:
    """18 numbers an epoch; 4 steps of the third rung are read at 0, 4.5, 9 and 13.5 of them."""
    plan = make_plan(_spec(), 16, UCF101)
    grown = plan.ladder[2]
    assert plan.first_step(3, grown) == 4 * 18 - 4 and plan.first_step(3, plan.ladder[0]) == 54
    rates = [plan.learning_rate(step, grown) for step in range(4 * 18 - 4, 4 * 18)]
    assert rates == [plan.schedule.learning_rate(54 + place) for place in (0, 4.5, 9, 13.5)]
    assert plan.learning_rate(60, plan.ladder[0]) == plan.learning_rate(60)


@pytest.fixture
def growing(write_spec: WriteSpec) -> Path:
    """4 learners of 2 clips with 20 each: 10, 5, 2, 1, 1 steps an epoch. With this margin every decision but the first
    grows the batch."""
    parallel = {"method": "averaging", "period": 4, "grow_batch": {"margin": 1000.0}}
    return write_spec(
        parallel=parallel, schedule={"epochs": 4}, evaluate={"every_epochs": 1},
        checkpoint={"keep": 9, "keep_best": "top1"},
        precision="fp64", optimizer={"name": "adam", "base_lr": 1e-3, "lr_scaling": "none"},
    )  # fmt: skip


def test_a_run_whose_batch_grows_keeps_it_when_it_goes_on(growing: Path, tmp_path: Path) -> None:
    """Epochs of 10, 10, 5 and 2 steps; then once more from the end of epoch 2, whose validation decides on epoch 3."""
    output = train(0, growing)
    run = tmp_path / "runs/run"
    assert "epoch 2: batch of a learner grows from 2 clips to 4, 5 steps an epoch" in output
    steps = [record["step"] for record in records(run, "step")]
    assert steps == [*range(1, 21), *range(26, 31), 39, 40]
    keys = ("epoch", "clips_per_gpu", "global_batch")
    assert [tuple(r[key] for key in keys) for r in records(run, "batch")] == [(1, 2, 8), (2, 4, 16), (3, 8, 32)]
    accuracies = [record["top1"] for record in records(run, "eval")]
    assert [record["accuracy"] for record in records(run, "batch")] == accuracies[:3]
    assert [record["step"] for record in records(run, "average")] == [4, 8, 10, 14, 18, 20, 29, 30, 40]
    whole = final_state(run)
    best_accuracy = max(record["accuracy"] for record in records(run, "batch"))
    assert whole["growth"] == {"clips_per_gpu": 8, "best": best_accuracy, "validations": 3}
    for later in (*run.glob("checkpoints/step_00000040*"), *run.glob("checkpoints/step_00000030*")):
        later.unlink()
    best = (run / "checkpoints/best.json").read_text()
    shutil.copytree(run, tmp_path / "kept")
    train(0, growing)
    assert (run / "checkpoints/best.json").read_text() == best
    assert [record["step"] for record in records(run, "step")][-7:] == [*range(26, 31), 39, 40]
    assert_bit_equal(whole, final_state(run))
