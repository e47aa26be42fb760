"""The modality's numbers: they decide what every network sees."""

from __future__ import annotations

import pytest

from summit_train.modality import RGB


def test_rgb_is_normalised_as_torchvisions_weights_want_it() -> None:
    assert RGB.channels == len(RGB.mean) == len(RGB.std) == 3
    assert RGB.mean == pytest.approx((123.675, 116.28, 103.53))
    assert RGB.std == pytest.approx((58.395, 57.12, 57.375))


def test_a_clips_shape_is_that_of_the_loader() -> None:
    assert RGB.clip_shape(8, 224) == (8, 224, 224, 3)
