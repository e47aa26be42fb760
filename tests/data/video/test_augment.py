"""The frames of clips, and the rectangles cut out of them: by hand, and of all sizes; RandAugment against timm's."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from summit_train.core import rng
from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.data.video.rand_augment import KINDS, apply_operations, draw_operations
from summit_train.data.video.render import Frames
from summit_train.spec import DataSpec
from summit_train.spec.model_data import RandAugmentSpec
from tests.timms import draw_from, needs_timm, timm_module

SIDES = st.integers(16, 700)
each_kind = pytest.mark.parametrize("kind", ["scale_jitter", "multi_scale_crop", "rand_augment"])


def _view(kind: Any, width: int, height: int, draw: int, **data: Any) -> View:
    spec = DataSpec(train="x", val="x", augment=kind, **data)
    return augment.train_view(spec, width, height, rng.key(0, "augment", draw))


@each_kind
@given(width=SIDES, height=SIDES, draw=st.integers(0, 99))
def test_training_crops_are_squares_inside_the_frame(kind: str, width: int, height: int, draw: int) -> None:
    view = _view(kind, width, height, draw)
    assert (view.crop_width, view.crop_height) == (224, 224)
    assert 0 <= view.x <= view.width - 224
    assert 0 <= view.y <= view.height - 224


def test_scale_jitter_draws_every_short_side_and_place_and_mirrors_half() -> None:
    views = [_view("scale_jitter", 340, 256, draw) for draw in range(1000)]
    assert {view.height for view in views} == set(range(256, 321))
    assert all(view.width == 340 * view.height // 256 for view in views)
    upright = _view("scale_jitter", 256, 340, 0)
    assert upright.height == 340 * upright.width // 256
    assert abs(sum(view.flip for view in views) - 500) < 5 * np.sqrt(250)
    # Every position: short side 4, crop 3 of an 8 x 4 frame: x 0..5, y 0..1.
    views = [_view("scale_jitter", 8, 4, draw, short_side=(4, 4), crop=3) for draw in range(200)]
    assert {(view.x, view.y) for view in views} == {(x, y) for x in range(6) for y in range(2)}


@each_kind
def test_without_flips_the_crops_are_the_same_and_none_is_mirrored(kind: str) -> None:
    for draw in range(50):
        with_flips, without = (_view(kind, 340, 256, draw, flip=flip) for flip in (True, False))
        assert not without.flip
        assert (without.width, without.x, without.y) == (with_flips.width, with_flips.x, with_flips.y)


def test_multi_scale_crop_sizes_by_hand() -> None:
    # 256 * {1, .875, .75, .66} = 256, 224, 192, 168; sides at most one step apart, as (width, height).
    assert augment.crop_sizes(224, 340, 256) == [
        (256, 256), (224, 256), (256, 224), (224, 224), (192, 224),
        (224, 192), (192, 192), (168, 192), (192, 168), (168, 168),
    ]  # fmt: skip
    # 258 * .875 = 225.75, so 225: one pixel from 224. 260 * .875 = 227.5, so 227: three pixels, too far.
    assert (224, 224) in augment.crop_sizes(224, 400, 258)
    assert (227, 227) in augment.crop_sizes(224, 400, 260)
    # A frame of 222 has no 224 pixels to give.
    assert augment.crop_sizes(224, 400, 222)[0] == (222, 222)


def test_multi_scale_crop_turns_the_drawn_box_into_the_crop() -> None:
    # 256 x 256, crop 128. Sides 256, 224, 192, 168 become 128: 256 is scaled to 128, 146.3, 170.7, 195.05.
    views = [_view("multi_scale_crop", 256, 256, draw, crop=128, flip=False) for draw in range(1500)]
    assert {view.width for view in views} == {128, 146, 171, 195}
    assert {(view.x, view.y) for view in views if view.width == view.height == 128} == {(0, 0)}
    # Box 192: 64 free, steps of 16, in the scaled frame 10.67: 0, 11, 21, 32, 43.
    q0, q1, q2, q3, q4 = 0, 11, 21, 32, 43
    assert {(view.x, view.y) for view in views if view.width == view.height == 171} == {
        (q0, q0), (q4, q0), (q0, q4), (q4, q4), (q2, q2), (q0, q2), (q4, q2), (q2, q4), (q2, q0),
        (q1, q1), (q3, q1), (q1, q3), (q3, q3),
    }  # fmt: skip


def test_a_box_has_the_drawn_area_and_aspect_and_any_place() -> None:
    boxes = [augment.draw_box((0.08, 1.0), 400, 300, rng.key(0, "augment", draw)) for draw in range(2000)]
    areas = np.array([width * height / 120_000 for (width, height), _ in boxes])
    aspects = np.array([width / height for (width, height), _ in boxes])
    assert 0.079 < areas.min() < 0.09 and 0.9 < areas.max() <= 1
    assert 0.74 < aspects.min() < 0.76 and 1.32 < aspects.max() < 1.35
    assert all(left + width <= 400 and top + height <= 300 for (width, height), (left, top) in boxes)
    assert len({(left == 0, top == 0) for _, (left, top) in boxes}) == 4
    # With all of the area and no aspect that fits, the centre: 300 x 4/3 of 600 x 300, 3/4 of a frame that is upright.
    assert augment.draw_box((1.0, 1.0), 600, 300, rng.key(0, "augment")) == ((400, 300), (100, 0))
    assert augment.draw_box((1.0, 1.0), 300, 600, rng.key(0, "augment")) == ((300, 400), (0, 100))
    # The box becomes the crop: both its sides 60.
    view = _view("rand_augment", 600, 300, 0, crop=60, rand_augment={"crop_area": (1.0, 1.0)}, flip=False)
    assert view == View(90, 60, 15, 0, 60, 60)


@pytest.mark.parametrize(
    ("short_side", "crops", "size", "expected"),
    [
        (256, 1, (340, 256), [View(340, 256, 42, 0, 256, 256)]),  # 84 free columns
        (256, 3, (340, 256), [View(340, 256, x, 0, 256, 256) for x in (0, 42, 84)]),
        (128, 3, (240, 320), [View(128, 170, 0, y, 128, 128) for y in (0, 21, 42)]),
        (256, "full", (340, 256), [View(340, 256, 0, 0, 340, 256)]),
        (128, "full", (340, 256), [View(170, 128, 0, 0, 170, 128)]),
    ],
)
def test_the_views_of_the_test_by_hand(short_side: int, crops: int, size: Any, expected: list[View]) -> None:
    assert augment.test_views(short_side, crops, *size) == expected


@pytest.mark.parametrize("place", [(100, 0, 256, 256), (-1, 0, 9, 9), (0, 1, 9, 256), (0, 0, 0, 9)])
def test_a_crop_outside_its_frame_is_a_mistake_of_ours(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError):
        View(340, 256, *place)


def test_the_opposite_of_a_component_of_flow() -> None:
    values = np.arange(256, dtype=np.uint8)
    opposite = augment.mirrored_x(values)
    assert opposite.dtype == np.uint8
    assert opposite.tolist() == [255, *range(255, 0, -1)]
    # Its own inverse, but for the value that has no opposite.
    assert augment.mirrored_x(opposite).tolist() == [1, *range(1, 256)]


# Frames.


COUNTS = {"num_video_frames": st.integers(1, 400), "num_frames": st.integers(1, 33), "stride": st.integers(1, 9)}


def _train(kind: str, num_video_frames: int, num_frames: int, stride: int, draw: int = 0) -> list[int]:
    generator = rng.key(0, "sampling", draw)
    return [int(i) for i in augment.train_frames(kind, num_video_frames, num_frames, stride, generator)]


def test_dense_starts_are_all_positions_drawn_evenly() -> None:
    # Window 4 * 2 = 8 frames of 11: starts 0, 1, 2, 3 and no other.
    drawn = {tuple(_train("dense", 11, 4, 2, draw)) for draw in range(100)}
    assert drawn == {(0, 2, 4, 6), (1, 3, 5, 7), (2, 4, 6, 8), (3, 5, 7, 9)}
    counts = np.bincount([_train("dense", 73, 8, 8, draw)[0] for draw in range(2000)], minlength=10)
    assert len(counts) == 10  # 73 - 64 + 1
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)


@pytest.mark.parametrize(
    ("arguments", "frames"),
    [
        (("dense", 5, 4, 2), [0, 2, 4, 1]),  # short videos repeat in order
        (("dense", 3, 8, 1), [0, 1, 2, 0, 1, 2, 0, 1]),
        (("dense", 1, 3, 8), [0, 0, 0]),
        (("uniform", 3, 8, 1), [0, 0, 0, 1, 1, 1, 2, 2]),
        (("uniform", 6, 6, 8), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_frames_without_a_choice(arguments: tuple[Any, ...], frames: list[int]) -> None:
    assert _train(*arguments) == frames
    assert augment.test_frames(*arguments, 2).tolist() == [frames] * 2


@given(**COUNTS, draw=st.integers(0, 9))
def test_training_frames_lie_in_the_video(num_video_frames: int, num_frames: int, stride: int, draw: int) -> None:
    dense = _train("dense", num_video_frames, num_frames, stride, draw)
    uniform = _train("uniform", num_video_frames, num_frames, stride, draw)
    for frames in (dense, uniform):
        assert len(frames) == num_frames and all(0 <= frame < num_video_frames for frame in frames)
    assert all((after - before - stride) % num_video_frames == 0 for before, after in pairwise(dense))
    assert num_video_frames < num_frames * stride or dense == sorted(dense)
    assert uniform == sorted(uniform)
    assert num_video_frames < num_frames or len(set(uniform)) == num_frames


def test_uniform_draws_one_frame_of_each_segment_and_every_frame_can_be_drawn() -> None:
    # 10 frames in 4 segments: edges 0, 2, 5, 7, 10.
    drawn = np.array([_train("uniform", 10, 4, 1, draw) for draw in range(100)])
    assert [sorted(set(column)) for column in drawn.T.tolist()] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("arguments", "clips"),
    [
        # 93 starts, 0 to 92, for a window of 8 frames in 100: one clip stands in the middle.
        (("dense", 100, 4, 2, 1), [[46, 48, 50, 52]]),
        # Starts from the first to the last position: 0, 18, 36 for a window of 64.
        (("dense", 100, 4, 16, 3), [[0, 16, 32, 48], [18, 34, 50, 66], [36, 52, 68, 84]]),
        # tick = 100 / 8 = 12.5: int(6.25 + 12.5 * i).
        (("uniform", 100, 8, 1, 1), [[6, 18, 31, 43, 56, 68, 81, 93]]),
        # tick = 25; two clips: a quarter and three quarters of it, 6.25 and 18.75.
        (("uniform", 100, 4, 1, 2), [[6, 31, 56, 81], [18, 43, 68, 93]]),
    ],
)
def test_test_clips_by_hand(arguments: tuple[Any, ...], clips: list[list[int]]) -> None:
    frames = augment.test_frames(*arguments)
    assert frames.dtype == np.int64 and frames.tolist() == clips


# Streams, and early recognition.


@pytest.mark.parametrize(
    ("sampling", "num_video_frames", "num_frames", "frames"),
    [
        ("dense", 25, 4, [0, 8, 16, 24]),  # every frame_stride-th one, to the end
        ("dense", 24, 4, [0, 8, 16]),
        ("dense", 3, 4, [0]),
        ("uniform", 100, 8, [6, 18, 31, 43, 56, 68, 81, 93]),  # the one clip
        ("uniform", 3, 8, [0, 0, 0, 1, 1, 1, 2, 2]),
    ],
)
def test_the_frames_of_a_stream(sampling: Any, num_video_frames: int, num_frames: int, frames: list[int]) -> None:
    data = DataSpec(train="x", val="x", sampling=sampling, num_frames=num_frames, frame_stride=8)
    assert augment.stream_frames(data, num_video_frames).tolist() == frames


@pytest.mark.parametrize(
    ("num_frames", "percent", "observed"),
    # 0.55 * 100 is 55.00000000000001 in floats.
    [(25, 10, 3), (30, 10, 3), (31, 10, 4), (1, 10, 1), (100, 55, 55), (25, 100, 25)],
)
def test_the_observed_frames_are_rounded_up(num_frames: int, percent: int, observed: int) -> None:
    assert augment.num_observed(num_frames, Fraction(percent, 100)) == observed


def test_clips_of_the_observed_frames() -> None:
    """25 frames, T = 4: a tenth is 3, a half 13 with ticks of 3.25, and all have ticks of 6.25."""
    clips = augment.observed_frames(25, [Fraction(1, 10), Fraction(1, 2), Fraction(1)], 4)
    assert clips.tolist() == [[0, 0, 1, 2], [1, 4, 8, 11], [3, 9, 15, 21]]


# RandAugment.


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
