"""The detector's loss: labels of anchors and proposals by hand, the choice of what is trained on, and the whole sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from summit_train.spec.model_data import DetectorSpec
from summit_train.tasks.detection.geometry import encode
from summit_train.tasks.detection.loss import DetectionLoss, label_anchors, label_proposals, sample_anchors
from summit_train.tasks.detection.pooling import vote
from summit_train.tasks.detection.proposals import ANCHOR_STD, by_anchor, make_anchors, propose
from summit_train.tasks.detection.rfcn import map_channels, split_maps

F64 = torch.float64
NONE = [-1.0] * 5
SMALL = {"anchor_sides": [16.0, 24.0], "anchor_ratios": [1.0], "grid": 2, "proposals": 6, "hard_examples": 4}


def test_labels_of_anchors_by_hand() -> None:
    """A row of five places of 16 pixels: the square of (x, x + 16) and one box each.

    12 of 16 x 16 pixels of place 1 are an object's: IoU 3/4, an object. 40 to 52 overlaps place 2 by 8 x 16 pixels, IoU
    8/20, neither, and place 3 by 4, IoU 4/24, background, but nothing overlaps it more than place 2: an object. An
    ignored box covers place 4 by half.
    """
    anchors = make_anchors(
        DetectorSpec.model_validate(SMALL | {"anchor_sides": [16.0]}), (1, 5), torch.zeros(1, dtype=F64)
    )
    objects = [[16.0, 0, 28, 16, 1], [40, 0, 52, 16, 0], [72, 0, 90, 16, -2], NONE]
    label, matched = label_anchors(anchors, torch.tensor(objects, dtype=F64))
    assert label.tolist() == [0, 1, 1, 0, -1]
    assert matched[1:4].tolist() == [0, 1, 1]
    objects[1] = [36.0, 0, 44, 16, 0]  # both place 2 (IoU 1/2), which is the best
    objects[0] = [34.0, 0, 48, 16, 1]  # IoU 7/8 with place 2
    objects[2] = [72.1, 0, 90, 16, -2]  # covers less than half
    label, matched = label_anchors(anchors, torch.tensor(objects, dtype=F64))
    assert label.tolist() == [0, 0, 1, 0, 0] and matched[2] == 0
    # Without an object; an ignored box around all leaves nothing.
    assert label_anchors(anchors, torch.tensor([NONE], dtype=F64))[0].tolist() == [0] * 5
    assert label_anchors(anchors, torch.tensor([[0.0, 0, 80, 16, -2]], dtype=F64))[0].tolist() == [-1] * 5


def test_between_the_bounds_an_anchor_is_neither() -> None:
    """IoU 0.29, 0.31, 0.69, 0.71, of an object that another anchor overlaps more."""
    high = [0.29, 0.31, 0.69, 0.71, 0.9]
    anchors = torch.tensor([[0.0, 0, 10, 10 * part] for part in high], dtype=F64)
    label, _ = label_anchors(anchors, torch.tensor([[0.0, 0, 10, 10, 0]], dtype=F64))
    assert label.tolist() == [0, -1, -1, 1, 1]


def test_half_of_the_sampled_anchors_are_objects_at_most() -> None:
    draws = torch.rand(3000, generator=torch.Generator().manual_seed(1))
    for objects, background, expected in (
        (200, 2000, (128, 128)), (30, 2000, (30, 226)), (200, 50, (128, 50)), (0, 3000, (0, 256)),
    ):  # fmt: skip
        label = torch.full((3000,), -1)
        label[:objects], label[3000 - background :] = 1, 0
        place, is_used = sample_anchors(label, draws)
        used = place[is_used]
        assert len(used) == len(used.unique()) and not (label[used] == -1).any()
        assert ((label[used] == 1).sum().item(), (label[used] == 0).sum().item()) == expected
        # The lowest draws.
        kind = label == 0
        assert draws[used[label[used] == 0]].max() <= draws[kind].sort().values[expected[1] - 1]
    place, is_used = sample_anchors(torch.tensor([1, 0, -1]), torch.rand(3))
    assert sorted(place[is_used].tolist()) == [0, 1]


def test_labels_of_proposals_by_hand() -> None:
    boxes = torch.tensor([[[0.0, 0, 10, 10, 3], [20, 0, 30, 10, -2], NONE]], dtype=F64)
    places = torch.tensor(
        [[[0.0, 0, 10, 5], [0, 0, 10, 4.9], [25, 0, 35, 10], [25.1, 0, 35.1, 10], [0, 0, 0, 0]]], dtype=F64
    )
    label, matched = label_proposals(places, boxes)
    assert label.tolist() == [[4, 0, -1, 0, 0]]
    assert matched[0, 0].tolist() == [0, 0, 10, 10]


def _smooth_l1(x: torch.Tensor) -> float:
    return sum(value**2 / 2 if abs(value) < 1 else abs(value) - 1 / 2 for value in x.flatten().tolist())


@pytest.mark.parametrize("frame", [0, 1])
def test_the_loss_of_a_frame_is_the_sum_written_out(frame: int) -> None:
    """With an object and an ignored box, and of an empty frame."""
    detector = DetectorSpec.model_validate(SMALL)
    generator = torch.Generator().manual_seed(4)
    output = torch.randn(1, 1, sum(map_channels(detector, 3)), 4, 5, generator=generator, dtype=F64) / 2
    objects = [[[18.0, 10, 40, 37, 2], [50, 40, 79, 63, -2], NONE], [NONE, NONE, NONE]]
    targets = torch.tensor([[objects[frame]]], dtype=torch.float32)
    found, right = DetectionLoss(detector, 3).of_batch(output, targets, (64, 80), 5)

    maps, boxes = split_maps(output[0], detector, 3), targets[0].double()
    (score,), (delta,), anchors = by_anchor(maps, detector)
    label, matched = label_anchors(anchors, boxes[0])  # 40 anchors: all that are not neither are used
    used = label >= 0
    proposed = float(functional.cross_entropy(score[used], label[used]))
    for number in (label == 1).nonzero()[:, 0]:
        coded = encode(boxes[0, matched[number], :4], anchors[number], ANCHOR_STD)
        proposed += _smooth_l1(delta[number] - coded) / 256

    places, are_there = propose(maps, (64, 80), detector)
    real = [*places[0][are_there[0]], *boxes[0, boxes[0, :, 4] >= 0, :4]]
    places = torch.stack(real)[None]
    label, matched = label_proposals(places, boxes)
    scores, deltas = vote(maps.class_maps, places, 2)[0], vote(maps.box_maps, places, 2)[0, :, 4:]
    losses = []
    for number, kind in enumerate(label[0].tolist()):
        if kind >= 0:
            loss = float(functional.cross_entropy(scores[number][None], torch.tensor([kind])))
            if kind > 0:
                coded = encode(matched[0, number], places[0, number], (0.1, 0.1, 0.2, 0.2))
                loss += _smooth_l1(deltas[number] - coded)
            losses.append((loss, int(scores[number].argmax()) == kind))
    hardest = sorted(losses, reverse=True)[:4]
    assert len(losses) > 4 and (label[0] > 0).any() == (frame == 0)
    assert float(found) == pytest.approx(proposed + sum(loss for loss, _ in hardest) / 4, rel=1e-12)
    assert float(right) == pytest.approx(sum(is_right for _, is_right in hardest) / 4)


def test_the_loss_is_the_mean_over_frames_and_a_frame_needs_no_box() -> None:
    detector, generator = DetectorSpec.model_validate(SMALL), torch.Generator().manual_seed(4)
    output = torch.randn(2, 3, sum(map_channels(detector, 2)), 4, 4, generator=generator, dtype=F64)
    targets = torch.tensor(NONE).expand(2, 3, 2, 5).clone()
    targets[0, 1, 0] = torch.tensor([4.0, 5, 30, 40, 1])
    loss = DetectionLoss(detector, 2).of_batch
    # Fewer than 256 anchors: draws do not matter.
    frames = [
        float(loss(output[i : i + 1, t : t + 1], targets[i : i + 1, t : t + 1], (64, 64), 0)[0])
        for i in range(2)
        for t in range(3)
    ]
    whole, right = loss(output, targets, (64, 64), 1)
    assert float(whole) == pytest.approx(sum(frames) / 6, rel=1e-12) and 0 <= float(right) <= 2
    empty, _ = loss(output, targets[:, :, :0], (64, 64), 1)
    assert math.isfinite(float(empty))


def test_the_choice_of_anchors_is_that_of_the_seed_and_gradients_are_the_losses() -> None:
    """400 places of one anchor; gradcheck of all maps but the ones that nobody reads."""
    detector = DetectorSpec.model_validate(SMALL | {"anchor_sides": [16.0], "grid": 1, "hard_examples": 20})
    output = torch.randn(1, 1, sum(map_channels(detector, 1)), 20, 20, dtype=F64)
    targets = torch.tensor([[[[4.0, 5, 30, 40, 0]]]])
    loss = DetectionLoss(detector, 1).of_batch
    one, same, other = (float(loss(output, targets, (320, 320), seed)[0]) for seed in (1, 1, 2))
    assert one == same != other
    small = output[..., :3, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, targets, (48, 48), 0)[0], small)
    (gradient,) = torch.autograd.grad(loss(small, targets, (48, 48), 0)[0], small)
    maps = split_maps(gradient[0], detector, 1)
    assert not maps.box_maps[:, :4].any() and all(one.any() for one in (*maps[:3], maps.box_maps[:, 4:]))
