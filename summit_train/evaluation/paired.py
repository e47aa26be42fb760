"""Two runs on the videos that both scored: how many only one has right, and whether chance explains that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.fuse import RunScores, check_classes
from summit_train.evaluation.scores import Scores

_RESAMPLES = 1000


class Paired(NamedTuple):
    """The comparison of two runs. videos: those that both scored. only_first, only_second: right in one alone (top-1).

    p: of McNemar's exact test, the chance of such a difference or a larger one between equally good networks. low,
    high: of several labels per video, the 95 % interval of the second's mAP minus the first's, percent, by bootstrap.
    """

    videos: int
    only_first: int = 0
    only_second: int = 0
    p: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        text = f"{counted(self.videos, 'video')} scored by both; "
        if self.p is None:
            return f"{text}mAP differs by {self.low:+.2f} to {self.high:+.2f} (95 %, bootstrap over the videos)"
        alone = f"only the first has {self.only_first:,} right, only the second {self.only_second:,}"
        return f"{text}{alone}; p = {self.p:.2g} (McNemar's exact test)"


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of so many discordant pairs, binomial with 1/2 (McNemar, 1947, exact)."""
    number = only_first + only_second
    tail = sum(math.comb(number, k) for k in range(min(only_first, only_second) + 1))
    return float(min(1, 2 * tail / 2**number))


def compare(first: RunScores, second: RunScores) -> Paired:
    """Compare two runs. Raises UserError where they have other classes or labels, or no video in common."""
    check_classes(first, second)
    common = sorted(set(first.clips) & set(second.clips))
    if not common:
        raise UserError(f"{first.path} and {second.path} must have scored the same videos, got none in common")
    one, other = (_of(run, common) for run in (first, second))
    if one.kind != other.kind or not np.array_equal(one.labels, other.labels):
        raise UserError(f"{first.path} and {second.path} must have the same labels of the same videos")
    if one.kind == "softmax":
        right = one.right(1)
        others = other.right(1)
        counts = (int((right & ~others).sum()), int((others & ~right).sum()))
        return Paired(len(common), *counts, mcnemar(*counts))
    draw = rng.key(0, "bootstrap")
    found = []
    for _ in range(_RESAMPLES):
        chosen = draw.integers(len(common), size=len(common))
        found.append(_map(other, chosen) - _map(one, chosen))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return Paired(len(common), low=float(low), high=float(high))


def _of(run: RunScores, clips: Sequence[Clip]) -> Scores:
    place = {clip: number for number, clip in enumerate(run.clips)}
    chosen = np.array([place[clip] for clip in clips])
    scores = run.scores
    return Scores(scores.videos[chosen], scores.labels[chosen], scores.scores[chosen], scores.is_read[chosen])


def _map(scores: Scores, chosen: NDArray[np.int64]) -> float:
    return Scores(chosen, scores.labels[chosen], scores.scores[chosen], scores.is_read[chosen]).value("map")
