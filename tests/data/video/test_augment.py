from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.data.video import augment
from summit_train.data.video.augment import View

SIDES = st.integers(16, 700)


def _view(kind: str, width: int, height: int, draw: int, flip: bool = True) -> View:
    return augment.train_view(
        augment.Augmentation(kind, (256, 320), 224, flip), width, height, rng.key(0, "augment", draw)
    )


@given(
    kind=st.sampled_from(["scale_jitter", "multi_scale_crop"]),
    width=SIDES,
    height=SIDES,
    draw=st.integers(0, 99),
)
def test_training_crops_are_squares_inside_the_frame(kind: str, width: int, height: int, draw: int) -> None:
    view = _view(kind, width, height, draw)
    assert (view.crop_width, view.crop_height) == (224, 224)
    assert 0 <= view.x <= view.width - 224
    assert 0 <= view.y <= view.height - 224


def test_scale_jitter_draws_every_short_side_and_keeps_the_aspect() -> None:
    views = [_view("scale_jitter", 340, 256, draw) for draw in range(2000)]
    assert {view.height for view in views} == set(range(256, 321))
    assert all(view.width == 340 * view.height // 256 for view in views)
    upright = [_view("scale_jitter", 256, 340, draw) for draw in range(50)]
    assert all(view.height == 340 * view.width // 256 for view in upright)


def test_scale_jitter_reaches_every_position() -> None:
    # Short side 4, crop 3 of an 8 x 4 frame: x 0..5, y 0..1.
    views = [
        augment.train_view(augment.Augmentation("scale_jitter", (4, 4), 3, False), 8, 4, rng.key(1, "augment", draw))
        for draw in range(400)
    ]
    assert {(view.x, view.y) for view in views} == {(x, y) for x in range(6) for y in range(2)}


def test_half_of_the_clips_are_mirrored() -> None:
    views = [_view("scale_jitter", 340, 256, draw) for draw in range(2000)]
    assert abs(sum(view.flip for view in views) - 1000) < 5 * np.sqrt(500)


@pytest.mark.parametrize("kind", ["scale_jitter", "multi_scale_crop"])
def test_without_flips_the_crops_are_the_same_and_none_is_mirrored(kind: str) -> None:
    for draw in range(50):
        with_flips, without = (_view(kind, 340, 256, draw, flip) for flip in (True, False))
        assert not without.flip
        assert (without.width, without.x, without.y) == (with_flips.width, with_flips.x, with_flips.y)


def test_multi_scale_crop_sizes_of_a_256_frame() -> None:
    # 256 * {1, .875, .75, .66} = 256, 224, 192, 168; sides at most one step apart, as (width, height).
    assert augment.crop_sizes(224, 340, 256) == [
        (256, 256), (224, 256), (256, 224), (224, 224), (192, 224),
        (224, 192), (192, 192), (168, 192), (192, 168), (168, 168),
    ]  # fmt: skip


def test_multi_scale_crop_sizes_near_the_crop_become_the_crop() -> None:
    # 258 * .875 = 225.75, so 225: one pixel from 224. 260 * .875 = 227.5, so 227: three pixels, too far.
    assert (224, 224) in augment.crop_sizes(224, 400, 258)
    assert (227, 227) in augment.crop_sizes(224, 400, 260)
    # A frame of 222 has no 224 pixels to give.
    assert augment.crop_sizes(224, 400, 222)[0] == (222, 222)


def test_multi_scale_crop_turns_the_drawn_box_into_the_crop() -> None:
    # 256 x 256, crop 128. The box of 128 (a half) leaves 128 pixels free: quarter steps of 32.
    views = [
        augment.train_view(
            augment.Augmentation("multi_scale_crop", (1, 1), 128, False), 256, 256, rng.key(0, "augment", draw)
        )
        for draw in range(3000)
    ]
    # Sides 256, 224, 192, 168 become 128: the whole of 256 is scaled to 128, 146.3, 170.7, 195.05.
    assert {view.width for view in views} == {128, 146, 171, 195}
    whole = {(view.x, view.y) for view in views if view.width == view.height == 128}
    assert whole == {(0, 0)}
    # Box 192: 64 free, steps of 16, in the scaled frame 10.67: 0, 11, 21, 32, 43.
    q0, q1, q2, q3, q4 = 0, 11, 21, 32, 43
    positions = {(view.x, view.y) for view in views if view.width == view.height == 171}
    assert positions == {
        (q0, q0), (q4, q0), (q0, q4), (q4, q4), (q2, q2), (q0, q2), (q4, q2), (q2, q4), (q2, q0),
        (q1, q1), (q3, q1), (q1, q3), (q3, q3),
    }  # fmt: skip


def test_the_test_crops_of_a_wide_frame_lie_left_in_the_centre_and_right() -> None:
    # 340 x 256 at short side 256: 84 free columns.
    assert augment.test_views(256, 1, 340, 256) == [View(340, 256, 42, 0, 256, 256)]
    assert [view.x for view in augment.test_views(256, 3, 340, 256)] == [0, 42, 84]


def test_the_test_crops_of_an_upright_frame_lie_above_each_other() -> None:
    views = augment.test_views(128, 3, 240, 320)
    assert [(view.x, view.y) for view in views] == [(0, 0), (0, 21), (0, 42)]
    assert {(view.width, view.height, view.crop_width, view.crop_height) for view in views} == {(128, 170, 128, 128)}


def test_the_full_frame_is_one_view_without_a_crop() -> None:
    assert augment.test_views(256, "full", 340, 256) == [View(340, 256, 0, 0, 340, 256)]
    assert augment.test_views(128, "full", 340, 256) == [View(170, 128, 0, 0, 170, 128)]


@given(crops=st.sampled_from([1, 3, "full"]), short_side=st.integers(1, 300), width=SIDES, height=SIDES)
def test_test_views_have_one_size_and_lie_inside(crops: int | str, short_side: int, width: int, height: int) -> None:
    views = augment.test_views(short_side, crops, width, height)  # View itself refuses what lies outside
    assert len(views) == (3 if crops == 3 else 1)
    assert len({(view.crop_width, view.crop_height) for view in views}) == 1
    assert min(views[0].crop_width, views[0].crop_height) == short_side


def test_what_cannot_be_cut_is_refused() -> None:
    generator = rng.key(0, "augment")
    with pytest.raises(ValueError, match="choose scale_jitter or multi_scale_crop"):
        augment.train_view(augment.Augmentation("mixup", (256, 320), 224, True), 340, 256, generator)
    with pytest.raises(ValueError, match="at least the crop, 224"):
        augment.train_view(augment.Augmentation("scale_jitter", (200, 320), 224, True), 340, 256, generator)
    with pytest.raises(ValueError, match="must rise"):
        augment.train_view(augment.Augmentation("scale_jitter", (320, 256), 224, True), 340, 256, generator)
    with pytest.raises(ValueError, match="crops must be 1, 3 or 'full', not 2"):
        augment.test_views(256, 2, 340, 256)
    with pytest.raises(ValueError, match="does not lie inside"):
        View(340, 256, 100, 0, 256, 256)
