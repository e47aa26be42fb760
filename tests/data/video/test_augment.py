from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.spec import DataSpec

SIDES = st.integers(16, 700)
each_kind = pytest.mark.parametrize("kind", ["scale_jitter", "multi_scale_crop"])


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


def test_scale_jitter_draws_every_short_side_keeps_the_aspect_and_mirrors_half() -> None:
    views = [_view("scale_jitter", 340, 256, draw) for draw in range(1000)]
    assert {view.height for view in views} == set(range(256, 321))
    assert all(view.width == 340 * view.height // 256 for view in views)
    assert all(view.height == 340 * view.width // 256 for view in (_view("scale_jitter", 256, 340, 0),))
    assert abs(sum(view.flip for view in views) - 500) < 5 * np.sqrt(250)


def test_scale_jitter_reaches_every_position() -> None:
    # Short side 4, crop 3 of an 8 x 4 frame: x 0..5, y 0..1.
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


@given(crops=st.sampled_from([1, 3, "full"]), short_side=st.integers(1, 300), width=SIDES, height=SIDES)
def test_test_views_have_one_size_and_lie_inside(crops: int | str, short_side: int, width: int, height: int) -> None:
    views = augment.test_views(short_side, crops, width, height)  # View itself refuses what lies outside
    assert len(views) == (3 if crops == 3 else 1)
    assert len({(view.crop_width, view.crop_height) for view in views}) == 1
    assert min(views[0].crop_width, views[0].crop_height) == short_side


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
