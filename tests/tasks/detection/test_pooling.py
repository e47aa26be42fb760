"""Position-sensitive pooling against a plain loop written from its definition, and by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from summit_train.tasks.detection.pooling import vote
from tests.closeness import assert_near
from tests.tasks.detection.test_geometry import random_boxes

F64 = torch.float64


def _vote_by_loop(maps: torch.Tensor, boxes: torch.Tensor, grid: int) -> torch.Tensor:
    """One frame. R-FCN's psroi_pooling_op.cu with exact fractions; the box has its last pixel, not the edge behind."""
    kinds, height, width = maps.shape[0] // grid**2, maps.shape[1], maps.shape[2]
    votes = []
    for left, top, right, bottom in boxes.tolist():
        begins = [Fraction(math.floor(edge + 0.5), 16) for edge in (top, left)]
        ends = [Fraction(math.floor(edge - 1 + 0.5) + 1, 16) for edge in (bottom, right)]
        sizes = [max(end - begin, Fraction(1, 10)) / grid for begin, end in zip(begins, ends, strict=True)]
        total = maps.new_zeros(kinds)
        for i in range(grid):
            for j in range(grid):
                low = [math.floor(begins[axis] + k * sizes[axis]) for axis, k in enumerate((i, j))]
                high = [math.ceil(begins[axis] + (k + 1) * sizes[axis]) for axis, k in enumerate((i, j))]
                ys, xs = range(max(low[0], 0), min(high[0], height)), range(max(low[1], 0), min(high[1], width))
                places = [(y, x) for y in ys for x in xs]
                for y, x in places:
                    first = (i * grid + j) * kinds
                    total = total + maps[first : first + kinds, y, x] / len(places)
        votes.append(total / grid**2)
    return torch.stack(votes)


@pytest.mark.parametrize(("grid", "kinds"), [(7, 3), (3, 2), (1, 4)])
def test_values_and_gradients_are_those_of_a_plain_loop(grid: int, kinds: int) -> None:
    """Boxes over the edge, outside the maps, of less than a place, of whole places, and empty ones."""
    generator = torch.Generator().manual_seed(grid)
    maps = torch.randn(2, grid * grid * kinds, 6, 9, generator=generator, dtype=F64, requires_grad=True)
    odd = [[0, 0, 144, 96], [0, 0, 112, 112], [130, 80, 200, 150], [300, 300, 320, 330], [33.5, 40, 33.5, 40.4],
           [15.5, 16.49, 16.5, 31.5], [0, 0, 0, 0]]  # fmt: skip
    boxes = torch.cat([random_boxes(2, 8, extent=90, side=60), torch.tensor(odd, dtype=F64).expand(2, -1, -1)], 1)
    found = vote(maps, boxes, grid)
    expected = torch.stack([_vote_by_loop(*one, grid) for one in zip(maps, boxes, strict=True)])
    assert found.shape == (2, 15, kinds)
    assert_near(found, expected, 1e-13)
    assert not found[:, 11].any()  # outside
    weights = torch.randn(found.shape, generator=generator, dtype=F64)
    (ours,), (theirs,) = (torch.autograd.grad((one * weights).sum(), maps) for one in (found, expected))
    assert_near(ours, theirs, 1e-13)


def test_a_box_by_hand() -> None:
    """2 x 2 cells of one map each, all places of cell (i, j) 10 i + j; the box's corners round to 16 and 47."""
    maps = torch.tensor([0.0, 1, 10, 11]).view(1, 4, 1, 1).expand(-1, -1, 4, 4).clone()
    assert vote(maps, torch.tensor([[[16.0, 16, 48, 48]]]), 2).item() == pytest.approx(5.5)
    maps[0, 3, 2, 2] = 51  # cell (1, 1) of it is the place (2, 2) alone
    assert vote(maps, torch.tensor([[[16.4, 15.6, 48.3, 47.8]]]), 2).item() == pytest.approx(15.5)
    # From 16 to 49: cells begin at 1 and 2.03 places, so that the second has the places 2 and 3.
    assert vote(maps, torch.tensor([[[16.0, 16, 49, 49]]]), 2).item() == pytest.approx((0 + 1 + 10 + 21) / 4)
