"""Augmentation: the rectangle of the frame that a clip is cut from.

A `View` tells the decoder to scale the whole upright frame, cut a rectangle out of it and perhaps mirror it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MULTI_SCALES = (1.0, 0.875, 0.75, 0.66)
SNAP_PIXELS = 3
# The crop's offset in quarters of the free space: corners and centre, the edges' middles, the inner four.
QUARTER_POSITIONS = (
    (0, 0), (4, 0), (0, 4), (4, 4), (2, 2),
    (0, 2), (4, 2), (2, 4), (2, 0),
    (1, 1), (3, 1), (1, 3), (3, 3),
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """A crop of the scaled upright frame, in pixels. Raises ValueError where it does not lie inside.

    width, height: the scaled frame's size. x, y: the crop's upper left corner. crop_width, crop_height: its size. flip:
    mirror the crop left to right.
    """

    width: int
    height: int
    x: int
    y: int
    crop_width: int
    crop_height: int
    flip: bool = False

    def __post_init__(self) -> None:
        inside_x = 0 <= self.x < self.x + self.crop_width <= self.width
        inside_y = 0 <= self.y < self.y + self.crop_height <= self.height
        if not (inside_x and inside_y):
            raise ValueError(f"the crop does not lie inside the frame: {self}")


def scaled_size(width: int, height: int, short_side: int) -> tuple[int, int]:
    """Return the (width, height) of a frame scaled so that its shorter side becomes `short_side`."""
    if width <= height:
        return short_side, height * short_side // width
    return width * short_side // height, short_side


def train_view(
    augment: str,
    short_side: tuple[int, int],
    crop: int,
    flip: bool,
    width: int,
    height: int,
    generator: np.random.Generator,
) -> View:
    """Draw the view of one training clip: a `crop` x `crop` square of a `width` x `height` frame.

    augment: 'scale_jitter' (the paper's: the short side is uniform over the integers of `short_side`, both
    ends included) or 'multi_scale_crop' (TSN's and TSM's; `short_side` is not read).
    Raises ValueError for another name, and where the crop is larger than the smallest short side.
    """
    if augment == "scale_jitter":
        view = _scale_jitter(short_side, crop, width, height, generator)
    elif augment == "multi_scale_crop":
        view = _multi_scale_crop(crop, width, height, generator)
    else:
        raise ValueError(f"unknown augment {augment!r}: choose scale_jitter or multi_scale_crop")
    # Always drawn: switching flips off must not change the crops.
    mirrored = bool(generator.random() < 0.5)
    return replace(view, flip=flip and mirrored)


def test_views(short_side: int, crops: int | str, width: int, height: int) -> list[View]:
    """Return the views of one test clip, all of one size, of a `width` x `height` frame.

    crops: 1 (the centre square of side `short_side`), 3 (left, centre, right along the longer side) or
    'full' (the whole frame, its shorter side scaled to `short_side`). Raises ValueError for anything else.
    """
    scaled_width, scaled_height = scaled_size(width, height, short_side)
    if crops == "full":
        return [View(scaled_width, scaled_height, 0, 0, scaled_width, scaled_height)]
    if crops not in (1, 3):
        raise ValueError(f"crops must be 1, 3 or 'full', not {crops!r}")
    free_x, free_y = scaled_width - short_side, scaled_height - short_side
    halves = (1,) if crops == 1 else (0, 1, 2)
    return [
        View(scaled_width, scaled_height, free_x * half // 2, free_y * half // 2, short_side, short_side)
        for half in halves
    ]


def _scale_jitter(
    short_side: tuple[int, int], crop: int, width: int, height: int, generator: np.random.Generator
) -> View:
    """Draw the short side uniformly from the integers lo..hi, then a uniform crop."""
    low, high = short_side
    if not 0 < crop <= low <= high:
        raise ValueError(f"short_side {low}..{high} must rise and be at least the crop, {crop}")
    drawn = int(generator.integers(low, high + 1))
    scaled_width, scaled_height = scaled_size(width, height, drawn)
    x = int(generator.integers(0, scaled_width - crop + 1))
    y = int(generator.integers(0, scaled_height - crop + 1))
    return View(scaled_width, scaled_height, x, y, crop, crop)


def crop_sizes(crop: int, width: int, height: int) -> list[tuple[int, int]]:
    """Return the (width, height) pairs, in source pixels, of the multi-scale crop (Wang et al., TSN).

    Sides are 1, .875, .75, .66 of the shorter side, snapped to `crop` where nearer than 3 pixels (to
    avoid interpolation); a pair's two sides are at most one step apart.
    """
    base = min(width, height)
    sides = [max(1, int(base * scale)) for scale in MULTI_SCALES]
    sides = [min(base, crop) if abs(side - crop) < SNAP_PIXELS else side for side in sides]
    return [(sides[j], sides[i]) for i in range(len(sides)) for j in range(len(sides)) if abs(i - j) <= 1]


def _multi_scale_crop(crop: int, width: int, height: int, generator: np.random.Generator) -> View:
    """Draw one size and one of 13 positions; the box becomes `crop` x `crop`."""
    sizes = crop_sizes(crop, width, height)
    box_width, box_height = sizes[int(generator.integers(len(sizes)))]
    across, down = QUARTER_POSITIONS[int(generator.integers(len(QUARTER_POSITIONS)))]
    scaled_width, x = _scaled_axis(width, (width - box_width) // 4 * across, box_width, crop)
    scaled_height, y = _scaled_axis(height, (height - box_height) // 4 * down, box_height, crop)
    return View(scaled_width, scaled_height, x, y, crop, crop)


def _scaled_axis(length: int, offset: int, box: int, crop: int) -> tuple[int, int]:
    """Scale one axis so that `box` pixels become `crop`; return the whole length and the offset."""
    scaled = max(crop, round(length * crop / box))
    return scaled, min(round(offset * crop / box), scaled - crop)


def cut(picture: NDArray[np.uint8], view: View) -> NDArray[np.uint8]:
    """Return the view's crop of an upright (height, width, C) picture: contiguous (crop_height, crop_width, C)."""
    crop = picture[view.y : view.y + view.crop_height, view.x : view.x + view.crop_width]
    return mirrored(crop) if view.flip else np.ascontiguousarray(crop)


def mirrored(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a contiguous copy of a (height, width, C) picture, mirrored left to right."""
    copy = np.empty(picture.shape, np.uint8)
    # Channel by channel: NumPy takes three times as long where the innermost step is over the channels.
    for colour in range(picture.shape[2]):
        copy[..., colour] = picture[:, ::-1, colour]
    return copy
