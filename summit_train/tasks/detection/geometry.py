"""Boxes as tensors (..., 4): left, top, right, bottom edge in pixels, so that 0, 0, 1, 1 is the first pixel."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

# A decoded side is at most this many times that of its reference, so that no exponential overflows (as in torchvision).
_MOST_GROWTH = 1000 / 16
_ROUNDS = 32  # of suppression, between two questions whether there is more to do


def areas(boxes: torch.Tensor) -> torch.Tensor:
    """Return the areas (...) of boxes (..., 4)."""
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def intersections(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the common areas (..., n, m) of boxes (..., n, 4) and (..., m, 4)."""
    near = torch.maximum(boxes[..., :, None, :2], others[..., None, :, :2])
    far = torch.minimum(boxes[..., :, None, 2:], others[..., None, :, 2:])
    return (far - near).clamp(min=0).prod(-1)


def iou(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return intersection over union (..., n, m) of boxes (..., n, 4) and (..., m, 4); 0 of two empty ones."""
    common = intersections(boxes, others)
    union = areas(boxes)[..., :, None] + areas(others)[..., None, :] - common
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def encode(boxes: torch.Tensor, references: torch.Tensor, std: tuple[float, ...]) -> torch.Tensor:
    """Return boxes relative to references (Girshick et al., "R-CNN", appendix C), divided by `std`:

    (x - x_r) / w_r,  (y - y_r) / h_r,  log(w / w_r),  log(h / h_r),   x and y those of the centres.
    """
    sides = references[..., 2:] - references[..., :2]
    box_sides = boxes[..., 2:] - boxes[..., :2]
    moves = (boxes[..., :2] + boxes[..., 2:] - references[..., :2] - references[..., 2:]) / (2 * sides)
    return torch.cat([moves, (box_sides / sides).log()], -1) / moves.new_tensor(std)


def decode(deltas: torch.Tensor, references: torch.Tensor, std: tuple[float, ...]) -> torch.Tensor:
    """Return the boxes that `encode` makes `deltas` of."""
    moves, growth = (deltas * deltas.new_tensor(std)).chunk(2, -1)
    sides = references[..., 2:] - references[..., :2]
    centres = references[..., :2] + sides / 2 + moves * sides
    halves = sides / 2 * growth.clamp(max=math.log(_MOST_GROWTH)).exp()
    return torch.cat([centres - halves, centres + halves], -1)


def clipped(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the parts of boxes that are inside a frame of (height, width) pixels."""
    height, width = size
    return torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))


def suppress(
    boxes_FN4: torch.Tensor, threshold: float, most: int, alive_FN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Suppress overlaps, greedily, in each of F sets of boxes, which are in descending order of their scores.

    Each box that is kept suppresses those after it that it overlaps by more than `threshold` in IoU. Return the places
    (F, k) of the first `most` that are kept, and which of these there are (F, k): a set may end before. Only boxes that
    are `alive` take part. The sets advance together, and the host asks the device only now and then whether any lives.
    """
    left, top, right, bottom = (edge.contiguous() for edge in boxes_FN4.unbind(-1))
    area = areas(boxes_FN4)
    n = boxes_FN4.shape[1]
    # The first box that lives has the highest number; 0 is dead.
    lives = torch.arange(n, 0, -1, device=boxes_FN4.device, dtype=torch.float32) * alive_FN
    places = []
    are_there = []
    for number in range(min(most, n)):
        if number % _ROUNDS == 0 and number and not lives.any():
            break
        life, place = lives.max(1, keepdim=True)
        x0, y0, x1, y1 = (edge.gather(1, place) for edge in (left, top, right, bottom))
        wide = (torch.minimum(right, x1) - torch.maximum(left, x0)).clamp_(min=0)
        common = (torch.minimum(bottom, y1) - torch.maximum(top, y0)).clamp_(min=0).mul_(wide)
        # common / (area + its area - common) > threshold
        over = common * (1 + threshold) > (area + area.gather(1, place)) * threshold
        lives = lives.masked_fill_(over, 0).scatter_(1, place, 0)
        places.append(place)
        are_there.append(life > 0)
    missing = (0, min(most, n) - len(places))
    return functional.pad(torch.cat(places, 1), missing), functional.pad(torch.cat(are_there, 1), missing)
