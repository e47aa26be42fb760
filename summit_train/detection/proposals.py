"""The region proposal network's proposals (Ren et al., "Faster R-CNN", section 3.1), with FGFA's numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from summit_train.detection.anchors import make_anchors
from summit_train.detection.boxes import clipped, decode, suppress
from summit_train.models.rfcn import Maps
from summit_train.spec.detection import DetectorSpec

ANCHOR_STD = (0.1, 0.1, 0.4, 0.4)  # of the coded boxes
_CANDIDATES = 6000  # anchors with the highest scores
_SUPPRESSED_AT = 0.7  # IoU
_MIN_SIDE = 1.0  # pixels


class Proposals(NamedTuple):
    """Of F frames: boxes (F, P, 4), and which of them there are (F, P), as a frame may have fewer."""

    boxes: torch.Tensor
    are_there: torch.Tensor


def by_anchor(maps: torch.Tensor, numbers: int) -> torch.Tensor:
    """Return maps (F, A * numbers, h, w) as (F, h * w * A, numbers), in the order of the anchors."""
    return maps.permute(0, 2, 3, 1).reshape(len(maps), -1, numbers)


def in_order(scores: torch.Tensor) -> torch.Tensor:
    """Return the places of scores (..., n) in descending order, equal ones in their own.

    Compared in fp32: where a frame repeats itself, scores are equal but for rounding, and in fp64 too the order would
    be a matter of the number of ranks.
    """
    return torch.sort(scores.detach().float(), dim=-1, descending=True, stable=True).indices


@torch.no_grad()
def propose(maps: Maps, size: tuple[int, int], detector: DetectorSpec) -> Proposals:
    """Return the proposals of frames of (height, width) pixels, best first; no gradient flows through them.

    The anchors with the highest scores are decoded and clipped to the frame; those that are left with less than a pixel
    on a side go, and of those that overlap by more than 0.7 the best stays.
    """
    score_FN2, delta_FN4 = by_anchor(maps.rpn_scores, 2), by_anchor(maps.rpn_boxes, 4)
    anchors_N4 = make_anchors(detector, (maps.rpn_scores.shape[2], maps.rpn_scores.shape[3]), delta_FN4)
    order = in_order(score_FN2[..., 1] - score_FN2[..., 0])[:, :_CANDIDATES]
    deltas = delta_FN4.gather(1, order[..., None].expand(-1, -1, 4))
    boxes = clipped(decode(deltas, anchors_N4[order], ANCHOR_STD), size)
    alive = (boxes[..., 2:] - boxes[..., :2] >= _MIN_SIDE).all(-1)
    places, are_there = suppress(boxes, _SUPPRESSED_AT, detector.proposals, alive)
    return Proposals(boxes.gather(1, places[..., None].expand(-1, -1, 4)) * are_there[..., None], are_there)
