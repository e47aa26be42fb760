"""The modality's numbers: they decide what every network sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from summit_train.data.video.augment import mirrored_x
from summit_train.models.precision import Normalise
from summit_train.spec import DataSpec
from summit_train.spec.catalog import FLOW_ZERO, RGB, flow


def test_rgb_is_normalised_as_torchvisions_weights_want_it() -> None:
    assert RGB.channels == len(RGB.mean) == len(RGB.std) == 3
    assert RGB.mean == pytest.approx((123.675, 116.28, 103.53))
    assert RGB.std == pytest.approx((58.395, 57.12, 57.375))


@pytest.mark.parametrize(
    ("keys", "height", "width"),
    [
        ({}, 224, 224),
        ({"long_side": 1000, "short_side": (480, 600)}, 224, 224),
        ({"augment": "whole", "short_side": (480, 600), "long_side": 1000}, 600, 1000),
        ({"augment": "whole", "short_side": (480, 600), "long_side": 500}, 500, 500),  # not above the long side
        ({"augment": "whole", "short_side": (480, 600)}, 600, 600),
    ],
)
def test_a_clips_shape_is_that_of_the_loader(keys: dict[str, Any], height: int, width: int) -> None:
    """(T, H, W, C); of whole frames it is the largest."""
    data = DataSpec(train="x", val="x", num_frames=16, **keys)
    assert data.clip_shape == (16, height, width, 3)


def test_flow_is_normalised_about_no_motion() -> None:
    """The deviation is the mean of ImageNet's three, as in the TSM authors' code; their mean is 127.5."""
    five = flow(5)
    assert (five.channels, len(five.mean), len(five.std)) == (10, 10, 10)
    assert five.mean == (128.0,) * 10 and five.std == pytest.approx((57.63,) * 10)
    assert five.std[0] / 255 == pytest.approx(sum(RGB.std) / 3 / 255, abs=5e-4)
    assert DataSpec(train="x", val="x", modality="flow").clip_shape == (8, 224, 224, 10)
    # The encoding's zero: round(255 (0 + 20) / 40), half to even.
    assert round(255 * 20 / 40) == FLOW_ZERO


def test_a_mirrored_component_is_the_negative_of_what_the_network_saw() -> None:
    normalise = Normalise(torch.float64, torch.device("cpu"), flow(1))
    values = torch.arange(1, 256, dtype=torch.uint8).view(1, 1, 1, -1, 1).expand(-1, -1, -1, -1, 2)
    mirrored = torch.from_numpy(mirrored_x(values.numpy()))
    assert torch.equal(normalise(mirrored), -normalise(values))
    assert normalise(values)[0, 0, 0, 0, FLOW_ZERO - 1] == 0.0
