"""Two runs on the videos that both scored: how many only one has right, and whether chance explains that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import RunScores, check_match
from summit_train.evaluation.scores import Scores

_RESAMPLES = 1000  # but 100 of more scores than this
_MOST_SCORES = 1_000_000


class Paired(NamedTuple):
    """The comparison of two runs. videos: that both scored. only_first, only_second: right in one alone (top-1).

    p: of McNemar's exact test, the chance of such a difference or a larger one between equally good networks. low,
    high: of several labels per video, the 95 % interval of the second's mAP minus the first's by bootstrap, in points.
    """

    videos: int
    only_first: int = 0
    only_second: int = 0
    p: float | None = None
    low: float | None = None
    high: float | None = None

    def text(self, first: str, second: str) -> str:
        """Return a sentence. first, second: the names of the runs."""
        both = f"{counted(self.videos, 'video')} scored by both runs"
        if self.p is None:
            bounds = f"{self.low:+.2f} to {self.high:+.2f} points"
            return f"{both}: mAP of {second} minus that of {first} {bounds} (95 %, bootstrap of the videos)"
        alone = f"only {first} has {self.only_first:,} right, only {second} {self.only_second:,}"
        return f"{both}: {alone}; p = {self.p:.2g} (McNemar's exact test)"


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


def compare(first: RunScores, second: RunScores) -> Paired:
    """Compare two runs. Raises UserError where they have other classes or labels, or no video in common."""
    common = sorted(set(first.clips) & set(second.clips))
    if not common:
        raise UserError(f"{first.path} and {second.path} have no video in common")
    first = _among(first, common)
    second = _among(second, common)
    check_match(first, second)
    videos = len(common)
    if first.scores.kind == "softmax":
        right = first.scores.right(1)
        others = second.scores.right(1)
        counts = (int((right & ~others).sum()), int((others & ~right).sum()))
        return Paired(videos, *counts, mcnemar(*counts))
    draw = rng.key(0, "bootstrap")
    gains = []
    for _ in range(_RESAMPLES if first.scores.scores.size <= _MOST_SCORES else _RESAMPLES // 10):
        chosen = draw.integers(videos, size=videos)
        gains.append(_rows(second.scores, chosen).value("map") - _rows(first.scores, chosen).value("map"))
    if np.isnan(gains).all():
        raise UserError(f"{first.path} and {second.path} have no label on the videos that they have in common")
    low, high = np.nanpercentile(gains, [2.5, 97.5])
    return Paired(videos, low=float(low), high=float(high))


def _among(run: RunScores, clips: Sequence[Clip]) -> RunScores:
    row_of = {clip: row for row, clip in enumerate(run.clips)}
    return replace(run, clips=tuple(clips), scores=_rows(run.scores, [row_of[clip] for clip in clips]))


def _rows(scores: Scores, rows: Sequence[int] | np.ndarray) -> Scores:
    return Scores(scores.videos[rows], scores.labels[rows], scores.scores[rows], scores.is_read[rows])
