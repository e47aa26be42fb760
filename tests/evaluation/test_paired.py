"""Two runs compared on their common videos: counts and McNemar's p by hand, and the interval of a difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import read_run
from summit_train.evaluation.paired import Paired, compare, mcnemar
from summit_train.evaluation.scores import Scores
from tests.scored_runs import CLIPS, FLOW, LABELS, RGB, write_scores


@pytest.mark.parametrize(
    ("pairs", "p"),
    [((0, 0), 1), ((1, 0), 1), ((3, 3), 1), ((0, 5), 2 / 32), ((5, 1), 14 / 64), ((12, 5), 0.143463134765625)],
)  # fmt: skip
def test_the_p_of_discordant_pairs(pairs: tuple[int, int], p: float) -> None:
    assert mcnemar(*pairs) == mcnemar(*pairs[::-1]) == pytest.approx(p, rel=1e-12)


def test_two_runs_are_matched_by_their_videos(tmp_path: Path) -> None:
    """RGB is right on a and c, FLOW on b; FLOW scored b, c and d, in another order."""
    rgb = read_run(str(write_scores(tmp_path / "rgb.npz", RGB)))
    clips = (CLIPS[2], CLIPS[1], Clip("d.mp4"))
    flow = read_run(str(write_scores(tmp_path / "flow.npz", FLOW[::-1], LABELS[::-1], clips)))
    paired = compare(rgb, flow)
    assert paired == Paired(2, 1, 1, 1.0)
    text = "2 videos scored by both; only the first has 1 right, only the second 1; p = 1 (McNemar's exact test)"
    assert str(paired) == text


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    rgb = read_run(str(write_scores(tmp_path / "rgb.npz", RGB)))
    others = tuple(map(Clip, "xyz"))
    for labels, clips, wrong in (
        (LABELS, others, "must have scored the same videos, got none in common"),
        ((0, 2, 2), CLIPS, "must have the same labels of the same videos"),
    ):
        other = read_run(str(write_scores(tmp_path / "other.npz", FLOW, labels, clips)))
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
    gain = compare(*runs)
    assert gain.p is None and gain.low is not None and gain.high is not None and 0 < gain.low < gain.high < 100
    assert (compare(*runs[::-1]).low, compare(*runs[::-1]).high) == pytest.approx((-gain.high, -gain.low))
    assert str(gain).startswith(f"60 videos scored by both; mAP differs by {gain.low:+.2f} to {gain.high:+.2f} (95 %")
    same = compare(runs[0], runs[0])
    assert (same.low, same.high) == (0, 0)
