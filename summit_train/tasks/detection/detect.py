"""From the maps of frames to the boxes that are found in them."""

from __future__ import annotations

import torch
from torch.nn import functional

from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.geometry import clipped, decode, suppress
from summit_train.tasks.detection.pooling import vote
from summit_train.tasks.detection.proposals import in_order, propose
from summit_train.tasks.detection.rfcn import split_maps

BOX_STD = (0.1, 0.1, 0.2, 0.2)  # of the coded boxes


@torch.no_grad()
def detect(
    maps_FCHW: torch.Tensor, size: tuple[int, int], detector: DetectorSpec, num_classes: int
) -> list[torch.Tensor]:
    """Return the boxes of each of F frames of (height, width) pixels, best first: float32 (n, 6) on the maps' device.

    A row is label, score, left, top, right, bottom. Every proposal is moved by its own box's vote, the same for all
    classes, and has the softmax of its classes' votes as scores. Within a class overlaps are suppressed.
    """
    maps = split_maps(maps_FCHW, detector, num_classes)
    with torch.autocast(maps_FCHW.device.type, enabled=False):  # it would round votes, and so the order of boxes
        proposals, are_there = propose(maps, size, detector)
        scores_FRK = functional.softmax(vote(maps.class_maps, proposals, detector.grid), -1)[..., 1:]
        deltas_FR4 = vote(maps.box_maps, proposals, detector.grid)[..., 4:]
    boxes_FR4 = clipped(decode(deltas_FR4, proposals, BOX_STD), size)
    scores_FRK = scores_FRK * are_there[..., None]
    return [_best(scores, boxes, size, detector) for scores, boxes in zip(scores_FRK, boxes_FR4, strict=True)]


def _best(
    scores_RK: torch.Tensor, boxes_R4: torch.Tensor, size: tuple[int, int], detector: DetectorSpec
) -> torch.Tensor:
    proposal, label = torch.nonzero((scores_RK >= detector.min_score) & (scores_RK > 0), as_tuple=True)
    score = scores_RK[proposal, label]
    order = in_order(score)
    found = torch.cat([label[order, None], score[order, None], boxes_R4[proposal[order]]], 1)
    if not len(found):
        return found.float()
    # Far apart, boxes of different classes do not overlap.
    apart = found[:, 2:].double() + found[:, :1].double() * (max(size) + 1)
    alive = torch.ones(1, len(found), device=found.device)
    places, are_there = suppress(apart[None], detector.nms, detector.max_boxes, alive)
    return found[places[are_there]].float()
