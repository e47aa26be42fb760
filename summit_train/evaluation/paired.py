"""Two runs on the videos that both scored: how many only one has right, and whether chance explains that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import RunScores, check_match
from summit_train.evaluation.scores import Scores

_RESAMPLES = 1000  # but 100 of more scores than this
_MOST_SCORES = 1_000_000


def compare(first: RunScores, second: RunScores) -> str:
    """Say how two runs differ on the videos that both scored, of one class a video in top-1, else in mAP.

    Raises UserError where they have other classes or labels, or no video in common.
    """
    common = sorted(set(first.clips) & set(second.clips))
    if not common:
        raise UserError(f"{first.path} and {second.path} have no video in common")
    first = _among(first, common)
    second = _among(second, common)
    check_match(first, second)
    both = f"{counted(len(common), 'video')} scored by both runs"
    if first.scores.kind == "softmax":
        right = first.scores.right(1)
        others = second.scores.right(1)
        only_first = int((right & ~others).sum())
        only_second = int((others & ~right).sum())
        p = f"p = {mcnemar(only_first, only_second):.2g} (McNemar's exact test)"
        return f"{both}: only {first.name} has {only_first:,} right, only {second.name} {only_second:,}; {p}"
    if not first.scores.labels.any():
        raise UserError(f"{first.path} and {second.path} have no label on the videos that they have in common")
    bounds = "{:+.2f} to {:+.2f} points".format(*gain(first.scores, second.scores))
    return f"{both}: mAP of {second.name} minus that of {first.name} {bounds} (95 %, bootstrap of the videos)"


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of McNemar's exact test (1947), binomial with 1/2, of videos right in one run alone."""
    number = only_first + only_second
    fewer = min(only_first, only_second)
    term = tail = 1.0  # over the largest term, which is that of `fewer`
    for k in range(fewer, 0, -1):
        term *= k / (number - k + 1)
        tail += term
    largest: float = math.comb(number, fewer) / 2**number
    return min(1.0, 2 * tail * largest)


def gain(first: Scores, second: Scores) -> tuple[float, float]:
    """Return the 95 % interval of the second's mAP minus the first's, in points, by bootstrap of their videos."""
    draw = rng.key(0, "bootstrap")
    gains = []
    for _ in range(_RESAMPLES if first.scores.size <= _MOST_SCORES else _RESAMPLES // 10):
        rows = draw.integers(len(first.videos), size=len(first.videos))
        gains.append(_rows(second, rows).value("map") - _rows(first, rows).value("map"))
    low, high = np.nanpercentile(gains, [2.5, 97.5])
    return float(low), float(high)


def _among(run: RunScores, clips: Sequence[Clip]) -> RunScores:
    row_of = {clip: row for row, clip in enumerate(run.clips)}
    return replace(run, clips=tuple(clips), scores=_rows(run.scores, [row_of[clip] for clip in clips]))


def _rows(scores: Scores, rows: Sequence[int] | np.ndarray) -> Scores:
    return Scores(scores.videos[rows], scores.labels[rows], scores.scores[rows], scores.is_read[rows])
