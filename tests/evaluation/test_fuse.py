"""Fusion by hand on three videos, reading a run's scores, and what is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.region import Region
from summit_train.data.video.span import Span
from summit_train.evaluation.fuse import RunScores, fuse, fused_values, parse_weights, read_run, read_runs
from summit_train.evaluation.scores import Scores
from tests.scored_runs import CLIPS, FLOW, LABELS, NAMES, RGB, write_scored_run, write_scores

NAN_VIDEO = [[float("nan")] * 3]


def runs_of(*probabilities: Sequence[Sequence[float]]) -> list[RunScores]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_scores(Path(folder) / f"run{i}.npz", rows) for i, rows in enumerate(probabilities)]
        return read_runs([str(path) for path in paths])


def values_of(runs: Sequence[RunScores], weights: Sequence[float]) -> dict[str, Any]:
    return fused_values(runs, weights, fuse(runs, weights, softmax=True))


def test_probabilities_by_hand() -> None:
    runs = runs_of(RGB, FLOW)
    equal = fuse(runs, (1.0, 1.0), softmax=True).scores
    assert equal == pytest.approx(np.array([[0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.3, 0.4, 0.3]]), rel=1e-5)
    assert fuse(runs, (2.0, 2.0), softmax=True).scores == pytest.approx(equal, rel=1e-12)
    weighted = fuse(runs, (3.0, 1.0), softmax=True).scores
    assert weighted == pytest.approx(np.array([[0.55, 0.35, 0.1], [0.4, 0.5, 0.1], [0.25, 0.35, 0.4]]), rel=1e-5)
    values = values_of(runs, (3.0, 1.0))
    third = pytest.approx(100 / 3)
    assert (values["top1"], values["top5"], values["videos"], values["best"]) == (100.0, 100.0, 3, "run0")
    assert [(run["top1"], run["weight"]) for run in values["runs"]] == [(pytest.approx(200 / 3), 3.0), (third, 1.0)]
    assert values["gain"] == third
    assert [row["name"] for row in values["classes"]] == list(NAMES)
    numbers = [[row[key] for key in ("videos", "best_top1", "top1", "gain")] for row in values["classes"]]
    assert numbers == [[1, 100.0, 100.0, 0.0], [1, 0.0, 100.0, 100.0], [1, 100.0, 100.0, 0.0]]
    # Equal weights: the third video is lost, the second one won.
    assert [row["gain"] for row in values_of(runs, (1.0, 1.0))["classes"]] == [0.0, 100.0, -100.0]


def test_logits_are_added_as_they_are() -> None:
    """The sum of probabilities prefers class 0 (0.91, 0.30, 0.79), that of logits class 1 (products 0.018, 0.02)."""
    runs = runs_of([[0.89, 0.1, 0.01]] * 3, [[0.02, 0.2, 0.78]] * 3)
    assert fuse(runs, (1.0, 1.0), softmax=True).scores.argmax(1).tolist() == [0, 0, 0]
    logits = fuse(runs, (1.0, 3.0), softmax=False).scores[0]
    assert logits == pytest.approx(7 + np.log([0.89, 0.1, 0.01]) / 4 + np.log([0.02, 0.2, 0.78]) * 3 / 4)
    assert fuse(runs, (1.0, 1.0), softmax=False).scores.argmax(1).tolist() == [1, 1, 1]


def test_a_video_that_a_run_could_not_read_is_wrong_unless_the_run_has_no_weight() -> None:
    runs = runs_of(RGB[:2] + NAN_VIDEO, [*FLOW[:2], RGB[2]])
    values = values_of(runs, (3.0, 1.0))
    assert (values["top1"], values["bad_videos"]) == (pytest.approx(200 / 3), 1)
    assert [run["bad_videos"] for run in values["runs"]] == [1, 0]
    assert values_of(runs, (0.0, 1.0))["bad_videos"] == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1", "one for each of the 2 runs in their order, got 1"),
        ("1,2,3", "one for each of the 2 runs in their order, got 1,2,3"),
        ("1,-0.5", "must be finite, 0 or more"),
        ("0,0", "one above 0"),
        ("nan,1", "must be finite"),
        ("1,", "must be numbers with commas"),
    ],
)
def test_weights_that_are_none(text: str, part: str) -> None:
    assert parse_weights("0,2e0", 2) == (0.0, 2.0) and parse_weights(None, 3) == (1.0, 1.0, 1.0)
    with pytest.raises(UserError, match=part) as caught:
        parse_weights(text, 2)
    assert str(caught.value).startswith("--weights must be ") and "\n" not in str(caught.value)


FOUR = [[0.25] * 4] * 3


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ((FOUR, LABELS, CLIPS, ()), "rgb.npz has 3 classes and .*flow.npz has 4; must be the same"),
        ((FLOW, LABELS, CLIPS, ("hop", "jog", "skip")), "same classes, .*; they differ in 'jog', 'run'"),
        ((FLOW, (0, 2, 2)), r"b.mp4: is class 1 in .*rgb.npz and 2 in .*flow.npz \(1 of 3 videos differ\)"),
        ((FLOW[:2], LABELS[:2], CLIPS[:2]), "of 3 and 2 videos 2 match; flow lacks c.mp4"),
        ((FLOW, LABELS, [Clip("a.mp4", Span(1)), *CLIPS[1:]]), "2 match; flow lacks a.mp4, and has a.mp4 1:"),
        ((FLOW, LABELS, [Clip("a.mp4", is_reversed=True), *CLIPS[1:]]), "and has a.mp4 backwards"),
        ((FLOW, LABELS, [Clip("a.mp4", region=Region(1, 2, 8, 9)), *CLIPS[1:]]), r"has a.mp4 \(8 x 9 pixels at 1, 2\)"),
    ],
)
def test_runs_that_do_not_match(tmp_path: Path, other: tuple[Any, ...], part: str) -> None:
    paths = [write_scores(tmp_path / "rgb.npz", RGB), write_scores(tmp_path / "flow.npz", *other)]
    with pytest.raises(UserError, match=part) as caught:
        read_runs(list(map(str, paths)))
    assert "\n" not in str(caught.value)


def test_scores_from_before_regions_are_of_whole_frames(tmp_path: Path) -> None:
    path, other = (write_scores(tmp_path / f"{name}.npz", rows) for name, rows in (("rgb", RGB), ("flow", FLOW)))
    with np.load(path) as file:
        np.savez(path, **{name: column for name, column in file.items() if name not in Region._fields})
    assert [run.clips for run in read_runs([str(path), str(other)])] == [tuple(CLIPS)] * 2


def test_fewer_than_two_runs_are_refused(tmp_path: Path) -> None:
    rgb, flow = (str(write_scores(tmp_path / f"{name}.npz", rows)) for name, rows in (("rgb", RGB), ("flow", FLOW)))
    with pytest.raises(UserError, match=r"^1 run: fuse needs two or more"):
        read_runs([rgb])
    with pytest.raises(UserError, match=r"rgb\.npz: is given twice"):
        read_runs([rgb, flow, rgb])


def test_runs_without_names_of_classes_match_those_with(tmp_path: Path) -> None:
    nameless = write_scores(tmp_path / "rgb.npz", RGB, LABELS, CLIPS, ())
    runs = read_runs([str(nameless), str(write_scores(tmp_path / "flow.npz", FLOW))])
    assert [run.class_names for run in runs] == [NAMES, NAMES]
    turned = write_scores(tmp_path / "turned.npz", FLOW, LABELS, CLIPS, NAMES[::-1])
    with pytest.raises(UserError, match=r"flow\.npz and .*turned\.npz must have the same classes"):
        read_runs([str(nameless), str(tmp_path / "flow.npz"), str(turned)])


def test_the_newest_checkpoint_sorted_by_video(tmp_path: Path) -> None:
    clips = [Clip("b.mp4"), Clip("a.mp4", Span(9, 12)), Clip("a.mp4", Span(2, 4), is_reversed=True)]
    run = read_run(str(write_scored_run(tmp_path / "rgb", RGB, (1, 2, 0), clips)))
    assert (run.name, run.path, run.class_names) == ("rgb", tmp_path / "rgb/predictions/step_00000020.npz", NAMES)
    assert run.clips == (clips[2], clips[1], clips[0])
    assert run.scores.videos.tolist() == [2, 1, 0] and run.scores.labels.tolist() == [0, 2, 1]
    assert np.exp(run.scores.scores - 7) == pytest.approx(np.array([RGB[2], RGB[1], RGB[0]]), rel=1e-5)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (write_scored_run(tmp_path / folder / "run", RGB) for folder in ("a", "b"))
    assert [run.name for run in read_runs([str(one), str(other)])] == [str(one), str(other)]
    older = one / "predictions/step_00000010.npz"
    assert read_run(str(older)).name == "run/step_00000010"
    assert read_run(str(shutil.copy(older, tmp_path / "lone.npz"))).name == "lone"
    (tmp_path / "link").symlink_to(one)
    assert read_run(str(tmp_path / "link")).name == "link"
    monkeypatch.chdir(one)
    assert [run.name for run in read_runs([".", "predictions/step_00000010.npz"])] == ["run", "run/step_00000010"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"scores": np.zeros(3)}, r"scores of shape \(3,\)"),
        ({"scores": np.zeros((4, 3))}, r"video of shape \(3,\)"),
        ({"label": np.zeros(3)}, "label of shape .* type float64 for 3 videos"),
        ({"label": np.array([0, 1, 3])}, "labels from 0 to 3 for 3 classes"),
        ({"label": np.array([0, 1, -1])}, "labels from -1 to 1"),
        ({"class_names": np.array([1, 2])}, "class_names is not a list"),
        ({"scores": np.array([[1, 2, 3], [1, 2, np.nan], [1, 2, 3]])}, r"scores of b\.mp4 are not finite"),
        ({"label": None}, "has no column 'label'; `summit-train eval` writes"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, change: dict[str, np.ndarray | None], part: str) -> None:
    path = write_scores(tmp_path / "a.npz", RGB)
    with np.load(path) as file:
        columns = dict(file) | change
    np.savez(path, **{name: column for name, column in columns.items() if column is not None})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=part) as caught:
        read_run(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_scores_of_a_video_that_is_there_twice_are_not_matched(tmp_path: Path) -> None:
    path = write_scores(tmp_path / "a.npz", RGB)
    with np.load(path) as file:
        np.savez(tmp_path / "b.npz", **dict(file) | {"path": np.array(["a", "b", "a"])})  # type: ignore[arg-type]
    assert len(read_run(str(tmp_path / "b.npz")).clips) == 3  # a report of it alone
    with pytest.raises(UserError, match=r"b\.npz: has a twice; scores are matched by video"):
        read_runs([str(path), str(tmp_path / "b.npz")])


def test_a_damaged_file_is_refused_in_one_line_or_read_as_it_was(tmp_path: Path) -> None:
    """Every third byte changed, and every third length."""
    path = write_scores(tmp_path / "a.npz", RGB)
    whole, content = read_run(str(path)), path.read_bytes()
    changed = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(0, len(content), 3)]
    cut = [content[:length] for length in range(0, len(content), 3)]
    refused = 0
    for damaged in changed + cut:
        path.write_bytes(damaged)
        try:
            found = read_run(str(path))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert found.clips == CLIPS and np.array_equal(found.scores.scores, whole.scores.scores)
    assert refused > len(cut) + len(changed) // 2


def test_what_holds_no_scores(tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "run", RGB)

    def refused(word: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_run(str(word))
        return str(caught.value)

    advice = f"; run `summit-train eval {run}/spec.yaml`"
    assert refused(tmp_path / "none").endswith("must be a run folder or an npz of predictions")
    assert refused(tmp_path) == f"{tmp_path}: is not a run folder: no spec.yaml found in it"
    assert "not an npz" in refused(run / "eval.json")
    np.savez(tmp_path / "boxes.npz", detections=np.zeros((0, 7), np.float32), ends=np.zeros(1, np.int64))
    assert "boxes.npz: has no scores of classes; fuse combines the scores" in refused(tmp_path / "boxes.npz")
    (run / "predictions/step_00000020.npz").unlink()
    assert refused(run) == f"{run}: has no predictions/step_00000020.npz{advice}"
    for wrong in ("{", "[]", json.dumps({"checkpoints": []}), json.dumps({"checkpoints": [{"step": 1}]})):
        (run / "eval.json").write_text(wrong)
        assert refused(run) == f"{run}: its eval.json cannot be read{advice}"
    (run / "eval.json").unlink()
    assert refused(run) == f"{run}: has no predictions{advice}"


# Several labels a video.

HOT = np.array([[True, False, True], [False, True, False], [False, False, False]])


def _write_several(path: Path, probabilities: Sequence[Sequence[float]], hot: np.ndarray = HOT) -> str:
    yes = np.array(probabilities)
    logits = np.log(yes) - np.log(1 - yes)
    Scores(np.arange(3), hot, logits, np.ones(3, bool)).save(path, CLIPS, NAMES)
    return str(path)


def test_several_labels_by_hand(tmp_path: Path) -> None:
    """Each class alone: of b, the second video is found first (100 %), or second (50 %); of c, first."""
    words = [
        _write_several(tmp_path / "one.npz", [[0.9, 0.3, 0.5], [0.2, 0.2, 0.1], [0.1, 0.1, 0.1]]),
        _write_several(tmp_path / "two.npz", [[0.5, 0.1, 0.5], [0.4, 0.6, 0.3], [0.1, 0.1, 0.1]]),
    ]
    runs = read_runs(words)
    added = fuse(runs, (1.0, 1.0), softmax=True)
    assert added.scores == pytest.approx(np.array([[0.7, 0.2, 0.5], [0.3, 0.4, 0.2], [0.1, 0.1, 0.1]]), rel=1e-6)
    values = fused_values(runs, (1.0, 1.0), added)
    assert (values["map"], values["best"], values["gain"]) == (pytest.approx(100.0), "two", pytest.approx(0.0))
    assert "top1" not in values and values["runs"][0]["map"] == pytest.approx(250 / 3)
    assert [(row["videos"], row["ap"], row["best_ap"]) for row in values["classes"]] == [(1, 100.0, 100.0)] * 3
    assert main(["fuse", *words, "--out", str(tmp_path / "out")]) == 0
    again = np.load(tmp_path / "out/fused.npz")["scores"]  # the logits of the probabilities
    assert 1 / (1 + np.exp(-again)) == pytest.approx(added.scores, rel=1e-6)
    other = _write_several(tmp_path / "other.npz", [[0.5] * 3] * 3, HOT[[1, 0, 2]])
    with pytest.raises(UserError, match=r"a\.mp4: is class 0, 2 in .*one\.npz and 1 in .*other\.npz"):
        read_runs([words[0], other])
    with pytest.raises(UserError, match=r"one\.npz is of loss\.kind binary and .*rgb\.npz of softmax"):
        read_runs([words[0], str(write_scores(tmp_path / "rgb.npz", RGB))])
