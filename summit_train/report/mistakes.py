"""The most confident mistakes of a run's final evaluation, with a few frames of each video where it can be found."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.text import share
from summit_train.data.batches.stores import Store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.augment import test_frames, test_views
from summit_train.data.video.clips import Choose, ViewsOf
from summit_train.data.video.encode import jpeg
from summit_train.evaluation.fuse import RunScores
from summit_train.evaluation.scores import Scores, probabilities
from summit_train.report.confusion import all_names, read_scores
from summit_train.report.records import RunRecord
from summit_train.spec import spec_from_values

MOST_MISTAKES = 12
_FRAMES, _SIDE, _GAP = 5, 96, 3  # pixels


@dataclass(frozen=True)
class Mistake:
    """A video taken for another class. score, own_score: softmax, in percent, of the predicted and the true class.

    strip: frames of the video as a data URI; empty where `reason` says why there are none.
    """

    video: str
    predicted: str
    true: str
    score: str
    own_score: str
    strip: str
    reason: str


@dataclass(frozen=True)
class Mistakes:
    """The mistakes, the most confident first, and why all pictures are missing (empty if some are shown)."""

    rows: list[Mistake]
    reason: str


def read_mistakes(run: RunRecord) -> Mistakes | None:
    """Read the mistakes of the last evaluated checkpoint; None without scores or for several labels a video."""
    found = read_scores(run, "softmax")
    if found is None:
        return None
    shares = probabilities(found.scores.scores, found.scores.kind)
    videos = Videos(run)
    rows = [_mistake(found, shares, place, videos) for place in most_confident(found.scores, shares)]
    has_none = rows and not any(row.strip for row in rows)
    return Mistakes(rows, rows[0].reason if has_none else "")


def most_confident(scores: Scores, shares: NDArray[np.float64]) -> list[int]:
    """Return the rows of up to 12 wrong videos, those with the highest of the probabilities (V, classes) first."""
    wrong = np.flatnonzero(scores.is_read & ~scores.right(1))
    highest = shares[wrong].max(1)
    return list(wrong[np.argsort(-highest, kind="stable")[:MOST_MISTAKES]].tolist())


def _mistake(found: RunScores, shares: NDArray[np.float64], place: int, videos: Videos) -> Mistake:
    scores, clip = shares[place], found.clips[place]
    predicted, own = int(scores.argmax()), int(found.scores.labels[place])
    names = all_names(found.class_names, len(scores))
    strip, reason = videos.picture(
        int(found.scores.videos[place]),
        clip,
        lambda num_frames: test_frames("uniform", num_frames, _FRAMES, 1, num_clips=1),
        lambda width, height: test_views(_SIDE, "full", width, height),
    )
    return Mistake(str(clip), names[predicted], names[own], share(scores[predicted]), share(scores[own]), strip, reason)


class Videos:
    """The videos of a run's validation set, as far as they are on this machine."""

    def __init__(self, run: RunRecord) -> None:
        self._store: Store | None = None
        self._reason = ""
        try:
            spec = spec_from_values(dict(run.spec), str(run.path / "spec.yaml"))
            if spec.data.modality != "rgb":
                raise UserError("the network sees optical flow")
            self._store = Dataset.open(spec, "val").store
        except (UserError, OSError) as error:
            self._reason = str(error)

    def picture(self, place: int, clip: Clip, choose: Choose, views_of: ViewsOf) -> tuple[str, str]:
        """Return frames of the clip at this place of the set, side by side, as a data URI of a JPEG.

        Where they cannot be read it is empty, and the second one says why.
        """
        if self._store is None:
            return "", self._reason
        listed = self._store.manifest
        try:
            if place >= len(listed) or clip != listed.clip(place):
                raise UserError(f"{listed.source}: has changed since the evaluation; {clip} is in another place")
            (frames,) = self._store.read_views(place, choose, views_of).views
        except (UserError, OSError) as error:
            return "", str(error)
        gap = np.full((frames.shape[1], _GAP, 3), 255, np.uint8)
        ordered = frames[::-1] if clip.is_reversed else frames
        picture = np.concatenate([part for frame in ordered for part in (frame, gap)][:-1], axis=1)
        return "data:image/jpeg;base64," + base64.b64encode(jpeg(picture)).decode("ascii"), ""
