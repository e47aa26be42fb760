"""A network that does not learn is named once; one that cannot solve its task, or has little to predict, is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.evaluation.scores import Scores
from summit_train.plan import make_plan
from summit_train.report.records import RunRecord
from summit_train.report.tables import notes_of
from summit_train.spec import spec_from_values
from summit_train.training.health import Health
from tests.conftest import WriteSpec
from tests.runs import records
from tests.worlds import train


def _health(epochs: int = 30, loss: dict[str, Any] | None = None) -> Health:
    """10 steps an epoch, 3 epochs of warm-up, 4 classes."""
    values = {
        "name": "a",
        "model": {"arch": "tsn", "backbone": "resnet18", "width": 0.125, "num_classes": 4},
        "data": {"train": "train.csv", "val": "val.csv"},
        "scale": {"gpus": 1, "clips_per_gpu": 8},
        "schedule": {"epochs": epochs, "warmup_epochs": 3},
        "loss": loss or {},
    }
    spec = spec_from_values(values, "here")
    return Health(spec, make_plan(spec, 1, 80))


def _said(losses: Sequence[float], **keys: Any) -> list[int]:
    health = _health(**keys)
    return [step for step, loss in enumerate(losses, start=1) if health.of_step(step, loss)]


def test_a_loss_that_stays_that_of_a_guess_is_named_once_after_the_warm_up() -> None:
    """The mean of steps 31 to 80, after the warm-up: within 2 % of ln 4, or not."""
    guess = math.log(4)
    assert _said([guess] * 300) == [80]
    assert _said([guess * (1.0 + 0.1 * (-1) ** step) for step in range(300)]) == [80]
    assert _said([*[5.0] * 30, *[1.019 * guess] * 50]) == [80]
    assert _said([*[guess] * 30, *[0.97 * guess] * 270]) == []
    assert _said([*[guess] * 30, *[1.5] * 30, *[guess] * 240]) == []  # TSN on the motion set comes back to it
    assert _said([math.nan] * 300) == [] and _said([guess] * 39, epochs=5) == []
    assert _said([guess] * 300, loss={"kind": "binary"}) == []
    assert _said([guess] * 300, loss={"label_smoothing": 0.1}) == [80]
    health = _health()
    *_, message = (health.of_step(step, guess) for step in range(1, 81))
    assert "steps 31 to 80 is 1.386, that of a guess, ln(4) = 1.386; usual causes" in str(message)


def _scores(labels: Sequence[int], predicted: Sequence[int], classes: int = 4) -> Scores:
    rows = np.eye(classes, dtype=np.float32)[list(predicted)]
    return Scores(np.arange(len(labels)), np.array(labels), rows, np.ones(len(labels), bool))


def _validated(found: Scores, steps: Sequence[int] = (100, 150, 200)) -> list[int]:
    health = _health()
    return [step for step in steps if health.of_validation(step, found, "abcd")]


def test_one_class_for_all_is_named_once() -> None:
    dead = _scores([0, 1, 2, 3] * 15, [2] * 60)
    assert _validated(dead) == [150] and _validated(dead, [300]) == [300]
    assert _validated(dead, [10, 20, 90]) == [] and _validated(dead, [90, 100, 110]) == [110]  # early in the run
    health = _health()
    health.of_validation(150, dead, "abcd")
    message = str(health.of_validation(200, dead, "abcd"))
    assert "100.0 % of the validation videos are predicted as 'c'; 25.0 % belong to it" in message
    assert "optimizer.base_lr" in message and "model.freeze_*" in message


@pytest.mark.parametrize(
    "found",
    [
        _scores([0, 1, 2, 3] * 15, [0, 1, 3, 3] * 15),
        _scores([0, 1, 2, 3] * 15, [2] * 58 + [1] * 2),  # 96.7 %
        _scores([0] * 90 + [1] * 10, [0] * 95 + [1] * 5),
        _scores([0] * 90 + [1] * 10, [0] * 100),
        _scores([0, 1, 2, 3] * 4, [2] * 16),
        Scores(np.arange(60), np.ones((60, 4), bool), np.zeros((60, 4)), np.ones(60, bool)),
    ],
    ids=["spread", "almost", "a common class", "a common class for all", "few videos", "several labels"],
)
def test_no_false_alarm(found: Scores) -> None:
    assert _validated(found) == []


def test_a_head_that_leaps_is_named_in_log_and_report(write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    usual = {"evaluate": {"every_epochs": 1}, "data": {"val": str(motion_set / "train.csv")}}
    said, run = train(0, write_spec(optimizer={"head_lr_factor": 30_000.0}, **usual)), tmp_path / "runs/run"
    (warning,) = records(run, "warning")
    assert warning["step"] == 20 and "of the validation videos are predicted as" in warning["text"]
    assert f"WARNING: {warning['text']}" in said
    assert f"After step 20: {warning['text']}" in notes_of(RunRecord(run))
