"""The batch that grows: the ladder of the paper, the numbers of its steps, and runs whose batch grows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.batches.order import Order
from summit_train.plan import make_plan
from summit_train.spec import Spec, spec_from_values
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
    assert [size.clips_per_gpu for size in plan.ladder] == [32, 64, 128, 256, 512, 576]
    assert [size.steps_per_epoch for size in plan.ladder] == [18, 9, 4, 2, 1, 1]
    assert [size.global_batch for size in plan.ladder] == [16 * size.clips_per_gpu for size in plan.ladder]
    assert [size.clips_per_gpu for size in make_plan(_spec(64), 16, UCF101).ladder] == [64, 128, 256, 512, 576]
    assert [size.clips_per_gpu for size in make_plan(_spec(factor=4, max=300), 16, UCF101).ladder] == [32, 128, 300]
    assert plan.values()["ladder"][1] == {"clips_per_gpu": 64, "global_batch": 1024, "steps_per_epoch": 9}


def test_a_batch_beyond_the_share_is_refused() -> None:
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
    (run / "metrics.jsonl").unlink()  # no decision is read from it
    best = (run / "checkpoints/best.json").read_text()
    shutil.copytree(run, tmp_path / "kept")
    train(0, growing)
    assert (run / "checkpoints/best.json").read_text() == best
    assert [record["step"] for record in records(run, "step")][-7:] == [*range(26, 31), 39, 40]
    assert_bit_equal(whole, final_state(run))
