"""The most confident mistakes of a run's final evaluation, with a few frames of each video where it can be found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core.text import share
from summit_train.data.video.augment import test_frames, test_views
from summit_train.evaluation.fuse import RunScores
from summit_train.evaluation.scores import Scores, probabilities
from summit_train.report.confusion import read_scores
from summit_train.report.films import Film, Videos
from summit_train.report.records import RunRecord

MOST_MISTAKES = 12
FRAMES = 16  # of a film, its short side in pixels
_SIDE = 112


@dataclass(frozen=True)
class Mistake:
    """A video taken for another class. score, own_score: softmax, in percent, of the predicted and the true class."""

    video: str
    predicted: str
    true: str
    score: str
    own_score: str
    film: Film


def read_mistakes(run: RunRecord) -> list[Mistake]:
    """Read the mistakes of the last evaluated checkpoint, the most confident first; [] for several labels a video."""
    found = read_scores(run, "softmax")
    if found is None:
        return []
    shares = probabilities(found.scores.scores, found.scores.kind)
    videos = Videos(run)
    return [_mistake(found, shares, place, videos) for place in most_confident(found.scores, shares)]


def most_confident(scores: Scores, shares: NDArray[np.float64]) -> list[int]:
    """Return the rows of up to 12 wrong videos, those with the highest of the probabilities (V, classes) first."""
    wrong = np.flatnonzero(scores.is_read & ~scores.right(1))
    highest = shares[wrong].max(1)
    return list(wrong[np.argsort(-highest, kind="stable")[:MOST_MISTAKES]].tolist())


def _mistake(found: RunScores, shares: NDArray[np.float64], place: int, videos: Videos) -> Mistake:
    scores = shares[place]
    clip = found.clips[place]
    predicted = int(scores.argmax())
    own = int(found.scores.labels[place])
    names = found.scores.names(found.class_names)
    film = videos.film(
        int(found.scores.videos[place]),
        clip,
        lambda num_frames: test_frames("uniform", num_frames, FRAMES, 1, num_clips=1),
        lambda width, height: test_views(min(_SIDE, width, height), "full", width, height),
    )
    return Mistake(str(clip), names[predicted], names[own], share(scores[predicted]), share(scores[own]), film)
