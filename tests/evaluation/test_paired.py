"""Two runs compared on their common videos: counts and McNemar's p by hand, and the interval of a difference."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import RunScores, read_run
from summit_train.evaluation.paired import compare, gain, mcnemar
from summit_train.evaluation.scores import Scores
from tests.scored_runs import CLIPS, FLOW, LABELS, RGB, write_scores


@pytest.mark.parametrize(
    ("pairs", "p"),
    [((0, 0), 1), ((1, 0), 1), ((3, 3), 1), ((0, 5), 2 / 32), ((5, 1), 14 / 64), ((12, 5), 0.143463134765625)],
)  # fmt: skip
def test_the_p_of_videos_that_one_run_alone_has_right(pairs: tuple[int, int], p: float) -> None:
    assert mcnemar(*pairs) == mcnemar(*pairs[::-1]) == pytest.approx(p, rel=1e-12)


def test_the_p_of_many_videos_is_the_whole_sum() -> None:
    exact = 2 * Fraction(sum(math.comb(900, k) for k in range(401)), 2**900)
    assert mcnemar(400, 500) == pytest.approx(float(exact), rel=1e-9)
    assert 0.20 < mcnemar(50_200, 50_600) < 0.21
    assert mcnemar(2_000_000, 2_001_000) == pytest.approx(math.erfc(999 / math.sqrt(2 * 4_001_000)), rel=1e-5)
    assert mcnemar(1, 3000) == 0


def test_two_runs_are_matched_by_their_videos(tmp_path: Path) -> None:
    """RGB is right on a and c, FLOW on b; FLOW scored b, c and d, in another order."""
    rgb = read_run(str(write_scores(tmp_path / "rgb.npz", RGB)))
    clips = (CLIPS[2], CLIPS[1], Clip("d.mp4"))
    flow = read_run(str(write_scores(tmp_path / "flow.npz", FLOW[::-1], LABELS[::-1], clips)))
    text = "2 videos scored by both runs: only rgb has 1 right, only flow 1; p = 1 (McNemar's exact test)"
    assert compare(rgb, flow) == text
    unread = np.array([True, False, True])  # b: no difference between the networks
    rgb = replace(rgb, scores=replace(rgb.scores, is_read=unread))
    text = "1 video scored by both runs: only rgb has 1 right, only flow 0; p = 1 (McNemar's exact test)"
    assert compare(rgb, flow) == text


@pytest.mark.parametrize(
    ("labels", "clips", "names", "wrong"),
    [
        (LABELS, tuple(map(Clip, "xyz")), (), "have no video in common"),
        ((0, 2, 2), CLIPS, (), "b.mp4: is class 1 in .* and 2 in"),
        (LABELS, CLIPS, ("run", "hop", "skip"), "must have the same classes"),
    ],
)
def test_runs_that_cannot_be_compared(
    labels: tuple[int, ...], clips: tuple[Clip, ...], names: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    rgb = read_run(str(write_scores(tmp_path / "rgb.npz", RGB)))
    other = read_run(str(write_scores(tmp_path / "other.npz", FLOW, labels, clips, names)))
    with pytest.raises(UserError, match=wrong):
        compare(rgb, other)


def test_an_interval_of_the_difference_of_map(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    labels = draw.random((60, 3)) < 0.4
    clips = tuple(Clip(f"{number:02}.mp4") for number in range(60))
    runs = []
    for name, noise in (("worse", 4.0), ("better", 0.1)):
        scores = (labels + noise * draw.normal(size=labels.shape)).astype(np.float32)
        Scores(np.arange(60), labels, scores, np.ones(60, bool)).save(tmp_path / f"{name}.npz", clips, ["a", "b", "c"])
        runs.append(read_run(str(tmp_path / f"{name}.npz")))
    low, high = gain(runs[0].scores, runs[1].scores)
    assert (low, high) == pytest.approx((39.134, 59.004), abs=0.01)  # scikit-learn and another generator: 38.3, 59.3
    assert 0 < low < runs[1].scores.value("map") - runs[0].scores.value("map") < high < 100
    assert gain(runs[1].scores, runs[0].scores) == pytest.approx((-high, -low))
    assert gain(runs[0].scores, runs[0].scores) == (0, 0)
    text = f"60 videos scored by both runs: mAP of better minus that of worse {low:+.2f} to {high:+.2f} points (95 %"
    assert compare(*runs).startswith(text)
    empty = write_scores(tmp_path / "empty.npz", RGB)
    Scores(np.arange(3), np.zeros((3, 3), bool), np.ones((3, 3)), np.ones(3, bool)).save(empty, CLIPS, ())
    with pytest.raises(UserError, match="have no label on the videos"):
        compare(read_run(str(empty)), read_run(str(empty)))


def test_of_very_many_scores_there_is_a_difference_and_no_interval(tmp_path: Path) -> None:
    labels = np.zeros((2, 800_000), bool)
    labels[0, 0] = True
    runs = []
    for name, first in (("worse", 0.0), ("better", 2.0)):
        scores = np.ones(labels.shape, np.float32)
        scores[0, 0] = first
        clips = (Clip("a.mp4"), Clip("b.mp4"))
        runs.append(RunScores(name, tmp_path, clips, (), Scores(np.arange(2), labels, scores, np.ones(2, bool))))
    assert gain(runs[0].scores, runs[1].scores) is None
    assert compare(*runs).endswith("mAP of better minus that of worse +50.00 points; too many for an interval")
