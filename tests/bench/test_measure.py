from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from summit_train.bench.measure import (
    MeasureError,
    check_above_0,
    in_turn,
    pair_ratios,
    spread,
    spread_text,
    training_multiply_adds,
)
from summit_train.models import build_model
from tests.networks import counted


def test_spread_and_ratios_of_pairs() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert spread([1.0, 2.0])["median"] == 1.5
    # Both slowed down in the second round: the ratio did not.
    assert pair_ratios([2.0, 4.0], [1.0, 2.0]) == [2.0, 2.0]
    assert spread_text(spread([1.0]), ".1f") == "1.0 (1.0 .. 1.0)"


def test_rounds_go_forwards_and_backwards() -> None:
    calls: list[str] = []
    measurements = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    names = [name for name, _ in in_turn(measurements, 3)]
    assert names == calls == list("abccbaabc")


def test_a_count_is_above_0() -> None:
    check_above_0({"steps": 1, "warm_up": None})
    with pytest.raises(MeasureError, match="--steps 0: a number above 0"):
        check_above_0({"repeats": 1, "steps": 0})


@pytest.mark.parametrize(("arch", "backbone", "frames"), [("tsn", "resnet18", 4), ("i3d_3x1x1", "resnet50", 8)])
def test_training_multiply_adds_are_those_that_autograd_does(arch: str, backbone: str, frames: int) -> None:
    model = build_model(arch, backbone, frames, 5, width=0.125)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, frames, 3, 32, 32)).sum().backward()
    network = counted(arch, backbone, frames=frames, crop=32, width=0.125, classes=5)
    assert counter.get_total_flops() == 2 * 2 * training_multiply_adds(network)
