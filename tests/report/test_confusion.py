"""Which classes are taken for which, by hand, and in the page of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import WHOLE, Span
from summit_train.evaluation.confusion import Confusion
from summit_train.evaluation.scores import Scores
from summit_train.report.confusion import Classes, read_classes, read_precisions
from summit_train.report.page import render
from summit_train.report.records import RunRecord, read_runs

NAN = float("nan")
LABELS = np.array([0, 0, 0, 1, 2, 2])
SCORES = np.array([[9, 1, 0], [1, 9, 0], [1, 1, 0], [0, 2, 5], [0, 1, 7], [NAN, NAN, NAN]])
IS_READ = np.array([True] * 5 + [False])


def all_read(labels: np.ndarray, scores: np.ndarray) -> Scores:
    return Scores(np.arange(len(labels)), labels, scores, np.ones(len(labels), np.bool_))


def counted(labels: np.ndarray, scores: np.ndarray) -> Classes:
    found = all_read(labels, scores)
    return Classes("last", found.names(()), Confusion.of([found]))


@pytest.fixture
def run_with_scores(write_run) -> Path:
    path = write_run("run", leave_out=("metrics.jsonl",), num_classes=3)
    clips = [Clip(f"{number}.mp4", Span(2, 7) if number == 1 else WHOLE) for number in range(6)]
    scores = Scores(np.arange(6), LABELS, SCORES, IS_READ)
    scores.save(path / "predictions/step_00000040.npz", clips, ("a", "b", "<c>"))
    return path


def test_the_most_frequent_mistakes_come_first_and_ten_at_most() -> None:
    labels = np.repeat(np.arange(12), 12)
    scores = np.zeros((144, 12))
    scores[np.arange(144), np.tile(np.arange(12), 12)] = 1
    scores[1] = np.eye(12)[5]
    pairs = counted(labels, scores).pairs()
    assert len(pairs) == 10 and pairs[0] == ("0", "5", "2", "16.7 %", "")


def test_a_mistake_has_the_video_where_the_wrong_class_leads_most(write_run) -> None:
    path = write_run("run", leave_out=("metrics.jsonl",), num_classes=2)
    scores = all_read(np.zeros(4, np.int64), np.array([[1.0, 5], [1, 9], [4, 5], [5, 1]]))
    scores.save(path / "predictions/step_00000040.npz", [Clip(f"v{number}") for number in range(4)], ())
    about = read_classes(RunRecord(path))
    assert about is not None and about.pairs() == [("0", "1", "3", "75.0 %", "v1")]


@pytest.mark.usefixtures("undrawn")
def test_the_page_shows_it_at_its_own_size(run_with_scores: Path) -> None:
    """The page shows a matrix by its width in points; 3 classes are half as wide as a curve."""
    about = read_classes(RunRecord(run_with_scores))
    assert about is not None and about.names == ("a", "b", "<c>") and about.source == "step_00000040"
    picture = about.picture()
    assert picture is not None and "not be read: 1 video." in picture.caption
    page = render(read_runs([run_with_scores]))
    assert "<td>&lt;c&gt;</td>" in page and ">1.mp4 2:7</td>" in page and ">3.mp4</td>" in page
    assert '<figure class="natural">' in page and "figure.natural img { width: auto; max-width: 100%; }" in page


def test_of_many_classes_the_matrix_has_the_16_that_are_most_confused() -> None:
    """Of 31 classes with one video each, 20 .. 29 are taken for the next one, and 30, which has three, for 0."""
    labels = np.append(np.arange(31), [30, 30])
    predicted = np.where(labels >= 20, (labels + 1) % 31, labels)
    many = counted(labels, np.eye(31)[predicted])
    assert many.most_confused() == [0, *range(20, 31)]
    assert [(name, videos, recall) for name, videos, *_, recall in many.rows] == [
        (str(i), "1", "0.0 %") for i in range(20, 30)
    ]
    picture, curve = many.picture(), many.curve()
    assert picture is not None and "The 12 most confused of 31 classes." in picture.caption
    assert curve is not None and "all 31 classes" in curve.caption
    predicted = (labels + 1) % 31
    assert counted(labels, np.eye(31)[predicted]).most_confused() == [*range(15), 30]
    right = counted(labels, np.eye(31)[labels])
    assert right.picture() is None and right.curve() is not None


def test_nothing_is_shown_without_scores_and_bad_ones_are_noted(run_with_scores: Path) -> None:
    scores = run_with_scores / "predictions/step_00000040.npz"
    with np.load(scores) as file:
        columns = dict(file)
    np.savez(scores, **columns | {"scores": columns["scores"].astype(str)})
    text = scores.read_bytes()
    for damaged in (text, b"no archive"):
        scores.write_bytes(damaged)
        run = RunRecord(run_with_scores)
        assert read_classes(run) is None and "step_00000040.npz: damaged, or not predictions" in run.notes[-1]
    hot = Scores(np.arange(1), np.ones((1, 3), bool), np.zeros((1, 3)), np.ones(1, bool))
    hot.save(scores, [Clip("a")], ("a", "b", "<c>"))
    run = RunRecord(run_with_scores)
    assert read_classes(run) is None and run.notes[-1] == f"{scores}: must be of loss.kind softmax, got binary"
    scores.unlink()
    assert read_classes(RunRecord(run_with_scores)) is None
    (run_with_scores / "eval.json").write_text(json.dumps({"top1_mean": 1.0}))
    assert read_classes(RunRecord(run_with_scores)) is None


def test_a_run_with_several_labels_has_average_precisions_instead(write_run) -> None:
    eval_json = {"map_mean": 75.0, "checkpoints": [{"path": "checkpoints/step_00000040.pt", "step": 40, "map": 75.0}]}
    path = write_run(leave_out=("metrics.jsonl",), spec={"loss": {"kind": "binary"}}, files={"eval.json": eval_json})
    hot = np.array([[1, 0, 0], [0, 1, 0]], bool)
    scores = Scores(np.arange(2), hot, np.array([[2.0, 0, 9], [3, 1, 9]]), np.ones(2, bool))
    scores.save(path / "predictions/step_00000040.npz", [Clip("a"), Clip("b")], ("a", "b", "<c>"))
    run = RunRecord(path)
    assert read_classes(run) is None and run.notes == []
    assert read_precisions(run) == ([("a", "1", "50.0 %"), ("b", "1", "100.0 %")], 3)
    page = render(read_runs([path]))
    assert "<h3>Average precision</h3>" in page and '<td class="n" data-head="AP">50.0 %</td>' in page
