"""Mixup, CutMix and random erasing against timm's on the same draws, by hand, and in a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from summit_train.core import rng
from summit_train.spec.model_data import MixSpec
from summit_train.training.vary import Mix, draw_mix, erase
from tests.timms import draw_from, needs_timm, timm_module

CLASSES = 5


def _batch(clips: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clips (N, 3, 3, 12, 20) as Normalise leaves them, channels last; labels; logits."""
    generator = torch.Generator().manual_seed(clips)
    pixels = torch.randn(clips, 3, 12, 20, 3, generator=generator, dtype=dtype).permute(0, 1, 4, 2, 3)
    labels = torch.randint(0, CLASSES, (clips,), generator=generator)
    return pixels, labels, torch.randn(clips, CLASSES, generator=generator, dtype=dtype)


@needs_timm
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "spec",
    [
        MixSpec(mixup=0.8, cutmix=1.0),
        MixSpec(mixup=0.2, probability=0.5),
        MixSpec(cutmix=1.0, probability=0.9),
        MixSpec(mixup=1.0, cutmix=0.5, switch=0.2),
    ],
)
def test_batches_and_losses_are_timms_on_the_same_draws(spec: MixSpec, smoothing: float) -> None:
    timms, kinds = timm_module("data.mixup"), set()
    options = {"prob": spec.probability, "switch_prob": spec.switch, "label_smoothing": smoothing}
    theirs = timms.Mixup(spec.mixup, spec.cutmix, num_classes=CLASSES, **options)
    for number in range(30):
        clips, labels, logits = _batch(4)
        draw_from(timms, rng.key(number, "mix"))
        # A picture of timm's has any number of channels.
        expected, shares = theirs(clips.clone().flatten(1, 2), labels)
        mix = draw_mix(spec, rng.key(number, "mix"), 12, 20)
        mix.apply(clips)
        assert torch.equal(clips, expected.view_as(clips))
        ours = functional.cross_entropy(logits, mix.targets(labels, logits), label_smoothing=smoothing)
        loss = -(shares.double() * functional.log_softmax(logits, 1)).sum(1).mean()
        assert float(ours) == pytest.approx(float(loss), rel=1e-6)  # timm's targets are in single precision
        kinds.add("cutmix" if mix.box else "mixup" if mix.share < 1 else "none")
    expected_kinds = {"mixup": spec.mixup > 0, "cutmix": spec.cutmix > 0, "none": spec.probability < 1}
    assert kinds == {kind for kind, is_there in expected_kinds.items() if is_there}


def test_mixup_by_hand() -> None:
    clips = torch.tensor([1.0, 2.0, 5.0]).view(3, 1, 1, 1, 1).expand(3, 2, 3, 4, 4).clone()
    mix = Mix(0.75)
    mix.apply(clips)
    # An odd batch: the one in the middle stays.
    assert [float(clip.unique()) for clip in clips] == [2.0, 2.0, 4.0]
    targets = mix.targets(torch.tensor([0, 1, 2]), torch.zeros(3, 4))
    assert targets.tolist() == [[0.75, 0, 0.25, 0], [0, 1, 0, 0], [0.25, 0, 0.75, 0]]
    # Labels that are shares already.
    shares = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert mix.targets(shares, torch.zeros(2, 2)).tolist() == [[0.75, 1.0], [0.25, 1.0]]


def test_cutmix_by_hand_has_one_box_for_all_frames() -> None:
    clips, _, _ = _batch(2)
    before = clips.clone()
    mix = Mix(1 - 6 / 240, (1, 3, 4, 7))
    mix.apply(clips)
    inside = torch.zeros(12, 20, dtype=torch.bool)
    inside[1:3, 4:7] = True
    assert torch.equal(clips[..., inside], before.flip(0)[..., inside])
    assert torch.equal(clips[..., ~inside], before[..., ~inside])
    assert clips.stride() == before.stride()


def test_a_box_has_the_drawn_area_and_the_share_what_is_left_of_the_frame() -> None:
    for number in range(200):
        mix = draw_mix(MixSpec(cutmix=1.0), rng.key(number, "mix"), 32, 48)
        assert mix.box is not None
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 48
        assert mix.share == pytest.approx(1 - (bottom - top) * (right - left) / (32 * 48))


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
