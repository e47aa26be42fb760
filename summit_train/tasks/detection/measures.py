"""How well boxes are found: motion IoU, and average precision as MEGA's evaluator computes it. numpy alone.

A box is (left, top, right, bottom) in pixels with continuous edges: that of the first pixel alone is 0, 0, 1, 1. The
evaluator's "+ 1" for boxes of whole pixels is in these edges already.

Source: Chen et al., github.com/Scalsol/mega.pytorch, mega_core/data/datasets/evaluation/vid/vid_eval.py. There boxes of
whole pixels are made a pixel larger twice, by the evaluator and by its function for the IoU; here once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Bools = NDArray[np.bool_]
# What became of N detections in R ranges: the box that each finds, -1 without any, int64 (N,), and how much it counts
# as a false detection in each range, float32 (R, N).
Judged = tuple[Places, NDArray[np.float32]]

LEAST_IOU = 0.5  # of a detection with the box that it finds
NEARBY = 10  # frames before and after, of motion IoU
SLOW, FAST = 0.9, 0.7  # motion IoU above the one, below the other; medium between them, both included
# The columns of a detection, float32 (n, 7): its frame's number in the video, label, score, box.
FRAME, LABEL, SCORE, BOX = 0, 1, 2, slice(3, 7)
COLUMNS = 7


def overlaps(one: NDArray[np.float32], other: NDArray[np.float32]) -> Floats:
    """Return the intersection over union of boxes (..., 4) with those of the same place."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    ends, starts = np.minimum(one[..., 2:], other[..., 2:]), np.maximum(one[..., :2], other[..., :2])
    shared = np.maximum(ends - starts, 0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other)]
    return np.asarray(shared / (areas[0] + areas[1] - shared))


def motion_ious(rows: NDArray[np.void]) -> Floats:
    """Return the motion IoU of each box (m,) of one video: slow objects are near 1.

    Zhu et al., "Flow-Guided Feature Aggregation" (2017), section 5: the mean IoU of the box in frame t and those of the
    same track in frames t - 10 to t + 10 without t, as many as there are. 0 where there is none: its file of the values
    has no entry for those, and the evaluators read that as 0.
    """
    order = np.lexsort((rows["frame"], rows["track"]))
    track, frame, boxes = (rows[name][order] for name in ("track", "frame", "box"))
    sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
    for step in range(1, NEARBY + 1):
        early = np.flatnonzero((track[step:] == track[:-step]) & (frame[step:] - frame[:-step] <= NEARBY))
        found = overlaps(boxes[early], boxes[early + step])
        for places in (early, early + step):
            sums[places] += found
            counts[places] += 1
    means = np.empty(len(rows))
    means[order] = sums / np.maximum(counts, 1)
    return means


def judge(detections: NDArray[np.float32], truth: NDArray[np.void], counted: Bools, shares: Floats) -> Judged:
    """Compare the detections (n, 7) of one video with its boxes, which are sorted by frame.

    counted (R, m): whether a box belongs to a range. shares (R,): the ranges' shares of all boxes of the data set. In
    each frame and class, from the highest score down, a detection finds the box of highest IoU that is not found yet.
    One that finds none counts in a range as false if the box of its class that it overlaps most belongs to it, by a
    share if that is undecided: of the boxes outside the range, or without a box there, of the range in the data set. An
    ignored box is never found; detections that overlap it enough, and find no other box, do not count.
    """
    num = len(detections)
    frames = detections[:, FRAME].astype(np.int64)
    first, last = (np.searchsorted(truth["frame"], frames, side) for side in ("left", "right"))
    counts = last - first
    own = np.repeat(np.arange(num), counts)  # the pairs of a detection and a box of its frame
    box = np.arange(len(own)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    is_class = detections[own, LABEL] == truth["label"][box]
    iou = overlaps(detections[own, BOX], truth["box"][box])
    ignored = truth["ignored"][box]
    hits = is_class & (iou >= LEAST_IOU)

    candidates = np.flatnonzero(hits & ~ignored)
    scores = detections[own[candidates], SCORE]
    candidates = candidates[np.lexsort((box[candidates], -iou[candidates], own[candidates], -scores))]
    matched = [-1] * num
    is_found = [False] * len(truth)
    for detection, target in zip(own[candidates].tolist(), box[candidates].tolist(), strict=True):
        if matched[detection] < 0 and not is_found[target]:
            matched[detection] = target
            is_found[target] = True
    found = np.array(matched, np.int64)
    excused = found >= 0
    excused[own[hits & ignored]] = True

    near = ~ignored & is_class
    own, box, iou = own[near], box[near], iou[near]
    starts = np.flatnonzero(np.diff(own, prepend=-1))
    having = own[starts]
    wrong = np.repeat(shares[:, None], num, 1).astype(np.float32)
    for weights, inside in zip(wrong, counted[:, box], strict=True):
        if len(having):
            within, beyond = (np.maximum.reduceat(np.where(side, iou, -1), starts) for side in (inside, ~inside))
            outside = np.add.reduceat(~inside, starts, dtype=np.float64) / np.diff(starts, append=len(own))
            weights[having] = np.where(within == beyond, outside, within > beyond)
        weights[excused] = 0
    return found, wrong


@dataclass(frozen=True)
class Curve:
    """Recall and precision at each box found, from the highest score down, of one class in one range.

    positives: its boxes. precision: the highest at this recall or more. scores: of the detections that find the boxes.
    """

    positives: int
    recall: Floats
    precision: Floats
    scores: NDArray[np.float32]

    @property
    def average_precision(self) -> float:
        """The area below all points, 0 to 1; NaN without a box."""
        return float(self.precision.sum() / self.positives) if self.positives else np.nan

    @property
    def best_score(self) -> float:
        """The score from which on the detections have the highest F1; infinite if none is right."""
        # The mean of both reciprocals is lowest where precision is its own highest, not a later one's.
        return float(self.scores[np.argmin(1 / self.precision + 1 / self.recall)]) if len(self.scores) else np.inf


def curve(scores: NDArray[np.float32], right: Bools, wrong: NDArray[np.float32], positives: int) -> Curve:
    """Return the curve of detections, from the highest score down: whether each is right, how much of it is wrong."""
    places = np.flatnonzero(right)
    true = np.arange(1, len(places) + 1)
    precision = true / (true + np.cumsum(wrong, dtype=np.float64)[places])
    # Between two right detections precision only falls, so the highest of the later ones is at a right one.
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    return Curve(positives, true / max(1, positives), highest, scores[places])
