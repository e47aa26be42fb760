"""The measures of detections: worked by hand, and on random boxes against loops over the published definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.evaluation.measures import measures_of
from summit_train.tasks.detection.boxes import BOX, Boxes
from summit_train.tasks.detection.detections import RANGES, Detections
from summit_train.tasks.detection.measures import judge, motion_ious, overlaps

Row = tuple[float, ...]
SQUARE = (0.0, 0.0, 10.0, 10.0)


def truth_of(*rows: tuple[Any, ...]) -> np.ndarray:
    """frame, track, label, box, then perhaps ignored and hidden."""
    return np.array([(*row, *(False, False)[len(row) - 4 :]) for row in rows], BOX)


def found_of(videos: Sequence[tuple[Sequence[Row], np.ndarray]], num_classes: int = 2) -> Detections:
    """Detections (frame, label, score, box) and ground truth of some videos."""
    rows = [np.array(own, np.float32).reshape(-1, 7) for own, _ in videos]
    ends, box_ends = (np.cumsum([0, *map(len, parts)]) for parts in (rows, [truth for _, truth in videos]))
    boxes = Boxes(np.concatenate([truth for _, truth in videos]), box_ends)
    count = len(videos)
    return Detections(np.arange(count), np.ones(count, bool), np.concatenate(rows), ends, boxes, num_classes)


def test_the_overlap_of_two_boxes() -> None:
    """Half of each: 50 of 150. Apart, and side by side: 0."""
    others = np.array([SQUARE, (5, 0, 15, 10), (10, 0, 20, 10), (30, 30, 40, 40), (2, 3, 7, 5)], np.float32)
    np.testing.assert_allclose(overlaps(np.array(SQUARE), others), [1, 1 / 3, 0, 0, 0.1])


def test_motion_iou_is_the_mean_over_ten_frames_to_either_side() -> None:
    """A box of 10 x 10 that moves a pixel a frame: IoU (10 - d) / (10 + d) at d frames; the other track stands still.

    Of frames 0, 1 and 12 the first two are neighbours of one another, and 12 sees neither 1 nor 0 (11 frames away).
    """
    moving = [(frame, 7, 0, (frame, 0, frame + 10, 10)) for frame in range(13)]
    standing = [(frame, 3, 0, SQUARE) for frame in (0, 1, 12, 30)]
    rows = truth_of(*sorted([*moving, *standing]))
    found = motion_ious(rows)
    iou = [(10 - d) / (10 + d) for d in range(11)]
    expected = [np.mean([iou[abs(k - t)] for k in range(13) if k != t and abs(k - t) <= 10]) for t in range(13)]
    np.testing.assert_allclose(found[rows["track"] == 7], expected, rtol=1e-6)
    assert found[rows["track"] == 3].tolist() == [1, 1, 0, 0]
    assert motion_ious(rows[:0]).shape == (0,)


def test_average_precision_by_hand() -> None:
    """Two boxes of class 0; detections by score: right, wrong, right: precision 1 and 2/3, so (1 + 2/3) / 2.

    A second detection of a box that is found already is wrong. Class 1 has a box and no detection.
    """
    truth = truth_of((0, 0, 0, SQUARE), (1, 0, 0, SQUARE), (1, 1, 1, SQUARE))
    rows = [(0, 0, 0.9, *SQUARE), (0, 0, 0.8, *SQUARE), (1, 0, 0.7, 0, 0, 10, 9)]
    found = found_of([(rows, truth)])
    np.testing.assert_allclose(found.of_class("map"), [100 * (1 + 2 / 3) / 2, 0])
    assert found.value("map") == pytest.approx(100 * (5 / 6) / 2)
    first, second = found.curves()
    assert (first.best_score, second.best_score) == (pytest.approx(0.7), math.inf)
    assert (first.recall.tolist(), second.recall.tolist()) == ([0.5, 1], [])
    # From an IoU of exactly 0.5; the class must be the same.
    half = found_of([([(0, 0, 0.9, 0, 0, 10, 5), (1, 1, 0.9, *SQUARE)], truth)])
    np.testing.assert_allclose(half.of_class("map"), [50, 100])
    less = found_of([([(0, 0, 0.9, 0, 0, 10, 4.99)], truth)])
    np.testing.assert_allclose(less.of_class("map"), [0, 0])


def test_the_highest_overlap_that_is_free_is_found() -> None:
    """The detection with the higher score takes the box that it overlaps most; the other one gets the box left over."""
    truth = truth_of((0, 0, 0, SQUARE), (0, 1, 0, (2, 0, 12, 10)))
    rows = [(0, 0, 0.5, *SQUARE), (0, 0, 0.9, 0.5, 0, 10.5, 10)]
    found = found_of([(rows, truth)], 1)
    assert found.judged[0].tolist() == [1, 0]
    assert found.value("map") == 100


def test_an_ignored_box_takes_detections_without_counting() -> None:
    truth = truth_of((0, 0, 0, SQUARE), (0, 1, 0, (50, 0, 60, 10), True))
    rows = [(0, 0, 0.9, 50, 0, 60, 10), (0, 0, 0.8, 50, 0, 60, 9), (0, 0, 0.7, *SQUARE)]
    found = found_of([(rows, truth)], 1)
    assert found.value("map") == 100
    assert found_of([([(0, 0, 0.9, 50, 0, 60, 4), *rows[2:]], truth)], 1).value("map") == 50
    both = truth_of((0, 0, 0, (0, 0, 10, 9)), (0, 1, 0, SQUARE, True))
    assert found_of([([(0, 0, 0.9, *SQUARE)], both)], 1).value("map") == 100


def test_each_range_counts_its_own_boxes() -> None:
    """Two objects stand still, hidden in frame 0, and one is alone in frame 9, so it counts as fast.

    Missing the fast box costs only there. A detection that lies nearer to a slow box is no mistake among the fast.
    """
    still = [(frame, track, 0, (20 * track, 0, 20 * track + 10, 10), False, frame == 0)
             for frame in (0, 1) for track in (0, 1)]  # fmt: skip
    truth = truth_of(*still, (9, 2, 0, SQUARE))
    right = [(frame, 0, 0.9, *box) for frame, _, _, box, *_ in still if frame]
    # Overlaps the slow box of frame 1, and is false there; in frame 5, without a box, it counts by shares.
    near, nowhere = (1, 0, 0.95, 0, 0, 10, 4), (5, 0, 0.99, *SQUARE)
    found = found_of([([*right, near], truth)], 1)
    values = measures_of("detection").values(found)
    # Two right, one wrong before them: precisions 1/2 and 2/3, of 5, 4 and 1 boxes.
    assert values["map"] == pytest.approx(100 * (2 / 3 + 2 / 3) / 5)
    assert values["map_slow"] == pytest.approx(100 * (2 / 3 + 2 / 3) / 4)
    assert (values["map_medium"], values["map_fast"], values["map_hidden"]) == (None, 0, 0)
    shares = {name: row.mean() for name, row in zip(RANGES, found.counted, strict=True)}
    assert shares == {"all": 1, "slow": 0.8, "medium": 0, "fast": 0.2, "hidden": 0.4}
    apart = found_of([([nowhere, *right], truth)], 1)
    assert apart.value("map_slow") == pytest.approx(100 * 2 * (2 / 2.8) / 4)
    assert apart.left_out == [] and found_of([([], truth)], 3).left_out == [1, 2]
    _, wrong = found.judged
    assert wrong[:, 2].tolist() == [1, 1, 0, 0, 0]  # the false one: among all and the slow
    # As near to a box of the range as to one outside it: the share of the boxes outside.
    twice = truth_of((0, 0, 0, SQUARE), (0, 1, 0, SQUARE), (0, 2, 0, SQUARE))
    miss = np.array([(0, 0, 0.9, 0, 0, 10, 4)], np.float32)
    _, wrong = judge(miss, twice, np.array([[True, False, False]]), np.array([0.1]))
    assert wrong == pytest.approx(2 / 3)


# The evaluator, from its published definition: a loop for each sentence, and nothing shared with the product.


def iou_of(one: Sequence[float], other: Sequence[float], pixel: float) -> float:
    """Of boxes given by their first and last pixel; `pixel` is what a side has beyond the difference."""
    sides = [min(one[i + 2], other[i + 2]) - max(one[i], other[i]) + pixel for i in (0, 1)]
    if min(sides) <= 0:
        return 0.0
    areas = [(box[2] - box[0] + pixel) * (box[3] - box[1] + pixel) for box in (one, other)]
    return sides[0] * sides[1] / (sum(areas) - sides[0] * sides[1])


def area_below(found: list[tuple[float, float, float]], positives: int) -> float:
    """found: (score, right, wrong). The precision at a recall is the highest at this recall or more."""
    points, right, wrong = [], 0.0, 0.0
    for _, is_right, is_wrong in sorted(found, key=lambda one: -one[0]):
        right, wrong = right + is_right, wrong + is_wrong
        points.append((right / positives, right / (right + wrong) if right + wrong else 0.0))
    area, before = 0.0, 0.0
    for place, (recall, _) in enumerate(points):
        area += (recall - before) * max(precision for _, precision in points[place:])
        before = recall
    return area


Frame = tuple[list[tuple[int, float, list[float]]], list[tuple[int, list[float], bool]]]


def by_mega(frames: Sequence[Frame], label: int, share: float, pixel: float) -> float:
    """Frames of detections (label, score, box) and boxes (label, box, whether it is in the range)."""
    results, positives = [], 0
    for detections, boxes in frames:
        own = [(box, inside) for other, box, inside in boxes if other == label]
        positives += sum(inside for _, inside in own)
        taken = set[int]()
        for _, score, place in sorted((one for one in detections if one[0] == label), key=lambda one: -one[1]):
            ious = [iou_of(place, box, pixel) for box, _ in own]
            free = [k for k in range(len(own)) if k not in taken and ious[k] >= 0.5]
            if free:
                best = max(free, key=lambda k: ious[k])
                taken.add(best)
                results.append((score, float(own[best][1]), 0.0))
                continue
            within = max((ious[k] for k in range(len(own)) if own[k][1]), default=-1.0)
            beyond = max((ious[k] for k in range(len(own)) if not own[k][1]), default=-1.0)
            if not own:
                wrong = share if share < 1 else 1.0
            elif within == beyond:
                wrong = sum(not inside for _, inside in own) / len(own)
            else:
                wrong = float(within > beyond)
            results.append((score, 0.0, wrong))
    return area_below(results, positives) if positives else math.nan


def random_videos(generator: np.random.Generator) -> Detections:
    """Two videos with tracks of all speeds; some detections near the boxes, some of another class, some anywhere."""
    videos = []
    for _ in range(2):
        truth, rows = [], []
        for track in range(int(generator.integers(0, 4))):
            box = generator.uniform((0, 0, 20, 20), (10, 10, 60, 60))
            for frame in range(int(generator.integers(1, 6))):
                box = box + generator.normal(0, [0.1, 2, 8][track % 3])
                truth.append(
                    (frame, track, int(generator.integers(2)), tuple(box), False, bool(generator.random() < 0.3))
                )
        for frame, _, label, box, *_ in truth:
            for _ in range(int(generator.integers(0, 4))):
                other = label if generator.random() < 0.8 else 1 - label
                rows.append((frame, other, generator.random(), *(np.array(box) + generator.normal(0, 3, 4))))
        for _ in range(int(generator.integers(0, 5))):
            rows.append((int(generator.integers(0, 8)), int(generator.integers(2)), generator.random(),
                         *generator.uniform((0, 0, 20, 20), (15, 15, 60, 60))))  # fmt: skip
        rows.sort(key=lambda row: row[0])
        videos.append((rows, truth_of(*sorted(truth, key=lambda row: row[0]))))
    return found_of(videos)


def frames_of(found: Detections, inside: np.ndarray) -> list[Frame]:
    """The frames of all videos as the evaluator's loop takes them; boxes end with their last pixel there."""
    pixels = np.array([0, 0, 1, 1])
    frames = []
    for own, places in found.parts():
        rows, truth = found.rows[own], found.truth.rows[places]
        for number in sorted({*rows[:, 0].astype(int).tolist(), *truth["frame"].tolist()}):
            frames.append((
                [(int(row[1]), float(row[2]), (row[3:].astype(float) - pixels).tolist())
                 for row in rows[rows[:, 0] == number]],
                [(int(row["label"]), (row["box"].astype(float) - pixels).tolist(), bool(own))
                 for row, own in zip(truth, inside[places], strict=True) if row["frame"] == number],
            ))  # fmt: skip
    return frames


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_measures_are_those_of_the_published_evaluator(seed: int) -> None:
    """On random boxes, in each range, for each class."""
    found = random_videos(np.random.default_rng(seed))
    for name, inside in zip(RANGES, found.counted, strict=True):
        frames, share = frames_of(found, inside), inside.mean() if len(inside) else 0.0
        expected = [100 * by_mega(frames, label, share, 1) for label in (0, 1)]
        measured = found.of_class("map" if name == "all" else f"map_{name}")
        np.testing.assert_allclose(measured, expected, rtol=1e-6, err_msg=name)


def test_megas_second_pixel_is_the_only_difference_to_its_code() -> None:
    """Its code adds a pixel to both sides of boxes twice: with boxes a pixel larger the figures are the same."""
    found = random_videos(np.random.default_rng(3))
    larger = found.truth.rows.copy()
    larger["box"][:, 2:] += 1
    rows = found.rows + np.array([0, 0, 0, 0, 0, 1, 1], np.float32)
    wide = Detections(found.videos, found.is_read, rows, found.ends, Boxes(larger, found.truth.ends), 2)
    expected = [100 * by_mega(frames_of(found, found.counted[0]), label, 1.0, 2) for label in (0, 1)]
    np.testing.assert_allclose(wide.of_class("map"), expected, rtol=1e-6)


def test_videos_without_detections_or_boxes_are_judged() -> None:
    places, wrong = judge(np.zeros((0, 7), np.float32), truth_of(), np.zeros((5, 0), bool), np.zeros(5))
    assert places.shape == (0,) and wrong.shape == (5, 0)
    found = found_of([([], truth_of()), ([(0, 0, 0.5, *SQUARE)], truth_of())])
    assert all(value is None for value in measures_of("detection").values(found).values())
    assert found.left_out == [0, 1]
