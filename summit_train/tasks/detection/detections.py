"""Detections in videos and the ground truth: their measures, and the file in a run folder. Needs no torch."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import regular
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.scores import save_columns
from summit_train.tasks.detection import measures
from summit_train.tasks.detection.boxes import BOX, Boxes
from summit_train.tasks.detection.measures import LABEL, SCORE, Curve, Judged, curve, judge, motion_ious

RANGES = ("all", "slow", "medium", "fast", "hidden")  # which boxes of the ground truth count


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections in V videos of a manifest, in its order, and the ground truth.

    videos (V,): their places in the manifest. is_read (V,): False for a video that could not be read, whose objects are
    all missed. rows: float32 (N, 7), by video and in it by frame: frame, label, score, left, top, right, bottom in
    pixels of the stored frame; video v has rows[ends[v]:ends[v + 1]]. truth: the boxes of the same videos.
    """

    videos: NDArray[np.int64]
    is_read: NDArray[np.bool_]
    rows: NDArray[np.float32]
    ends: NDArray[np.int64]
    truth: Boxes
    num_classes: int

    @property
    def num_bad(self) -> int:
        return int((~self.is_read).sum())

    @property
    def class_scores(self) -> None:
        """Detections are of boxes: a video as a whole has no scores."""

    @property
    def left_out(self) -> list[int]:
        return list(np.flatnonzero(self._positives[0] == 0).tolist())

    def value(self, key: str) -> float:
        """Return the mean average precision, in percent, over the classes with boxes; NaN without any."""
        percents = self.of_class(key)
        return float(np.nanmean(percents)) if np.isfinite(percents).any() else np.nan

    def of_class(self, key: str) -> NDArray[np.float64]:
        """Return the average precision of each class, in percent, NaN for one without a box. key: of a measure."""
        curves = self.curves(RANGES.index(key.partition("_")[2] or "all"))
        return 100 * np.array([one.average_precision for one in curves])

    def curves(self, number: int = 0) -> list[Curve]:
        """Return the curve of each class in one of RANGES."""
        found, wrong_by_range = self.judged
        wrong = wrong_by_range[number]
        right = np.pad(self.counted[number], (0, 1))[found]  # one that finds no box, -1, has the last
        positives, scores = self._positives[number].tolist(), self.rows[:, SCORE]
        return [curve(scores[own], right[own], wrong[own], n) for own, n in zip(self._order, positives, strict=True)]

    def parts(self) -> list[tuple[slice, slice]]:
        """Return the places of each video's detections and of its ground truth."""
        ends = (zip(places[:-1].tolist(), places[1:].tolist(), strict=True) for places in (self.ends, self.truth.ends))
        return [(slice(*rows), slice(*boxes)) for rows, boxes in zip(*ends, strict=True)]

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """Mark the boxes of the ground truth that count in each of RANGES, (5, B)."""
        motion = np.concatenate([np.zeros(0), *(motion_ious(self.truth.rows[boxes]) for _, boxes in self.parts())])
        is_slow = motion > measures.SLOW
        is_fast = motion < measures.FAST
        hidden = self.truth.rows["hidden"]
        parts = np.stack([np.ones_like(hidden), is_slow, ~is_slow & ~is_fast, is_fast, hidden])
        return np.asarray(parts & ~self.truth.rows["ignored"])

    @cached_property
    def judged(self) -> Judged:
        """Judge the detections of all videos; see `judge`. The boxes that they find are places among all."""
        shares = self.counted.sum(1) / max(1, (~self.truth.rows["ignored"]).sum())
        found, wrong = [np.zeros(0, np.int64)], [np.zeros((len(RANGES), 0), np.float32)]
        for rows, boxes in self.parts():
            own, weights = judge(self.rows[rows], self.truth.rows[boxes], self.counted[:, boxes], shares)
            found.append(np.where(own < 0, -1, own + boxes.start))
            wrong.append(weights)
        return np.concatenate(found), np.concatenate(wrong, 1)

    @cached_property
    def _positives(self) -> NDArray[np.int64]:
        """The number of boxes of each class in each range, (5, classes)."""
        labels = self.truth.rows["label"]
        return np.stack([np.bincount(labels[own], minlength=self.num_classes) for own in self.counted])

    @cached_property
    def _order(self) -> list[NDArray[np.int64]]:
        """The places of each class's detections, from the highest score down."""
        chosen = [np.flatnonzero(self.rows[:, LABEL] == label) for label in range(self.num_classes)]
        return [places[np.argsort(-self.rows[places, SCORE], kind="stable")] for places in chosen]

    def save(self, path: Path, clips: Sequence[Clip], class_names: Sequence[str]) -> None:
        """Write the detections and the ground truth as npz, whole or not at all. `np.load` reads it without pickle."""
        columns = {"video": self.videos, "is_read": self.is_read, "detections": self.rows, "ends": self.ends}
        truth = {"boxes": self.truth.rows, "box_ends": self.truth.ends}
        save_columns(path, columns | truth, clips, class_names)


def read_detections(path: Path, num_classes: int) -> tuple[Detections, list[str], tuple[str, ...]]:
    """Read a file of `Detections.save`, with its videos' paths and class names. Raises UserError for a damaged one."""
    try:
        with open(path, "rb", opener=regular) as content, np.load(content, allow_pickle=False) as file:
            rows, ends, boxes, box_ends = (file[name] for name in ("detections", "ends", "boxes", "box_ends"))
            if rows.shape != (ends[-1], measures.COLUMNS) or boxes.dtype != BOX or len(boxes) != box_ends[-1]:
                raise ValueError(f"detections of shape {rows.shape}, {len(boxes)} boxes of type {boxes.dtype}")
            found = Detections(file["video"], file["is_read"], rows, ends, Boxes(boxes, box_ends), num_classes)
            return found, file["path"].tolist(), tuple(file["class_names"].tolist())
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: unreadable ({error}); `summit-train eval` writes it again") from error
