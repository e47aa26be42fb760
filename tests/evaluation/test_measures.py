"""What runs are measured by, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from summit_train.evaluation.measures import MEASURES, interval, left_out, measures_of, say_certainty, say_left_out
from summit_train.evaluation.scores import Scores
from summit_train.spec import MAIN_MEASURES


def _scores(labels: list[list[int]], rows: list[list[float]], is_read: list[bool] | None = None) -> Scores:
    read = np.ones(len(rows), bool) if is_read is None else np.array(is_read)
    return Scores(np.arange(len(rows)), np.array(labels, bool), np.array(rows), read)


def test_a_video_that_could_not_be_read_counts_as_not_found() -> None:
    """Two positives, one of them unreadable: the other one, on top, gives 1/2."""
    found = _scores([[1], [0], [1]], [[2.0], [1.0], [3.0]], [True, True, False])
    assert measures_of("binary").values(found) == {"map": 50.0}


def test_each_class_is_recorded_rounded_and_none_of_too_many() -> None:
    """Two of three videos of class 0 are right, none of class 1, and class 2 has no video."""
    rows = np.array([[2.0, 1, 0], [1, 2, 0], [2, 1, 0], [2, 1, 0]])
    found = Scores(np.arange(4), np.array([0, 0, 0, 1]), rows, np.ones(4, bool))
    assert measures_of("softmax", 3).by_class(found) == [66.67, 0.0, None]
    assert measures_of("softmax", 1000).by_class(found) and measures_of("softmax", 1001).by_class(found) == []


def test_the_mean_leaves_out_and_names_classes_without_a_positive() -> None:
    scores = _scores([[1, 0, 0], [0, 1, 0]], [[2.0, 0.0, 9.0], [3.0, 1.0, 9.0]])
    known = measures_of("binary", 3)
    assert known.values(scores) == {"map": 75.0} and known.main.key == "map"
    assert known.main.of_class(scores).tolist()[:2] == [50.0, 100.0] and np.isnan(known.main.of_class(scores)[2])
    assert left_out(scores, ["a", "b"]) == ["2"] and left_out(scores, ["a", "b", "c"]) == ["c"]
    assert say_left_out(["c", "d"]) == "mAP leaves out 2 without ground truth: c, d" and say_left_out([]) == ""


def test_a_run_of_one_class_a_video_has_top_1_and_top_5() -> None:
    rows = np.array([[3.0, 2, 1], [3, 2, 1], [1, 2, 3]])
    scores = Scores(np.arange(3), np.array([0, 1, 1]), rows, np.array([True, True, True]))
    found = measures_of("softmax", 3)
    assert found.values(scores) == {"top1": pytest.approx(100 / 3), "top5": 100.0} and left_out(scores, "abc") == []
    assert found.main.of_class(scores).tolist()[:2] == [100.0, 0.0] and np.isnan(found.main.of_class(scores)[2])
    assert scores.hot.tolist() == [[True, False, False], [False, True, False], [False, True, False]]
    assert measures_of(None) == measures_of("softmax")  # runs that are older than loss.kind


def test_the_first_measure_of_each_loss_is_the_one_that_a_spec_decides_by() -> None:
    assert {kind: measures[0].key for kind, measures in MEASURES.items()} == MAIN_MEASURES


@pytest.mark.parametrize(
    ("right", "videos", "expected"),
    [(10, 14, (45.35, 88.28)), (0, 10, (0.0, 27.75)), (10, 10, (72.25, 100.0)), (14_836, 19_761, (74.47, 75.67))],
)
def test_the_interval_of_an_accuracy(right: int, videos: int, expected: tuple[float, float]) -> None:
    """Wilson's, such as R's prop.test(right, videos, correct = FALSE) has."""
    assert interval(100 * right / videos, videos) == pytest.approx(expected, abs=0.01)


def test_the_mean_over_classes_is_known_where_their_numbers_differ() -> None:
    rows = np.array([[3.0, 2, 1], [3, 2, 1], [1, 2, 3]])
    scores = Scores(np.arange(3), np.array([0, 0, 1]), rows, np.array([True, True, True]))
    assert measures_of("softmax", 3).macro(scores)["top1_macro"] == 50, "100 % of class 0, 0 % of 1; 2 has no video"
    assert "top1_macro" not in measures_of("softmax", 3).macro(replace(scores, labels=np.array([0, 1, 2])))
    assert say_certainty((45.351, 88.279), 50.0, 33.333) == [
        "95 % interval of top-1: 45.35 to 88.28 %",
        "macro top-1, the mean over the classes: 50.00 %",
        "macro-F1, the mean over the classes: 33.33 %",
    ]


@pytest.mark.parametrize(("classes", "text"), [(5, "top-1 61.00 %"), (6, "top-1 61.00 %  top-5 98.77 %")])
def test_top_5_is_not_shown_where_it_says_nothing(classes: int, text: str) -> None:
    assert measures_of("softmax", classes).text({"top1": 61.0, "top5": 98.765}) == text


def test_a_measure_that_is_unknown_is_a_dash() -> None:
    scores = _scores([[0, 0], [0, 0]], [[2.0, 0.0], [3.0, 1.0]])
    known = measures_of("binary", 2)
    assert known.values(scores) == {"map": None} and known.text(known.values(scores)) == "mAP \N{EM DASH}"


def test_the_main_measure_of_several_checkpoints_has_its_deviation() -> None:
    values = {"top1_mean": 61.0, "top1_std": 0.25, "top5_mean": 90.0, "top5_std": 1.0}
    assert measures_of("softmax", 6).text(values) == "top-1 61.00 +- 0.25 %  top-5 90.00 %"
    assert measures_of("binary", 6).text({"map_mean": 12.345, "map_std": 0.5}) == "mAP 12.35 +- 0.50 %"
