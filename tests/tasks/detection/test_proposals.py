"""Anchors and proposals, by hand."""

from __future__ import annotations

import pytest
import torch

from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.proposals import by_anchor, in_order, make_anchors, propose
from summit_train.tasks.detection.rfcn import Maps, map_channels
from tests.closeness import assert_near

F64 = torch.float64


def _detector(**keys: object) -> DetectorSpec:
    small = {"anchor_sides": [16.0, 32.0], "anchor_ratios": [1.0], "grid": 2, "proposals": 10}
    return DetectorSpec.model_validate(small | keys)


def test_anchors_by_hand() -> None:
    """Sides first, then ratios; places row by row, with centres at 8, 24, ..."""
    anchors = make_anchors(_detector(anchor_ratios=[1.0, 4.0]), (2, 3), torch.zeros((), dtype=F64))
    assert anchors.shape == (2 * 3 * 4, 4)
    first = [[0, 0, 16, 16], [4, -8, 12, 24], [-8, -8, 24, 24], [0, -24, 16, 40]]
    assert_near(anchors[:4], torch.tensor(first, dtype=F64), 1e-15)
    assert_near(anchors[4:8] - anchors[:4], torch.tensor([[16.0, 0, 16, 0]], dtype=F64).expand(4, 4), 1e-15)
    assert_near(anchors[12:16] - anchors[:4], torch.tensor([[0.0, 16, 0, 16]], dtype=F64).expand(4, 4), 1e-15)


def test_fgfas_anchors_have_the_areas_of_their_squares() -> None:
    """Sides of 8, 16 and 32 places, ratios of height to width of 1/2, 1 and 2."""
    anchors = make_anchors(DetectorSpec(), (1, 1), torch.zeros((), dtype=F64))
    wide, high = (anchors[:, 2:] - anchors[:, :2]).unbind(1)
    assert_near((wide * high).sqrt(), torch.tensor([128.0, 256, 512], dtype=F64).repeat_interleave(3), 1e-14)
    assert_near(high / wide, torch.tensor([0.5, 1, 2], dtype=F64).repeat(3), 1e-14)


def _maps(detector: DetectorSpec, height: int, width: int, num_classes: int = 2) -> Maps:
    return Maps(*(torch.zeros(1, n, height, width, dtype=F64) for n in map_channels(detector, num_classes)))


def test_proposals_by_hand() -> None:
    """Four places; the best anchor is moved by half its width, one is shrunk to nothing, one lies under the best."""
    detector = _detector(proposals=3)
    maps = _maps(detector, 2, 2)
    maps.rpn_scores[0, 1::2] = torch.tensor([[[4.0, 3], [2, 1]], [[-1, -2], [-3, 5]]], dtype=F64)
    maps.rpn_scores[0, 0] = -1.0  # of the background: adds 1 to the first anchor's
    maps.rpn_boxes[0, 0, 0, 0] = 5.0  # the first anchor of (0, 0): 0.5 of its width to the right
    maps.rpn_boxes[0, 0, 0, 1] = -5.0 + 1.25  # that of (0, 1): 3/8 of its width to the left, which is IoU 7/9
    maps.rpn_boxes[0, 3, 1, 0] = -8.0  # that of (1, 0): 16 * exp(-3.2) = 0.65 pixels high
    boxes, are_there = propose(maps, (30, 32), detector)
    assert are_there.tolist() == [[True] * 3]
    # By score: (0, 0) 5 and the large anchor of (1, 1) 5, in the order of places; (0, 1) is suppressed, (1, 0) too low.
    expected = [[8, 0, 24, 16], [8, 8, 32, 30], [16, 16, 32, 30]]
    assert_near(boxes[0], torch.tensor(expected, dtype=F64), 1e-14)
    boxes, are_there = propose(maps, (30, 32), _detector())
    assert are_there.sum() == 6 and not boxes[0, 6:].any() and boxes.shape == (1, 8, 4)


def test_numbers_of_anchors_are_in_the_anchors_order() -> None:
    scores, deltas = (torch.arange(2.0 * 2 * n * 2 * 3).view(2, 2 * n, 2, 3) for n in (2, 4))
    detector = _detector()
    found = by_anchor(Maps(scores, deltas, scores, scores), detector)
    assert [one.shape for one in found] == [(2, 12, 2), (2, 12, 4), (12, 4)]
    # The second anchor of the place (1, 0) has the scores' channels 2, 3 and the boxes' channels 4 to 7.
    assert found[0][1, 7].tolist() == scores[1, 2:, 1, 0].tolist()
    assert found[1][1, 7].tolist() == deltas[1, 4:, 1, 0].tolist()
    assert found[2].equal(make_anchors(detector, (2, 3), deltas))


def test_scores_that_are_equal_but_for_rounding_keep_their_order() -> None:
    scores = torch.tensor([1.0, 2.0, 1.0 + 1e-15, 2.0 + 4e-16], dtype=F64)
    assert in_order(scores).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("max_boxes", [300, 2])
def test_detected_boxes_by_hand(max_boxes: int) -> None:
    """One cell, two classes. Of class 0 one box suppresses another; the same box is found as class 1, too."""
    detector = _detector(grid=1, anchor_sides=[16.0], nms=0.3, min_score=0.2, max_boxes=max_boxes)
    maps = _maps(detector, 1, 3)
    maps.class_maps[0, 1] = torch.tensor([[2.0, 3, -9]], dtype=F64)
    maps.class_maps[0, 2] = torch.tensor([[1.5, -9, 1]], dtype=F64)
    maps.box_maps[0, 4, 0, 1] = -5.0  # the second proposal moves by half its width: IoU 1/3 with the first
    maps.box_maps[0, 0] = 7.0  # of the background, which nobody reads
    output = torch.cat(maps, 1)
    (found,) = detect(output, (16, 48), detector, 2)
    first = torch.tensor([0, 2.0, 1.5], dtype=F64).softmax(0)
    second = torch.tensor([0, 3.0, -9], dtype=F64).softmax(0)
    third = torch.tensor([0, -9.0, 1], dtype=F64).softmax(0)
    expected = [[0, second[1], 8, 0, 24, 16], [1, third[2], 32, 0, 48, 16], [1, first[2], 0, 0, 16, 16]]
    assert_near(found, torch.tensor(expected[:max_boxes], dtype=torch.float32), 1e-6)
    (none,) = detect(output, (16, 48), _detector(grid=1, anchor_sides=[16.0], min_score=0.97), 2)
    assert none.shape == (0, 6) and none.dtype == torch.float32
