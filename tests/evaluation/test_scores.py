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
    assert scores.top(1) == 50.0
    assert scores.top(2) == 75.0
    assert scores.top(3) == 100.0


def test_equal_scores_are_ordered_by_class() -> None:
    """All scores equal: class 0 is the answer, so 1 of 4 is right and not 4 of 4 or none."""
    assert _scores([[1, 1, 1, 1]] * 4, [0, 1, 2, 3]).top(1) == 25.0


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
        "video": [0, 1],
        "label": [1, 1],
        "scores": [[1, 2], [4, 3]],
        "is_read": [True, True],
        "path": [clips[0].path, "a.mp4"],
        "start_frame": [0, 3],
        "end_frame": [-1, 7],
        "reversed": [False, True],
        "left": [0, 1],
        "top": [0, 2],
        "width": [0, 30],
        "height": [0, 4],
        "class_names": ["x", "y z"],
    }


def test_checkpoints_of_one_name_have_names_of_their_own() -> None:
    assert prediction_names([Path("a/x.pt"), Path("a/y.pt"), Path("b/x.pt")]) == ["x_1", "y", "x_2"]


def test_average_precision_by_hand() -> None:
    """Positives at ranks 1 and 3 of 4: (1 + 2/3) / 2. Of four that share one score, two are positive: 1/2."""
    positive = np.array([[1, 1], [0, 1], [1, 0], [0, 0]], bool)
    scores = np.array([[0.9, 5.0], [0.8, 5.0], [0.7, 5.0], [0.6, 5.0]])
    assert average_precisions(positive, scores) == pytest.approx([5 / 6, 1 / 2], rel=1e-15)


def test_a_tie_counts_as_one_threshold() -> None:
    """A positive alone on top, then a tie of a positive and two others: 1/2 * 1 + 1/2 * 2/4."""
    positive, scores = np.array([[1], [0], [1], [0]], bool), np.array([[3.0], [1], [1], [1]])
    assert average_precisions(positive, scores) == pytest.approx([3 / 4], rel=1e-15)


def test_a_video_without_scores_is_never_found() -> None:
    """Two positives, one of them unreadable: the other one, on top, gives 1/2. With none readable there is nothing."""
    positive, scores = np.array([[1], [0], [1]], bool), np.array([[2.0], [1.0], [np.nan]])
    assert average_precisions(positive, scores).tolist() == [0.5]
    assert average_precisions(positive, np.full((3, 1), np.nan)).tolist() == [0.0]


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
