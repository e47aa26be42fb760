"""RandAugment against timm's on the same draws, to the pixel, and what all frames of a clip have in common."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from summit_train.core import rng
from summit_train.data.video.rand_augment import KINDS, apply_operations, draw_operations
from summit_train.data.video.render import Frames
from summit_train.spec.model_data import RandAugmentSpec
from tests.timms import draw_from, needs_timm, timm_module

VIDEOMAES = RandAugmentSpec()
GREY = (128, 128, 128)


def _clip(draw: int = 0, frames: int = 3) -> Frames:
    """Smooth colours, the whole range of values, 40 x 56."""
    generator = rng.key(0, "clip", draw)
    pictures = [Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)) for _ in range(frames)]
    return np.stack([np.asarray(one.resize((56, 40), Image.Resampling.BICUBIC)) for one in pictures])


@needs_timm
@pytest.mark.parametrize(
    "spec", [VIDEOMAES, RandAugmentSpec(magnitude=9, layers=2, std=0), RandAugmentSpec(magnitude=3, std=3)]
)
def test_clips_are_timms_on_the_same_draws(spec: RandAugmentSpec) -> None:
    """rand-m7-n4-mstd0.5-inc1 and others, 60 clips each."""
    timms = timm_module("data.auto_augment")
    hparams = {"img_mean": GREY, "interpolation": Image.Resampling.BICUBIC, "magnitude_std": spec.std}
    names = timms.rand_augment_choices("", increasing=True)
    ops = timms.rand_augment_ops(spec.magnitude, hparams=hparams, transforms=names)
    used: Counter[str] = Counter()
    for number in range(60):
        clip = _clip(number)
        operations = draw_operations(spec, rng.key(1, "rand_augment", number))
        found = apply_operations(operations, clip)
        used.update(name for name, _ in operations)
        for frame, ours in zip(clip, found, strict=True):
            draw_from(timms, rng.key(1, "rand_augment", number))  # the same ones for every frame
            assert np.array_equal(ours, np.asarray(timms.RandAugment(ops, spec.layers)(Image.fromarray(frame))))
    assert len(used) == 15


def test_the_strongest_posterize_keeps_a_bit() -> None:
    values = np.unique(apply_operations([("posterize", KINDS["posterize"].amount)], _clip()))
    assert values.tolist() == [0, 128]


def test_half_of_the_layers_are_applied_and_every_operation_as_often() -> None:
    drawn = [draw_operations(VIDEOMAES, rng.key(3, "rand_augment", number)) for number in range(3000)]
    assert abs(sum(map(len, drawn)) - 6000) < 5 * np.sqrt(3000)  # of 12,000, each with 1/2
    counts = Counter(name for operations in drawn for name, _ in operations)
    assert counts.keys() == KINDS.keys() and all(abs(count - 400) < 5 * np.sqrt(400) for count in counts.values())
    strengths = [10 * abs(by) / KINDS[name].amount for operations in drawn for name, by in operations if by]
    assert abs(np.mean(strengths) - 7) < 0.05 and abs(np.std(strengths) - 0.5) < 0.05
    signs = [by > 0 for operations in drawn for name, by in operations if KINDS[name].is_signed]
    assert abs(np.mean(signs) - 0.5) < 0.05


def test_without_operations_the_clip_stays_as_it_is() -> None:
    clip = _clip()
    assert draw_operations(RandAugmentSpec(layers=0), rng.key(0, "rand_augment")) == []
    assert apply_operations([], clip) is clip
    assert draw_operations(RandAugmentSpec(layers=1), rng.key(0, "x")) == draw_operations(
        RandAugmentSpec(layers=1), rng.key(0, "x")
    )
