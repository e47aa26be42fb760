"""The loss by hand: kinds, weights, smoothing, and targets of each form."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest
from summit_train.evaluation.scores import Scores
from summit_train.report.overlay import RunCurves, overlay
from summit_train.report.page import render
from summit_train.report.records import RunRecord
from summit_train.spec import load_spec
from summit_train.training.loss import Loss, build_loss, num_correct, one_hot
from tests.conftest import WriteSpec
from tests.worlds import train

LOGITS = torch.tensor([[0.0, log(2), log(3)], [0.0, 0.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([2, 0])
SEVERAL = torch.tensor([[True, False, True], [False, True, False]])
WEIGHTS = torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64)


def _value(loss: Loss, targets: torch.Tensor) -> float:
    return loss(LOGITS, targets).item()


def test_weights_multiply_the_loss_of_their_class_and_the_mean_is_over_the_clips() -> None:
    """Not over the clips' weights, by which torch divides."""
    assert _value(Loss(), LABELS) == pytest.approx((log(2) + log(3)) / 2, rel=1e-14)
    assert _value(Loss(class_weights=WEIGHTS), LABELS) == pytest.approx((2 * log(2) + 4 * log(3)) / 2, rel=1e-14)
    # With smoothing 0.3 a class has 0.1 of another one's clips.
    first = 0.8 * 2 * log(2) + 0.1 * (4 * log(6) + 1 * log(3))
    second = (0.8 * 4 + 0.1 * 1 + 0.1 * 2) * log(3)
    assert _value(Loss("softmax", 0.3, WEIGHTS), LABELS) == pytest.approx((first + second) / 2, rel=1e-14)


def test_the_binary_loss_is_the_mean_over_classes_and_weights_those_that_are_there() -> None:
    """Logistic functions of 0, log 2, log 3: 1/2, 2/3, 3/4."""
    first = -log(1 / 2) - log(1 / 3) - log(3 / 4)
    assert _value(Loss("binary"), SEVERAL) == pytest.approx((first + 3 * log(2)) / 6, rel=1e-14)
    weights = torch.tensor([4.0, 3.0, 2.0], dtype=torch.float64)
    first = -4 * log(1 / 2) - log(1 / 3) - 2 * log(3 / 4)
    assert _value(Loss("binary", 0.0, weights), SEVERAL) == pytest.approx((first + (1 + 3 + 1) * log(2)) / 6, rel=1e-14)
    # With smoothing 0.2 a yes is 0.9 and a no 0.1.
    first = log(2) - 0.1 * log(2 / 3) - 0.9 * log(1 / 3) - 0.9 * log(3 / 4) - 0.1 * log(1 / 4)
    assert _value(Loss("binary", 0.2), SEVERAL) == pytest.approx((first + 3 * log(2)) / 6, rel=1e-14)


def test_targets_may_be_numbers_of_classes_or_parts_of_them() -> None:
    assert one_hot(SEVERAL, LOGITS).tolist() == [[1, 0, 1], [0, 1, 0]]
    assert one_hot(LABELS, LOGITS).tolist() == [[0, 0, 1], [1, 0, 0]] and one_hot(LABELS, LOGITS).dtype == LOGITS.dtype
    for kind, smoothing, weights in itertools.product(("softmax", "binary"), (0.0, 0.1), (None, WEIGHTS)):
        loss = Loss(kind, smoothing, weights)
        assert _value(loss, one_hot(LABELS, LOGITS)) == pytest.approx(_value(loss, LABELS), rel=1e-14)
    mixed = torch.tensor([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]], dtype=torch.float64)
    parts = 0.25 * log(6) + 0.75 * log(2) + log(3)
    assert _value(Loss(), mixed) == pytest.approx(parts / 2, rel=1e-14)


