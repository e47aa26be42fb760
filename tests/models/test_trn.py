"""TRN against sums worked by hand, and its tuples: drawn by the seed in training, fixed in evaluation."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch.nn.functional import linear, relu

from summit_train.models import VideoNetwork, build_model
from summit_train.models.trn import Relations, nth_tuple
from tests.closeness import assert_near


def small(num_frames: int, dropout: float = 0.0) -> VideoNetwork:
    return build_model("trn", "resnet18", num_frames, 5, width=0.125, dropout=dropout)


def all_tuples(relations: Relations) -> dict[int, list[list[int]]]:
    return {scale: relations.tuples(scale) for scale in relations.scales}


def test_logits_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over given tuples of W2 relu(W1 relu([f_a, f_b, ...]) + b1) + b2, with f = W x + b of each frame."""
    model = small(3).double().train()
    given = {3: [[0, 1, 2]], 2: [[0, 2], [1, 2], [0, 1]]}
    monkeypatch.setattr(model.consensus, "tuples", given.__getitem__)
    features = torch.randn(2 * 3, model.fc.in_features, dtype=torch.double)
    frames = linear(features, model.fc.weight, model.fc.bias).view(2, 3, -1)
    expected = torch.zeros(2, 5, dtype=torch.double)
    for (scale, tuples), relation in zip(given.items(), model.consensus.fc_fusion_scales, strict=True):
        first, second = relation[1], relation[3]
        assert first.in_features == scale * frames.shape[2]
        for chosen in tuples:
            side_by_side = torch.cat([relu(frames[:, t]) for t in chosen], 1)
            hidden = relu(linear(side_by_side, first.weight, first.bias))
            expected += linear(hidden, second.weight, second.bias)
    assert_near(model.classify(features), expected, 1e-12)


def test_tuples_are_distinct_and_in_the_order_of_time() -> None:
    relations = Relations(8, 2, 3)
    for training in (True, False):
        relations.train(training)
        for scale, tuples in all_tuples(relations).items():
            assert len(tuples) == (1 if scale == 8 else 3)
            assert len(set(map(tuple, tuples))) == len(tuples)
            for chosen in tuples:
                assert len(chosen) == scale and chosen == sorted(set(chosen)) and set(chosen) <= set(range(8))


def test_every_tuple_is_drawn_equally_often() -> None:
    """3 of the 10 pairs of 5 frames, 1,000 times: each 300 times, with a standard deviation of 14.5."""
    relations = Relations(5, 2, 3)
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for _ in range(1000):
        for chosen in relations.tuples(2):
            counts[tuple(chosen)] += 1
    assert sum(counts.values()) == 3000
    assert all(abs(number - 300) < 5 * 14.5 for number in counts.values())


def test_evaluation_takes_the_middle_tuples_of_three_equal_parts() -> None:
    """Of the 28 pairs of 8 frames in lexicographic order: numbers 4, 14 and 23."""
    relations = Relations(8, 2, 3).eval()
    assert relations.tuples(2) == [[0, 5], [2, 4], [4, 6]]
    assert relations.tuples(7) == [[t for t in range(8) if t != absent] for absent in (6, 3, 1)]
    assert relations.tuples(8) == [list(range(8))]
    assert Relations(3, 2, 3).eval().tuples(2) == [[0, 1], [0, 2], [1, 2]]


def test_the_numbered_tuples_are_those_of_itertools() -> None:
    relations = Relations(64, 1, 1)  # long clips need no list of them all
    assert len(relations.tuples(32)) == len(relations.eval().tuples(32)) == 3
    for num_frames in range(2, 8):
        for scale in range(1, num_frames + 1):
            expected = list(map(list, combinations(range(num_frames), scale)))
            assert [nth_tuple(num_frames, scale, number) for number in range(len(expected))] == expected


def test_a_network_draws_by_its_seed_in_training_and_never_in_evaluation() -> None:
    model = small(6, dropout=0.5)
    clip = torch.randn(2, 6, 3, 32, 32)
    logits = []
    for seed in (1, 2, 1):
        model.reseed(seed)
        logits.append(model(clip))
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
    model.eval()
    once = model(clip)
    model.reseed(2)
    assert torch.equal(model(clip), once)
    assert not any("generator" in name for name in model.state_dict())


def test_dropout_and_relations_draw_from_different_streams() -> None:
    model = small(6, dropout=0.5)
    model.reseed(2**63 - 1)
    seeds = [module._generator or module._seed for module in (model.dropout, model.consensus)]
    assert seeds == [2**63 - 1, 0]


def test_initial_weights() -> None:
    """The frames' layer is N(0, 0.001); those of the relations are torch's U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    model = build_model("trn", "resnet18", 8, 400, generator=torch.Generator().manual_seed(0))
    assert model.fc.weight.std().item() == pytest.approx(0.001, rel=0.02) and not model.fc.bias.any()
    for relation in model.consensus.fc_fusion_scales:
        for layer in (relation[1], relation[3]):
            bound = layer.in_features**-0.5
            assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
            assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
            assert layer.bias.abs().max() <= bound and layer.bias.any()


def test_names() -> None:
    """The body is torchvision's; the relations are the authors'."""
    with torch.device("meta"):
        state = build_model("trn", "resnet50", 8, 174).state_dict()
        body = build_model("tsn", "resnet50", 8, 174).state_dict()
    head = {name: tuple(value.shape) for name, value in state.items() if name not in body or name.startswith("fc.")}
    expected: dict[str, tuple[int, ...]] = {"fc.weight": (256, 2048), "fc.bias": (256,)}
    for number, scale in enumerate(range(8, 1, -1)):
        relation = f"consensus.fc_fusion_scales.{number}"
        expected |= {f"{relation}.1.weight": (256, 256 * scale), f"{relation}.1.bias": (256,)}
        expected |= {f"{relation}.3.weight": (174, 256), f"{relation}.3.bias": (174,)}
    assert head == expected and set(body) <= set(state)
