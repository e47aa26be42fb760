"""The losses of R-FCN (Dai et al., section 3) and its region proposal network, with the numbers of FGFA's code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from summit_train.evaluation.scores import Scored
from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.boxes import IGNORED
from summit_train.tasks.detection.detect import BOX_STD
from summit_train.tasks.detection.geometry import areas, encode, intersections, iou
from summit_train.tasks.detection.pooling import vote
from summit_train.tasks.detection.proposals import ANCHOR_STD, by_anchor, in_order, propose
from summit_train.tasks.detection.rfcn import Maps, split_maps

# Of the anchors: IoU with an object from which they are one, below which they are background; how many are trained on.
_OBJECT, _BACKGROUND = 0.7, 0.3
_ANCHORS, _OBJECT_ANCHORS = 256, 128
_FOREGROUND = 0.5  # IoU of a proposal with its object
_IGNORED = 0.5  # share of a box's area inside an ignored one


@dataclass(frozen=True)
class DetectionLoss:
    """The mean over the frames of a micro-batch of the four losses of a frame:

        1/S sum_s CE(s) + 1/256 sum_objects L(t)       over the S <= 256 sampled anchors
      + 1/H sum_h [CE(h) + 1{h is an object} L(t)]     over the H hardest proposals

    CE: the cross-entropy of two classes, or of all with the background. L(t): the smooth L1 loss of the errors t of the
    four coded numbers, t^2 / 2 below 1 and |t| - 1/2 from there on. Hard is what has a high loss (Shrivastava et al.,
    "Online hard example mining"); the objects themselves are among the proposals.
    """

    detector: DetectorSpec
    num_classes: int

    def of_batch(
        self, outputs: torch.Tensor, targets: torch.Tensor, size: tuple[int, int], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the number of clips times the share of the hard proposals that are classified right.

        outputs: maps (n, T, channels, h, w). targets: (n, T, most, 5), left, top, right, bottom, label; -1 without a
        box, -2 for one that is ignored. size: the frames' height and width. seed: of the choice of anchors.
        """
        maps = split_maps(outputs.flatten(0, 1), self.detector, self.num_classes)
        # One row more without a box, so that each frame has one.
        boxes_FB5 = functional.pad(targets.flatten(0, 1), (0, 0, 0, 1), value=-1.0).to(outputs.dtype)
        proposed = self._proposal_loss(maps, boxes_FB5, seed)
        found, right = self._detection_loss(maps, boxes_FB5, size)
        return proposed + found, right * len(outputs)

    def of_scores(self, scored: Scored) -> None:
        """Detections do not have the proposals that the loss is of."""

    def to(self, device: torch.device) -> DetectionLoss:
        return self

    def _proposal_loss(self, maps: Maps, boxes_FB5: torch.Tensor, seed: int) -> torch.Tensor:
        score_FN2, delta_FN4, anchors = by_anchor(maps, self.detector)
        generator = torch.Generator(score_FN2.device).manual_seed(seed)
        draws_FN = torch.rand(score_FN2.shape[:2], generator=generator, device=score_FN2.device)
        losses = []
        for score, delta, boxes, draws in zip(score_FN2, delta_FN4, boxes_FB5, draws_FN, strict=True):
            label, matched = label_anchors(anchors, boxes)
            place, is_used = sample_anchors(label, draws)
            label, used = label[place].clamp(min=0), is_used.to(score.dtype)
            entropy = functional.cross_entropy(score[place], label, reduction="none")
            coded = encode(boxes[matched[place], :4], anchors[place], ANCHOR_STD)
            wrong = functional.smooth_l1_loss(delta[place], coded, reduction="none").sum(-1)
            wrong = torch.where(is_used & (label == 1), wrong, 0).sum()
            losses.append((entropy * used).sum() / used.sum().clamp(min=1) + wrong / _ANCHORS)
        return torch.stack(losses).mean()

    def _detection_loss(
        self, maps: Maps, boxes_FB5: torch.Tensor, size: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the share of the hard proposals that are classified right."""
        proposals, are_there = propose(maps, size, self.detector)
        places = torch.cat([proposals, boxes_FB5[..., :4]], 1)
        label, matched = label_proposals(places, boxes_FB5)
        is_used = torch.cat([are_there, boxes_FB5[..., 4] >= 0], 1) & (label >= 0)
        with torch.no_grad():
            each, _ = self._losses(maps, places, label, matched)
            hardest = in_order(each.masked_fill(~is_used, -torch.inf))[:, : self.detector.hard_examples]
        rows = hardest[..., None].expand(-1, -1, 4)
        label, is_used = label.gather(1, hardest), is_used.gather(1, hardest)
        each, is_right = self._losses(maps, places.gather(1, rows), label, matched.gather(1, rows))
        means = torch.where(is_used, each, 0).sum(1) / is_used.sum(1).clamp(min=1)
        return means.mean(), (is_right & is_used).sum() / is_used.sum().clamp(min=1)

    def _losses(
        self, maps: Maps, places_FP4: torch.Tensor, label_FP: torch.Tensor, matched_FP4: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each proposal, and whether it is classified right."""
        scores = vote(maps.class_maps, places_FP4, self.detector.grid)
        deltas = vote(maps.box_maps, places_FP4, self.detector.grid)[..., 4:]
        entropy = functional.cross_entropy(scores.transpose(1, 2), label_FP.clamp(min=0), reduction="none")
        is_object = (label_FP > 0)[..., None]
        # A proposal that is none may be empty, whose code is not finite.
        references = torch.where(is_object, places_FP4, places_FP4.new_tensor([0, 0, 1, 1]))
        coded = encode(torch.where(is_object, matched_FP4, references), references, BOX_STD)
        wrong = functional.smooth_l1_loss(deltas, coded, reduction="none")
        return entropy + (wrong * is_object).sum(-1), scores.argmax(-1) == label_FP


@torch.no_grad()
def label_anchors(anchors_N4: torch.Tensor, boxes_B5: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Label the anchors of a frame, 1 an object, 0 background, -1 neither, and return the number of each best box.

    An object: from an IoU of 0.7 with one, and the anchors that overlap an object the most. Background: below 0.3 with
    all. Neither: the others, and those without an object and half inside an ignored box. (FGFA's code leaves out
    anchors that cross the frame's edge. Here they are used, as in torchvision: small frames have no others.)
    """
    overlaps_NB = iou(anchors_N4, boxes_B5[:, :4]) * (boxes_B5[:, 4] >= 0)
    best, matched = overlaps_NB.max(1)
    label = torch.where((best < _BACKGROUND) & ~_is_ignored(anchors_N4, boxes_B5), 0, -1)
    most = overlaps_NB.amax(0)
    is_object = (best >= _OBJECT) | ((overlaps_NB == most) & (most > 0)).any(1)
    return label.masked_fill(is_object, 1), matched


def sample_anchors(label_N: torch.Tensor, draws_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 384 places of anchors, or all where there are fewer, and which of them are trained on.

    These are up to 128 objects, and background until they are 256: those of each kind with the lowest draws.
    """
    picked = []
    for kind, most in ((1, _OBJECT_ANCHORS), (0, _ANCHORS)):
        low = draws_N.masked_fill(label_N != kind, torch.inf).topk(min(most, len(draws_N)), largest=False)
        picked.append((low.indices, low.values < torch.inf))
    (objects, are_objects), (background, is_background) = picked
    wanted = _ANCHORS - are_objects.sum()
    is_background &= torch.arange(len(background), device=background.device) < wanted
    return torch.cat([objects, background]), torch.cat([are_objects, is_background])


@torch.no_grad()
def label_proposals(places_FP4: torch.Tensor, boxes_FB5: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Label the proposals, (F, P), and return each one's object's box, (F, P, 4).

    0: background. k + 1: an object of class k, from an IoU of 0.5 on. -1: no object, and half inside an ignored box.
    """
    overlaps_FPB = iou(places_FP4, boxes_FB5[..., :4]) * (boxes_FB5[:, None, :, 4] >= 0)
    best, matched = overlaps_FPB.max(2)
    classes = boxes_FB5[..., 4].long().gather(1, matched) + 1
    label = torch.where(_is_ignored(places_FP4, boxes_FB5), -1, 0)
    label = torch.where(best >= _FOREGROUND, classes, label)
    return label, boxes_FB5[..., :4].gather(1, matched[..., None].expand(-1, -1, 4))


def _is_ignored(places: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Return which places (..., n, 4) have half of their area or more inside an ignored one of the boxes."""
    share = intersections(places, boxes[..., :4]) / areas(places).clamp(min=1e-9)[..., None]
    return ((share >= _IGNORED) & (boxes[..., None, :, 4] == IGNORED)).any(-1)
