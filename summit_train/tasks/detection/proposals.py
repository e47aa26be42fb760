"""The region proposal network (Ren et al., "Faster R-CNN", section 3.1): anchors and proposals, with FGFA's numbers."""

from __future__ import annotations

from itertools import product

import torch

from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.geometry import clipped, decode, suppress
from summit_train.tasks.detection.rfcn import STRIDE, Maps

ANCHOR_STD = (0.1, 0.1, 0.4, 0.4)  # of the coded boxes
_CANDIDATES = 6000  # anchors with the highest scores
_SUPPRESSED_AT = 0.7  # IoU
_MIN_SIDE = 1.0  # pixels


def make_anchors(detector: DetectorSpec, places: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the anchors (h * w * A, 4) of h x w places, row by row, on the device and in the type of `like`.

    The centre of the place (y, x) is (16 y + 8, 16 x + 8) in pixels. Anchor number i * len(ratios) + j has the area of
    the square of side s_i and the ratio r_j, height over width: it is s_i / sqrt(r_j) wide and s_i * sqrt(r_j) high.
    (py-faster-rcnn's generate_anchors.py rounds the sides to pixels.)
    """
    sides_and_ratios = product(detector.anchor_sides, detector.anchor_ratios)
    halves_A2 = like.new_tensor([(side * ratio**-0.5, side * ratio**0.5) for side, ratio in sides_and_ratios]) / 2
    y, x = (STRIDE * (torch.arange(n, device=like.device).to(like.dtype) + 0.5) for n in places)
    centres_P2 = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 1, 2)
    return torch.cat([centres_P2 - halves_A2, centres_P2 + halves_A2], -1).view(-1, 4)


def by_anchor(maps: Maps, detector: DetectorSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores (F, N, 2) and coded boxes (F, N, 4) of the N anchors in F frames, and the anchors (N, 4)."""
    scores, deltas = (
        one.permute(0, 2, 3, 1).reshape(len(one), -1, numbers)
        for one, numbers in ((maps.rpn_scores, 2), (maps.rpn_boxes, 4))
    )
    return scores, deltas, make_anchors(detector, maps.rpn_scores.shape[2:], deltas)


def in_order(scores: torch.Tensor) -> torch.Tensor:
    """Return the places of scores (..., n) in descending order, equal ones in their own.

    Compared in fp32: where a frame repeats itself, scores are equal but for rounding, and in fp64 too the order would
    be a matter of the number of ranks.
    """
    return torch.sort(scores.detach().float(), dim=-1, descending=True, stable=True).indices


@torch.no_grad()
def propose(maps: Maps, size: tuple[int, int], detector: DetectorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the proposals of F frames of (height, width) pixels, best first; no gradient flows through them.

    The boxes are (F, P, 4); which of them there are is (F, P), as a frame may have fewer. The anchors with the highest
    scores are decoded and clipped to the frame; those that are left with less than a pixel on a side go, and of those
    that overlap by more than 0.7 the best stays.
    """
    score_FN2, delta_FN4, anchors_N4 = by_anchor(maps, detector)
    order = in_order(score_FN2[..., 1] - score_FN2[..., 0])[:, :_CANDIDATES]
    deltas = delta_FN4.gather(1, order[..., None].expand(-1, -1, 4))
    boxes = clipped(decode(deltas, anchors_N4[order], ANCHOR_STD), size)
    alive = (boxes[..., 2:] - boxes[..., :2] >= _MIN_SIDE).all(-1)
    places, are_there = suppress(boxes, _SUPPRESSED_AT, detector.proposals, alive)
    return boxes.gather(1, places[..., None].expand(-1, -1, 4)) * are_there[..., None], are_there
