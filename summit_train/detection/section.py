"""What a report says about the detections of a run: tables, curves, and the frames with most mistakes. No torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.batches.stores import Store, open_store
from summit_train.data.manifest import read_manifest
from summit_train.data.video.augment import View, test_views
from summit_train.data.video.encode import jpeg
from summit_train.detection.detections import RANGES, Detections, read_detections
from summit_train.detection.measures import BOX, LABEL, MEGA, SCORE, Curve, Floats, Judged
from summit_train.spec import spec_from_values

MOST_FRAMES, SHORT_SIDE = 12, 240  # pixels of a picture
RECALLS = np.linspace(0, 1, 101)
FOUND, MISSED, RIGHT, WRONG = "found", "missed", "right", "wrong"


@dataclass(frozen=True)
class Marked:
    """A box on a picture, in pixels of the stored frame. kind: FOUND or MISSED, of a detection RIGHT or WRONG."""

    kind: str
    left: float
    top: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class BadFrame:
    """A frame with mistakes, and its picture as a data URI, empty where `reason` says why. size: width, height."""

    video: str
    frame: int
    missed: int
    false: int
    boxes: list[Marked]
    picture: str = ""
    size: tuple[int, int] = (0, 0)
    reason: str = ""


@dataclass(frozen=True)
class Section:
    """The detections of one checkpoint.

    motion: of each of RANGES that has boxes its name, boxes, and mean average precision in both forms. classes: name,
    boxes, average precision, and those of the ranges; the lowest first. curves: of each class with boxes. precision: of
    their mean at RECALLS. bad: the frame with most mistakes of each video.
    """

    checkpoint: str
    motion: list[tuple[str, int, float, float]]
    classes: list[tuple[str, int, list[float]]]
    curves: dict[str, Curve]
    precision: Floats
    bad: list[BadFrame]


def read_section(run: Path, spec: Mapping[str, Any], checkpoint: str) -> Section:
    """Read what a run's final evaluation found with a checkpoint. Raises UserError where that cannot be read."""
    num_classes = int(spec["model"]["num_classes"])
    found, videos, named = read_detections(run / "predictions" / f"{checkpoint}.npz", num_classes)
    names = [*named, *map(str, range(len(named), num_classes))]
    boxes = found.counted.sum(1)
    keys = ["" if name == "all" else f"_{name}" for name in RANGES]
    motion = [
        (name, int(count), found.mean(f"map{key}"), found.mean(f"map_fgfa{key}"))
        for name, key, count in zip(RANGES, keys, boxes, strict=True)
        if count
    ]
    judged = found.judged(MEGA)
    every = found.curves(judged)
    curves = {name: one for name, one in zip(names, every, strict=True) if one.positives}
    table = np.stack([found.of_class(f"map{key}") for key in keys], 1)
    order = [label for label in np.argsort(table[:, 0], kind="stable").tolist() if names[label] in curves]
    classes = [(names[label], curves[names[label]].positives, table[label].tolist()) for label in order]
    means = [at_recalls(one) for one in curves.values()]
    precision = np.mean(means, 0) if means else np.zeros(len(RECALLS))
    scores = np.array([one.best_score for one in every])
    bad = _bad_frames(found, judged, scores, videos, names, _Pictures(spec))
    return Section(checkpoint, motion, classes, curves, precision, bad)


def at_recalls(one: Curve) -> Floats:
    """Return the precision of a curve at RECALLS, 0 where it does not reach them."""
    places = np.searchsorted(one.recall, RECALLS - 1e-9)
    return np.concatenate([one.precision, [0.0]])[places]


def _bad_frames(
    found: Detections, judged: Judged, scores: Floats, videos: list[str], names: list[str], pictures: _Pictures
) -> list[BadFrame]:
    """Return the frame of each video with most missed and false boxes, of up to 12 videos, the worst first.

    scores: of each class, from which on a detection is looked at.
    """
    right, shown = judged.found >= 0, found.rows[:, SCORE] >= scores[found.rows[:, LABEL].astype(int)]
    is_found = np.zeros(len(found.truth.rows), bool)
    is_found[judged.found[right & shown]] = True
    worst = []
    for video, (rows, truth, boxes) in enumerate(found.videos_rows()):
        own = slice(*found.ends[video : video + 2].tolist())
        false = rows[shown[own] & (judged.wrong[0][own] > 0)]
        missed = truth[~is_found[boxes] & ~truth["ignored"]]
        numbers, counts = np.unique([*false[:, 0].astype(int), *missed["frame"]], return_counts=True)
        if len(numbers):
            score, frame = float(false[:, SCORE].max(initial=0)), int(numbers[counts.argmax()])
            worst.append((int(counts.max()), score, video, frame))
    bad = []
    for _, _, video, frame in sorted(worst, key=lambda one: (-one[0], -one[1], one[2]))[:MOST_FRAMES]:
        own, boxes = (slice(*ends[video : video + 2].tolist()) for ends in (found.ends, found.truth.ends))
        marked = [
            _marked(FOUND if hit else MISSED, row["box"], names[row["label"]])
            for row, hit in zip(found.truth.rows[boxes], is_found[boxes], strict=True)
            if row["frame"] == frame and not row["ignored"]
        ]
        marked += [
            _marked(RIGHT if hit else WRONG, row[BOX], f"{names[int(row[LABEL])]} {100 * row[SCORE]:.0f} %")
            for row, hit, is_shown in zip(found.rows[own], right[own], shown[own], strict=True)
            if row[0] == frame and is_shown
        ]
        kinds = [one.kind for one in marked]
        picture = pictures.of(int(found.videos[video]), videos[video], frame)
        bad.append(BadFrame(videos[video], frame, kinds.count(MISSED), kinds.count(WRONG), marked, **picture))
    return bad


def _marked(kind: str, box: NDArray[np.float32], text: str) -> Marked:
    left, top, right, bottom = np.round(box.astype(float), 1).tolist()
    return Marked(kind, left, top, right - left, bottom - top, text)


class _Pictures:
    """The frames of a run's validation videos, as far as they are on this machine."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._store: Store | None = None
        self._reason = ""
        try:
            data = spec_from_values(dict(values), "spec.yaml").data
            if not Path(data.val).exists():
                raise UserError(f"data.val: {data.val} not found (relative paths start at {Path.cwd()})")
            self._store = open_store(data, read_manifest(data.val))
        except (UserError, OSError) as error:
            self._reason = str(error)

    def of(self, place: int, path: str, frame: int) -> dict[str, Any]:
        """Return the picture of a frame and the size of the stored one, or the reason why there is none."""
        if self._store is None:
            return {"reason": self._reason}
        listed, size = self._store.manifest, (0, 0)

        def views_of(width: int, height: int) -> list[View]:
            nonlocal size
            size = width, height
            return test_views(min(SHORT_SIDE, width, height), "full", width, height)

        try:
            if place >= len(listed) or listed.stored_path(place) != path:
                raise UserError(f"{listed.source}: has changed since the evaluation; {path} is in another place")
            first = listed.span(place).start
            (frames,) = self._store.read_views(place, lambda _: np.array([[frame - first]]), views_of)
        except (UserError, OSError) as error:
            return {"reason": str(error)}
        return {"picture": "data:image/jpeg;base64," + base64.b64encode(jpeg(frames[0])).decode("ascii"), "size": size}
