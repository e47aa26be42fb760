"""Boxes: overlaps worked by hand, coding there and back, and the suppression of overlaps against a plain loop."""

from __future__ import annotations

from math import log

import pytest
import torch

from summit_train.tasks.detection.geometry import clipped, decode, encode, intersections, iou, suppress
from tests.closeness import assert_near

F64 = torch.float64


def random_boxes(*shape: int, extent: float = 100, side: float = 40, seed: int = 0) -> torch.Tensor:
    """Boxes (*shape, 4) whose left and top edges are below `extent` and whose sides are 1 to `side` + 1 pixels."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(*shape, 2, generator=generator, dtype=F64) * extent
    return torch.cat([corner, corner + 1 + side * torch.rand(*shape, 2, generator=generator, dtype=F64)], -1)


def test_overlaps_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 2], [-1, -1, -1, -1]], dtype=F64)
    others = torch.tensor([[2.0, 1, 6, 3], [4, 0, 5, 1], [0, 0, 4, 2], [-1, -1, -1, -1]], dtype=F64)
    assert intersections(boxes, others).tolist() == [[2, 0, 8, 0], [0, 0, 0, 0]]
    assert_near(iou(boxes, others), [[2 / 14, 0, 1, 0], [0, 0, 0, 0]], 1e-15)


def test_codes_by_hand_and_back() -> None:
    """A reference 10 wide and 20 high at (0, 0); a box whose centre is 5 right and 10 below, 20 wide and 10 high."""
    reference, box = torch.tensor([[0.0, 0, 10, 20]], dtype=F64), torch.tensor([[0.0, 15, 20, 25]], dtype=F64)
    assert_near(encode(box, reference, (1, 1, 1, 1)), [[0.5, 0.5, log(2), -log(2)]], 1e-15)
    assert_near(encode(box, reference, (0.1, 0.1, 0.2, 0.4)), [[5, 5, 5 * log(2), -2.5 * log(2)]], 1e-15)
    boxes, references = random_boxes(50), random_boxes(50, seed=1)
    std = (0.1, 0.1, 0.4, 0.4)
    assert_near(decode(encode(boxes, references, std), references, std), boxes, 1e-13)
    wild = decode(torch.tensor([[0.0, 0, 1e4, 1]], dtype=F64), reference, (1, 1, 1, 1))
    assert_near(wild[:, 2] - wild[:, 0], [10 * 1000 / 16], 1e-12)


def test_boxes_are_cut_at_the_edges_of_the_frame() -> None:
    boxes = torch.tensor([[-3.0, 2, 50, 20], [41, 31, 45, 35]])
    assert clipped(boxes, (30, 40)).tolist() == [[0, 2, 40, 20], [40, 30, 40, 30]]


def _suppress_by_loop(boxes: torch.Tensor, threshold: float, most: int, alive: list[bool]) -> list[int]:
    kept: list[int] = []
    for number, box in enumerate(boxes.tolist()):
        for other in kept:
            x0, y0, x1, y1 = boxes[other].tolist()
            wide, high = min(box[2], x1) - max(box[0], x0), min(box[3], y1) - max(box[1], y0)
            common = max(wide, 0) * max(high, 0)
            both = (box[2] - box[0]) * (box[3] - box[1]) + (x1 - x0) * (y1 - y0)
            if common / (both - common) > threshold:
                break
        else:
            if alive[number]:
                kept.append(number)
    return kept[:most]


@pytest.mark.parametrize(("threshold", "most"), [(0.7, 300), (0.3, 300), (0.3, 12), (0.0, 50)])
def test_suppression_is_that_of_a_plain_loop(threshold: float, most: int) -> None:
    """Of three sets at once, one of which has dead boxes."""
    boxes = random_boxes(3, 200)
    alive = torch.ones(3, 200, dtype=torch.bool)
    alive[1, ::3] = False
    places, are_there = suppress(boxes, threshold, most, alive)
    assert places.shape == (3, min(most, 200))
    for number in range(3):
        expected = _suppress_by_loop(boxes[number], threshold, most, alive[number].tolist())
        assert places[number][are_there[number]].tolist() == expected
        assert len(expected) == most or len(expected) < 200


def test_a_box_that_overlaps_by_the_threshold_itself_is_kept() -> None:
    boxes = torch.tensor([[[0.0, 0, 4, 1], [2, 0, 4, 1], [2, 0, 4.1, 1]]], dtype=F64)
    _, are_there = suppress(boxes[:, :2], 0.5, 2, torch.ones(1, 2))  # IoU 1/2
    assert are_there.tolist() == [[True, True]]
    _, are_there = suppress(boxes[:, 1:], 0.5, 2, torch.ones(1, 2))
    assert are_there.tolist() == [[True, False]]
