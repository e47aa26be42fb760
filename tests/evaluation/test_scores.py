"""Accuracies worked out by hand, average precision against scikit-learn, and the file of scores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest.clip import Clip
from summit_train.data.video.region import Region
from summit_train.data.video.span import Span
from summit_train.evaluation.scores import Scores, average_precisions, prediction_names


def _scores(rows: list[list[float]], labels: list[int]) -> Scores:
    return Scores(np.arange(len(labels)), np.array(labels), np.array(rows), np.isfinite(rows).all(1))


def test_top_k_by_hand() -> None:
    scores = _scores([[3, 2, 1], [1, 3, 2], [1, 3, 2], [1, 2, 3]], [0, 0, 1, 1])
    assert scores.right(1).tolist() == [True, False, True, False]
    assert [scores.top(k) for k in (1, 2, 3)] == [50.0, 75.0, 100.0]
    assert _scores([[1, 1, 1, 1]] * 4, [0, 0, 0, 3]).top(1) == 75.0, "class 0 is first of equal ones"


def test_a_video_that_was_not_read_is_wrong_whatever_its_scores() -> None:
    scores = Scores(np.arange(2), np.array([0, 0]), np.array([[2.0, 1], [2, 1]]), np.array([True, False]))
    assert scores.num_bad == 1 and scores.right(1).tolist() == [True, False]
    scores = _scores([[np.nan, np.nan], [2, 1]], [0, 0])
    assert scores.num_bad == 1 and scores.top(1) == scores.top(2) == 50.0


def test_saved_scores_open_without_pickle(tmp_path: Path) -> None:
    clips = [Clip(os.fsdecode(b"\xff, b.mp4")), Clip("a.mp4", Span(3, 7), True, Region(1, 2, 30, 4))]
    _scores([[1, 2], [4, 3]], [1, 1]).save(tmp_path / "predictions" / "a.npz", clips, ("x", "y z"))
    with np.load(tmp_path / "predictions" / "a.npz", allow_pickle=False) as saved:
        found = {name: column.tolist() for name, column in saved.items()}
    assert found == {
        "video": [0, 1], "label": [1, 1], "scores": [[1, 2], [4, 3]], "is_read": [True, True],
        "path": [clips[0].path, "a.mp4"], "start_frame": [0, 3], "end_frame": [-1, 7], "reversed": [False, True],
        "left": [0, 1], "top": [0, 2], "width": [0, 30], "height": [0, 4], "class_names": ["x", "y z"],
    }  # fmt: skip


def test_checkpoints_of_one_name_have_names_of_their_own() -> None:
    assert prediction_names([Path("a/x.pt"), Path("a/y.pt"), Path("b/x.pt")]) == ["x_1", "y", "x_2"]


@pytest.mark.parametrize(
    ("positive", "scores", "expected"),
    [
        ([[1, 1], [0, 1], [1, 0], [0, 0]], [[0.9, 5], [0.8, 5], [0.7, 5], [0.6, 5]], [(1 + 2 / 3) / 2, 1 / 2]),
        ([[1], [0], [1], [0]], [[3], [1], [1], [1]], [(1 + 2 / 4) / 2]),  # a tie is one threshold
        ([[1], [0], [1]], [[2], [1], [np.nan]], [1 / 2]),  # the unreadable video is never found
        ([[1], [0], [1]], [[np.nan]] * 3, [0]),
    ],
)
def test_average_precision_by_hand(positive: list[list[int]], scores: list[list[float]], expected: list[float]) -> None:
    found = average_precisions(np.array(positive, bool), np.array(scores, float))
    assert found == pytest.approx(expected, rel=1e-15)


def test_average_precision_is_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    draw, largest = np.random.default_rng(0), 0.0
    for _ in range(100):
        shape = (int(draw.integers(2, 60)), int(draw.integers(1, 6)))
        positive = draw.random(shape) < draw.random()
        positive[0] = True
        scores = draw.integers(0, draw.integers(2, 40), shape).astype(float)  # with ties
        wanted = sklearn.average_precision_score(positive, scores, average="macro")
        largest = max(largest, abs(average_precisions(positive, scores).mean() - wanted))
    assert largest < 1e-14
