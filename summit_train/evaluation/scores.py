"""The scores of videos: the accuracy, and the file in a run folder that holds them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import replacing
from summit_train.core.text import numbered
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.region import Region

PREDICTIONS = "predictions"  # folder of a run


class Scored(Protocol):
    """The results of the videos of a manifest: Scores, or the Detections of a detector.

    videos: their numbers in the manifest. num_bad: those that could not be read. left_out: the classes that mean
    average precision leaves out, as no video has them. class_scores: None of a detector.
    """

    @property
    def videos(self) -> NDArray[np.int64]: ...

    @property
    def num_bad(self) -> int: ...

    @property
    def left_out(self) -> list[int]: ...

    @property
    def class_scores(self) -> Scores | None: ...

    def value(self, key: str) -> float:
        """Return the measure of this key, of those of its loss.kind; NaN where the videos have nothing to measure."""

    def of_class(self, key: str) -> NDArray[np.float64]:
        """Return the measure of each class, percent, (classes,), NaN for one without a video."""

    def save(self, path: Path, clips: Sequence[Clip], class_names: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class Scores:
    """The averaged logits of a manifest's videos, in its order.

    videos (V,): their numbers in the manifest; labels (V,), with loss.kind binary bool (V, classes); scores (V,
    classes). is_read (V,): False for a video that could not be read, whose scores are NaN and which counts as wrong.
    """

    videos: NDArray[np.int64]
    labels: NDArray[Any]
    scores: NDArray[Any]
    is_read: NDArray[np.bool_]

    @property
    def kind(self) -> str:
        """The loss.kind that the scores are of."""
        return "softmax" if self.labels.ndim == 1 else "binary"

    @property
    def hot(self) -> NDArray[np.bool_]:
        """The labels as bool (V, classes)."""
        classes = np.arange(self.scores.shape[1])
        return np.asarray(self.labels[:, None] == classes) if self.labels.ndim == 1 else self.labels

    @property
    def num_bad(self) -> int:
        return int((~self.is_read).sum())

    @property
    def left_out(self) -> list[int]:
        """The classes that mean average precision leaves out, as no video is of them; none of other measures."""
        return np.flatnonzero(~self.labels.any(0)).tolist() if self.kind == "binary" else []

    @property
    def class_scores(self) -> Scores:
        return self

    def names(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return a name for each class: those known, then numbers."""
        size = self.scores.shape[1]
        return (*known[:size], *map(str, range(len(known), size)))

    def right(self, k: int) -> NDArray[np.bool_]:
        """Mark the videos whose label is among their k highest scores, (V,); equal ones in the order of classes."""
        label_scores = np.take_along_axis(self.scores, self.labels[:, None], axis=1)
        classes = np.arange(self.scores.shape[1])[None, :]
        is_tie = (self.scores == label_scores) & (classes < self.labels[:, None])
        ahead = (self.scores > label_scores) | is_tie
        return np.asarray((ahead.sum(axis=1) < k) & self.is_read)

    def top(self, k: int) -> float:
        return 100.0 * float(np.mean(self.right(k)))

    def value(self, key: str) -> float:
        """Return top1, top5 or, with loss.kind binary, map, the mean over the classes; percent."""
        if key != "map":
            return self.top({"top1": 1, "top5": 5}[key])
        precisions = self.of_class(key)
        known = precisions[~np.isnan(precisions)]
        return float(known.mean()) if len(known) else math.nan

    def of_class(self, key: str) -> NDArray[np.float64]:
        """Return the average precision of each class for map, else its top-1 accuracy; percent."""
        if key == "map":
            return 100 * average_precisions(self.labels, np.where(self.is_read[:, None], self.scores, np.nan))
        videos = self.hot.sum(0)
        right = self.hot[self.right(1)].sum(0)
        return np.where(videos, 100 * right / np.maximum(videos, 1), np.nan)

    def save(self, path: Path, clips: Sequence[Clip], class_names: Sequence[str]) -> None:
        """Write the scores as npz, whole or not at all. `np.load` reads it without pickle.

        clips: which videos they are of, as their manifest lists them. class_names: label 0 first, empty without names.
        An end_frame of -1 is the end of the video; a width of 0 means the whole frame.
        """
        columns = {"video": self.videos, "label": self.labels, "scores": self.scores, "is_read": self.is_read}
        save_columns(path, columns, clips, class_names)


def save_columns(
    path: Path, columns: Mapping[str, NDArray[Any]], clips: Sequence[Clip], class_names: Sequence[str]
) -> None:
    """Write columns and the videos that they are of as npz; see `Scores.save`."""
    regions = np.array([clip.region for clip in clips], np.int64).reshape(-1, len(Region._fields))
    with replacing(path) as file:
        np.savez_compressed(
            file,
            **dict[str, Any](columns),
            path=np.array([clip.path for clip in clips], np.str_),
            start_frame=np.array([clip.span.start for clip in clips], np.int64),
            end_frame=np.array([clip.span.end for clip in clips], np.int64),
            reversed=np.array([clip.is_reversed for clip in clips], np.bool_),
            **dict(zip(Region._fields, regions.T, strict=True)),
            class_names=np.array(class_names, np.str_),
        )


def average_precisions(is_positive: NDArray[np.bool_], scores: NDArray[Any]) -> NDArray[np.float64]:
    """Return the average precision of each class, 0 to 1, of (V, classes); NaN for a class without a positive.

    sum_n (R_n - R_{n-1}) P_n over the distinct scores from the highest down, P_n and R_n precision and recall of the
    videos with that score or more: scikit-learn's average_precision_score. A video whose scores are NaN is never found.
    """
    precisions = np.where(is_positive.any(0), 0.0, np.nan)
    known = ~np.isnan(scores).any(1)
    for label in np.flatnonzero(is_positive[known].any(0)).tolist():
        scores_of_class = scores[known, label]
        order = np.argsort(-scores_of_class, kind="stable")
        # The last of those that share a score.
        ends = np.concatenate([np.flatnonzero(np.diff(scores_of_class[order])), [len(order) - 1]])
        true = np.cumsum(is_positive[known, label][order])[ends]
        recall = true / is_positive[:, label].sum()
        precisions[label] = np.sum(np.diff(recall, prepend=0.0) * true / (ends + 1))
    return precisions


def probabilities(logits: NDArray[Any], kind: str) -> NDArray[np.float64]:
    """Return the probabilities, by the loss.kind, of logits (..., classes)."""
    logits = logits.astype(np.float64)  # a copy, which softmax changes in place: it may have a GB
    if kind == "binary":
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)))
    logits -= logits.max(-1, keepdims=True)
    powers = np.exp(logits, out=logits)
    powers /= powers.sum(-1, keepdims=True)
    return np.asarray(powers)


def prediction_names(checkpoints: Sequence[Path]) -> list[str]:
    """Return a name for each checkpoint's scores. Checkpoints of one name, from several folders, are numbered."""
    return numbered([path.stem for path in checkpoints], "{}_{}")