def test_a_clip_is_right_if_its_best_class_is_one_of_its_own() -> None:
    logits = torch.tensor([[1.0, 2, 3], [3, 2, 1], [1, 2, 3], [1, 2, 3]])
    assert num_correct(logits, torch.tensor([2, 0, 1, 2])).item() == 3
    several = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert num_correct(logits, several).item() == 2  # of no class: never
    mixed = torch.tensor([[0.0, 0.4, 0.6], [0.4, 0.6, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    assert num_correct(logits, mixed).item() == 3  # the class of the larger part


def test_balanced_weights_and_weights_from_a_file(write_spec: WriteSpec, tmp_path: Path) -> None:
    """6, 3 and 0 of 9 clips, and a class that the list does not know: 9 / (2 * 6), 9 / (2 * 3), 1, 1."""
    path = write_spec(loss={"class_weights": "balanced"}, precision="fp64")
    loss = build_loss(load_spec(path), [6, 3, 0])
    assert loss.class_weights is not None and loss.class_weights.dtype == torch.float64
    assert loss.class_weights.tolist() == [0.75, 1.5, 1.0, 1.0]
    assert build_loss(load_spec(path)).class_weights.tolist() == [1.0] * 4  # type: ignore[union-attr]
    (tmp_path / "weights.txt").write_text("1\n2.5\n0.5\n4\n")
    spec = load_spec(path, [f"loss.class_weights={tmp_path / 'weights.txt'}"])
    (tmp_path / "weights.txt").unlink()  # the spec holds the numbers
    assert build_loss(spec).class_weights.tolist() == [1.0, 2.5, 0.5, 4.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 2 3\n", "loss.class_weights: must be one number for each of the 4 classes, got 3"),
        ("1 2 3 nan\n", "each weight must be a number above 0 and at most 1,000,000"),
        ("1 2 3 0\n", "each weight must be a number above 0"),
        ("a 2 3 0\n", "could not convert string to float: 'a'"),
    ],
)
def test_a_bad_file_of_weights_is_refused(write_spec: WriteSpec, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "weights.txt").write_text(content)
    spec = write_spec()
    with pytest.raises(UserError, match=message) as raised:
        load_spec(spec, [f"loss.class_weights={tmp_path / 'weights.txt'}"])
    assert len(str(raised.value).splitlines()) == 1
    for words in ("/nowhere", "/dev/null", "3", "[true, 1, 1, 1]"):
        with pytest.raises(UserError, match="must be balanced, a list, or a file with one number per line"):
            load_spec(spec, [f"loss.class_weights={words}"])


def test_the_loss_of_a_validation_is_that_of_training_over_the_videos_that_were_read() -> None:
    """Of three videos the last was not read. Softmax: ln(1 + 1/3) and ln 4, the second class weighs twice."""
    rows = np.array([[log(3), 0.0], [log(3), 0.0], [math.nan, math.nan]], np.float32)
    scores = Scores(np.arange(3), np.array([0, 1, 0]), rows, np.array([True, True, False]))
    wanted = (log(4 / 3) + 2 * log(4)) / 2
    assert Loss(class_weights=torch.tensor([1.0, 2.0])).of_scores(scores) == pytest.approx(wanted, rel=1e-7)
    assert Loss().of_scores(replace(scores, is_read=np.zeros(3, bool))) is None
    several = replace(scores, labels=np.array([[1, 0], [0, 0], [1, 1]], bool))  # BCE: ln 4/3 and ln 2; ln 4 and ln 2
    wanted = (log(4 / 3) + log(4) + 2 * log(2)) / 4
    assert Loss("binary").of_scores(several) == pytest.approx(wanted, rel=1e-7)
    many = Scores(np.arange(3000), np.arange(3000) % 4, np.zeros((3000, 4), np.float32), np.ones(3000, bool))
    assert Loss().of_scores(many) == pytest.approx(log(4), rel=1e-12)


def test_a_list_without_a_positive_scores_dashes(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a detector's list whose boxes are all ignored: lists of labels without any are refused, but not here.

    Clips of training have two labels or none.
    """
    monkeypatch.setattr(Manifest, "check_labels", lambda *_: None)
    lists = {name: str(tmp_path / f"{name}.csv") for name in ("train", "val")}
    for name, path in lists.items():
        head, *rows = (line.split(",") for line in (motion_set / f"{name}.csv").read_text().splitlines())
        for number, row in enumerate(rows):
            row[head.index("label")] = f"{number % 2};{2 + number % 2}" if name == "train" and number % 9 else ";"
        Path(path).write_text("".join(",".join(row) + "\n" for row in (head, *rows)))
    (tmp_path / "classes.txt").write_text((motion_set / "classes.txt").read_text())
    spec = write_spec(
        data=lists | {"root": str(motion_set), "balance": "classes"},
        loss={"kind": "binary", "class_weights": "balanced"},
        evaluate={"every_epochs": 1, "last_checkpoints": 2},
        checkpoint={"keep_best": "map"},
    )
    run, output = tmp_path / "runs/run", train(0, spec)
    assert "mAP \N{EM DASH}: mean over 2 checkpoints" in output
    assert "mAP is unknown; nothing is decided by it" in output
    result = json.loads((run / "eval.json").read_text())
    assert [result[f"map_{what}"] for what in ("mean", "std", "last", "best")] == [None] * 4
    assert not (run / "checkpoints/best.json").exists()
    found = RunRecord(run)
    assert found.is_done and found.notes == [] and "\N{EM DASH}" in render([found])
    assert overlay({"run": RunCurves.of(found)}) is not None
