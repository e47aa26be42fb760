"""Random erasing against timm's on the same draws, and the box that all frames share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from summit_train.core import rng
from summit_train.training.erase import erase
from tests.timms import draw_from, needs_timm, timm_module


def _clips(clips: int = 6, height: int = 24, width: int = 32) -> torch.Tensor:
    """Zeros (N, 4, 3, height, width), as Normalise leaves them, channels last."""
    return torch.zeros(clips, 4, height, width, 3, dtype=torch.float64).permute(0, 1, 4, 2, 3)


def _noise(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@needs_timm
@pytest.mark.parametrize("probability", [0.25, 1.0])
def test_clips_are_timms_on_the_same_draws(probability: float) -> None:
    timms, erased = timm_module("data.random_erasing"), 0
    theirs = timms.RandomErasing(probability, mode="pixel", max_count=1, device="cpu")
    for number in range(20):
        clips, twins = _clips(), _clips()
        erase(clips, probability, rng.key(number, "erase"), _noise(number))
        draw_from(timms, rng.key(number, "erase"))
        torch.manual_seed(number)
        # A picture of timm's has any number of channels: all frames of a clip are one.
        expected = theirs(twins.flatten(1, 2).clone()).view_as(clips)
        assert torch.equal(clips, expected)
        erased += sum(bool(clip.any()) for clip in clips)
    assert erased == 120 if probability == 1 else abs(erased - 30) < 5 * np.sqrt(120 * 3 / 16)


def test_a_box_is_the_same_in_all_frames_and_its_noise_is_not() -> None:
    clips = _clips(40)
    erase(clips, 1.0, rng.key(0, "erase"), _noise(0))
    for clip in clips:
        touched = (clip != 0).any(1)  # (T, H, W)
        rows, columns = touched[0].any(1), touched[0].any(0)
        assert torch.equal(touched[0], rows[:, None] & columns)
        assert all(torch.equal(frame, touched[0]) for frame in touched)
        assert 0.01 < float(touched[0].double().mean()) < 0.36  # 0.02 to 1/3, and rounding
        assert not torch.equal(clip[0], clip[1])
    values = clips[clips != 0]
    assert abs(float(values.mean())) < 0.02 and abs(float(values.std()) - 1) < 0.02


def test_nothing_is_erased_of_a_frame_that_holds_no_box() -> None:
    clips = _clips(4, 1, 1)
    erase(clips, 1.0, rng.key(0, "erase"), _noise(0))
    assert not clips.any()
