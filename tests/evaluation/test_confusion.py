"""Which classes are taken for which, and precision, recall and F1 of each, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from summit_train.evaluation.confusion import Confusion, class_rows, class_values
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import Scores

NAN = float("nan")
DASH = "\N{EM DASH}"
SCORES = np.array([[9, 1, 0], [1, 9, 0], [1, 1, 0], [0, 2, 5], [0, 1, 7], [NAN, NAN, NAN]])
FOUND = Scores(np.arange(6), np.array([0, 0, 0, 1, 2, 2]), SCORES, np.array([True] * 5 + [False]))


def values(confusion: Confusion, names: str) -> list[dict[str, Any]]:
    return class_values(names, confusion.videos, confusion.percents)


def test_three_classes_of_which_one_is_never_right() -> None:
    """Of class 0 one video is right, one is taken for 1, one is undecided between 0 and 1, which is a 0.

    The video of class 1 is taken for 2; of class 2 one video is right, the other could not be read.
    """
    confusion = Confusion.of([FOUND])
    assert confusion.among(range(3)).tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert confusion.among([2, 0]).tolist() == [[1, 0], [0, 2]]
    assert confusion.videos.tolist() == [3, 1, 2]
    means = {"top1_macro": pytest.approx(350 / 9), "top1_macro_f1": pytest.approx(130 / 3)}
    assert measures_of("softmax", 3).macro(FOUND) == means
    assert confusion.percents["precision"].tolist() == [100, 0, 50]
    assert confusion.percents["recall"].tolist() == pytest.approx([200 / 3, 0, 50])
    assert confusion.percents["f1"].tolist() == pytest.approx([80, 0, 50])
    assert class_rows(values(confusion, "abc")) == [
        ("b", "1", "0.0 %", "0.0 %", "0.0 %"),
        ("c", "2", "50.0 %", "50.0 %", "50.0 %"),
        ("a", "3", "100.0 %", "80.0 %", "66.7 %"),
    ]


def test_a_fold_with_one_class_has_no_figure_where_there_is_nothing_to_divide_by() -> None:
    """Both videos are of class 1; one is taken for 2, and 0 is neither true nor predicted."""
    one = Scores(np.arange(2), np.array([1, 1]), np.eye(3)[[1, 2]], np.ones(2, bool))
    confusion = Confusion.of([one])
    assert np.isnan(confusion.percents["precision"][0]) and confusion.percents["precision"][1:].tolist() == [100, 0]
    assert np.isnan(confusion.percents["recall"][[0, 2]]).all() and confusion.percents["recall"][1] == 50
    assert np.isnan(confusion.percents["f1"][0]) and confusion.percents["f1"][1:].tolist() == pytest.approx(
        [200 / 3, 0]
    )
    assert values(confusion, "abc")[0] == {"name": "a", "videos": 0, "precision": None, "f1": None, "recall": None}
    assert measures_of("softmax", 3).macro(one) == {"top1_macro_f1": pytest.approx(100 / 3)}
    unread = Confusion.of([Scores(np.arange(2), np.array([1, 1]), np.full((2, 2), NAN), np.zeros(2, bool))])
    assert class_rows(values(unread, "ab")) == [("b", "2", DASH, "0.0 %", "0.0 %")]


def test_several_sets_are_counted_together() -> None:
    other = Scores(np.arange(1), np.array([1]), np.array([[0, 9.0, 0]]), np.ones(1, bool))
    assert Confusion.of([FOUND, other]).among(range(3)).tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert Confusion.of([FOUND, other]).videos.tolist() == [3, 2, 2]


def test_the_cells_of_20000_classes_are_those_that_are_not_0() -> None:
    scores = np.zeros((3, 20_000), np.float32)
    scores[[0, 1, 2], [19_999, 7, 7]] = 1
    confusion = Confusion.of([Scores(np.arange(3), np.array([19_999] * 3), scores, np.ones(3, bool))])
    assert confusion.cells.tolist() == [[19_999, 7, 2], [19_999, 19_999, 1]]


@pytest.mark.parametrize(("number", "shown"), [(30, 30), (31, 10)])
def test_of_more_than_30_classes_the_ten_lowest_are_rows(number: int, shown: int) -> None:
    percents = np.arange(number, 0.0, -1)
    rows = class_rows(class_values([f"c{i}" for i in range(number)], np.ones(number, int), {"ap": percents}))
    assert len(rows) == shown and rows[0] == (f"c{number - 1}", "1", "1.0 %")


def test_the_classes_of_eval_json_are_those_of_one_class_a_video_and_1000_at_most() -> None:
    assert [one["name"] for one in measures_of("softmax", 1000).classes(FOUND, ["a"])] == ["a", "1", "2"]
    assert measures_of("softmax", 1001).classes(FOUND, ["a"]) == []
    hot = Scores(np.arange(1), np.ones((1, 3), bool), np.zeros((1, 3)), np.ones(1, bool))
    assert measures_of("binary", 3).classes(hot, "abc") == [] and measures_of("binary", 3).macro(hot) == {}
