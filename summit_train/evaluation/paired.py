"""Two runs on the videos that both scored: how many only one has right, and whether chance explains that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import RunScores, check_match
from summit_train.evaluation.scores import Scores

_RESAMPLES = 1000
_FEWEST_RESAMPLES = 200  # of an interval
_MOST_WORK = 100_000_000  # scores, over all resamples: some ten seconds


def compare(first: RunScores, second: RunScores) -> str:
    """Say how two runs differ on the videos that both could read, of one class a video in top-1, else in mAP.

    Raises UserError where they have other classes or labels, or no video in common.
    """
    common = sorted(_read(first) & _read(second))
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
        p = mcnemar(only_first, only_second)
        says = f"p = {p:.2g}" if p > 0 else "p < 1e-300"
        counts = f"only {first.name} has {only_first:,} right, only {second.name} {only_second:,}"
        return f"{both}: {counts}; {says} (McNemar's exact test)"
    if not first.scores.labels.any():
        raise UserError(f"{first.path} and {second.path} have no label on the videos that they have in common")
    what = f"{both}: mAP of {second.name} minus that of {first.name}"
    bounds = gain(first.scores, second.scores)
    if bounds is None:
        return f"{what} {second.scores.value('map') - first.scores.value('map'):+.2f} points; too many for an interval"
    return f"{what} {bounds[0]:+.2f} to {bounds[1]:+.2f} points (95 %, bootstrap of the videos)"


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of McNemar's exact test (1947), binomial with 1/2, of videos right in one run alone."""
    number = only_first + only_second
    fewer = min(only_first, only_second)
    term = tail = 1.0  # over the largest term, which is that of `fewer`
    for k in range(fewer, 0, -1):
        term *= k / (number - k + 1)
        tail += term
        if term < 1e-17 * tail:
            break
    combinations = math.lgamma(number + 1) - math.lgamma(fewer + 1) - math.lgamma(number - fewer + 1)
    return min(1.0, 2 * tail * math.exp(combinations - number * math.log(2)))


def gain(first: Scores, second: Scores) -> tuple[float, float] | None:
    """Return the 95 % interval of the second's mAP minus the first's, in points, by bootstrap of their videos.

    None for a number of scores that would take minutes.
    """
    resamples = min(_RESAMPLES, _MOST_WORK // first.scores.size)
    if resamples < _FEWEST_RESAMPLES:
        return None
    draw = rng.key(0, "bootstrap")
    videos = len(first.videos)
    orders = [np.argsort(-scores.scores.T, axis=1, kind="stable") for scores in (first, second)]
    labels = [np.take_along_axis(first.labels.T, order, axis=1) for order in orders]
    gains = []
    for _ in range(resamples):
        counts = np.bincount(draw.integers(videos, size=videos), minlength=videos)
        one, other = (_map_of(counts[order], positive) for order, positive in zip(orders, labels, strict=True))
        gains.append(other - one)
    low, high = np.nanpercentile(gains, [2.5, 97.5])
    return float(low), float(high)


def _map_of(counts: NDArray[np.int64], is_positive: NDArray[np.bool_]) -> float:
    """Return mAP, percent, of videos that are there `counts` times; both (classes, videos), the highest score first."""
    hits = counts * is_positive
    precision = hits.cumsum(1) / np.maximum(counts.cumsum(1), 1)
    positives = hits.sum(1)
    known = positives > 0
    return 100 * float(np.mean((hits * precision).sum(1)[known] / positives[known])) if known.any() else math.nan


def _read(run: RunScores) -> set[Clip]:
    return {clip for clip, is_read in zip(run.clips, run.scores.is_read.tolist(), strict=True) if is_read}


def _among(run: RunScores, clips: Sequence[Clip]) -> RunScores:
    row_of = {clip: row for row, clip in enumerate(run.clips)}
    rows = [row_of[clip] for clip in clips]
    scores = run.scores
    chosen = Scores(scores.videos[rows], scores.labels[rows], scores.scores[rows], scores.is_read[rows])
    return replace(run, clips=tuple(clips), scores=chosen)
