"""Sampling and augmentation: the frames of a video that make a clip, and the rectangle that is cut out of them.

All are pure functions of counts, sizes and a generator. Frame numbers are 0-based, in presentation order; a video with
too few frames repeats them in order. The rules for frames are those of TSM (dense) and TSN (uniform), except that a
dense training start may be any position, the last one too, and that test starts are never random. A `View` tells the
decoder to scale the whole upright frame, cut a rectangle out of it and perhaps mirror it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from summit_train.spec import DataSpec
from summit_train.spec.catalog import FLOW_ZERO, RGB

SNAP_PIXELS = 3
ASPECTS = (3 / 4, 4 / 3)
# The crop's offset in quarters of the free space: corners and centre, the edges' middles, the inner four.
QUARTER_POSITIONS = (
    (0, 0), (4, 0), (0, 4), (4, 4), (2, 2),
    (0, 2), (4, 2), (2, 4), (2, 0),
    (1, 1), (3, 1), (1, 3), (3, 3),
)  # fmt: skip


def train_frames(
    sampling: str, num_video_frames: int, num_frames: int, stride: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the frames of one training clip, int64 (num_frames,).

    sampling: 'dense' (`num_frames` frames, `stride` apart, from a random start) or 'uniform' (one random frame of each
    of `num_frames` equal segments; `stride` is not read).
    """
    if sampling == "dense":
        start = int(generator.integers(0, max(1, 1 + num_video_frames - num_frames * stride)))
        return (start + np.arange(num_frames, dtype=np.int64) * stride) % num_video_frames
    # One of each segment i*N//T .. (i+1)*N//T - 1: every frame of the video can be drawn.
    edges = np.arange(num_frames + 1, dtype=np.int64) * num_video_frames // num_frames
    return edges[:-1] if num_video_frames < num_frames else generator.integers(edges[:-1], edges[1:])


def test_frames(
    sampling: str, num_video_frames: int, num_frames: int, stride: int, num_clips: int
) -> NDArray[np.int64]:
    """Return the frames of a video's test clips, int64 (num_clips, num_frames); nothing is random.

    dense: starts evenly spaced from the first to the last possible one (one clip: halfway between them).
    uniform: one clip takes the segments' centres; k clips take (c + 1/2)/k of each segment, c = 0..k-1.
    """
    clip, segment = np.arange(num_clips, dtype=np.int64)[:, None], np.arange(num_frames, dtype=np.int64)[None, :]
    if sampling == "dense":
        last = max(0, num_video_frames - num_frames * stride)
        starts = clip * last // (num_clips - 1) if num_clips > 1 else clip + last // 2
        return (starts + segment * stride) % num_video_frames
    # int(tick * (i + (c + 1/2)/k)), tick = N/T, in integers: floor(N * (2*k*i + 2*c + 1) / (2*k*T)).
    if num_video_frames < num_frames:
        return np.repeat(segment * num_video_frames // num_frames, num_clips, axis=0)
    halves = 2 * num_clips * segment + 2 * clip + 1
    return num_video_frames * halves // (2 * num_clips * num_frames)


def stream_frames(data: DataSpec, num_video_frames: int) -> NDArray[np.int64]:
    """Return the frames of a video that a stream sees, int64 (S,), rising.

    dense: every `stride`-th from the first to the end. uniform: those of the one test clip, which repeats frames of a
    video with fewer than `num_frames`.
    """
    if data.sampling == "dense":
        return np.arange(0, num_video_frames, data.frame_stride, dtype=np.int64)
    return test_frames("uniform", num_video_frames, data.num_frames, 1, num_clips=1).ravel()


def num_observed(num_video_frames: int, fraction: Fraction) -> int:
    """Return ceil(fraction * N): how many frames, from the first, are observed. A float would miss by one at times."""
    return math.ceil(fraction * num_video_frames)


def observed_frames(num_video_frames: int, fractions: Sequence[Fraction], num_frames: int) -> NDArray[np.int64]:
    """Return clips for early recognition, int64 (len(fractions), num_frames): uniform in what is observed by then."""
    observed = [num_observed(num_video_frames, fraction) for fraction in fractions]
    return np.concatenate([test_frames("uniform", number, num_frames, 1, num_clips=1) for number in observed])


@dataclass(frozen=True)
class View:
    """A crop of the scaled upright frame, in pixels.

    width, height: the scaled frame's size. x, y: the crop's upper left corner. crop_width, crop_height: its size. flip:
    mirror the crop left to right. region: left, top, width and height of what is scaled in place of the whole frame, in
    pixels of the frame; all views of a clip have the same.
    """

    width: int
    height: int
    x: int
    y: int
    crop_width: int
    crop_height: int
    flip: bool = False
    region: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.x < self.x + self.crop_width <= self.width, self
        assert 0 <= self.y < self.y + self.crop_height <= self.height, self

    def moved(self, areas: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
        """Map areas of a frame of this (width, height) into the crop: (n, 4), clipped at its edges.

        An area is left, top, right, bottom in pixels; one over the first pixel alone is 0, 0, 1, 1.
        """
        scale = np.array([self.width / size[0], self.height / size[1]] * 2, np.float32)
        seen = areas * scale - np.array([self.x, self.y] * 2, np.float32)
        if self.flip:
            seen[:, [0, 2]] = self.crop_width - seen[:, [2, 0]]
        limits = np.array([self.crop_width, self.crop_height] * 2, np.float32)
        return np.asarray(np.clip(seen, 0, limits))


def scaled_size(width: int, height: int, short_side: int, long_side: int | None = None) -> tuple[int, int]:
    """Return the (width, height) of a frame scaled so that its shorter side becomes `short_side`.

    long_side: where the longer side would exceed it, that one becomes `long_side`.
    """
    side, now = short_side, min(width, height)
    if long_side is not None and max(width, height) * short_side > long_side * now:
        side, now = long_side, max(width, height)
    return max(1, width * side // now), max(1, height * side // now)


def train_view(data: DataSpec, width: int, height: int, generator: np.random.Generator) -> View:
    """Draw the view of one training clip of a `width` x `height` frame: a square of side data.crop, or all of it.

    scale_jitter (the paper's): the short side is uniform over the integers of data.short_side, both ends included, then
    the crop is uniform. multi_scale_crop (TSN's and TSM's): one of `crop_sizes` and one of 13 positions; rand_augment:
    the box of `draw_box`. The box becomes the crop. whole: the whole frame, with a short side as for scale_jitter.
    data.flip: mirror half of them.
    """
    crop, low, high = data.crop, *data.short_side
    if data.built_in_augment in ("scale_jitter", "whole"):
        limit = data.long_side if data.built_in_augment == "whole" else None
        scaled = scaled_size(width, height, int(generator.integers(low, high + 1)), limit)
        crops = scaled if data.built_in_augment == "whole" else (crop, crop)
        x, y = (int(generator.integers(0, side - length + 1)) for side, length in zip(scaled, crops, strict=True))
    else:
        if data.built_in_augment == "multi_scale_crop":
            sizes = crop_sizes(crop, width, height, data.crop_scales or data.input.crop_scales)
            box = sizes[int(generator.integers(len(sizes)))]
            position = QUARTER_POSITIONS[int(generator.integers(len(QUARTER_POSITIONS)))]
            free = zip((width, height), box, position, strict=True)
            left, top = ((length - side) // 4 * quarters for length, side, quarters in free)
        else:
            box, (left, top) = draw_box(data.rand_augment_settings.crop_area, width, height, generator)
        # Each axis is scaled so that the box becomes the crop.
        axes = list(zip((width, height), box, (left, top), strict=True))
        across, down = (max(crop, round(length * crop / side)) for length, side, _ in axes)
        scaled, crops = (across, down), (crop, crop)
        places = zip(axes, scaled, strict=True)
        x, y = (min(round(start * crop / side), whole - crop) for (_, side, start), whole in places)
    # Always drawn: switching flips off must not change the crops.
    mirrored = bool(generator.random() < 0.5)
    return View(*scaled, x, y, *crops, flip=data.flip and mirrored)


def draw_box(
    areas: tuple[float, float], width: int, height: int, generator: np.random.Generator
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw a box of a `width` x `height` frame, in pixels: its (width, height), and its (left, top).

    Its part of the area is uniform in `areas`, the logarithm of its aspect between those of 3/4 and 4/3; after ten that
    do not fit, it is the centre of the frame with the nearest aspect (Szegedy et al. 2015, as torchvision and timm).
    """
    narrowest, widest = ASPECTS
    for _ in range(10):
        area = width * height * generator.uniform(*areas)
        aspect = math.exp(generator.uniform(math.log(narrowest), math.log(widest)))
        box = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box[0] <= width and 0 < box[1] <= height:
            top = int(generator.integers(height - box[1] + 1))
            return box, (int(generator.integers(width - box[0] + 1)), top)
    box = min(width, round(height * widest)), min(height, round(width / narrowest))
    return box, ((width - box[0]) // 2, (height - box[1]) // 2)


def test_views(
    short_side: int, crops: int | str, width: int, height: int, *, long_side: int | None = None
) -> list[View]:
    """Return the views of one test clip, all of one size, of a `width` x `height` frame.

    crops: 1 (the centre square of side `short_side`), 3 (left, centre, right along the longer side) or
    'full' (the whole frame, its shorter side scaled to `short_side`, see `scaled_size` for `long_side`).
    """
    if crops == "full":
        scaled = scaled_size(width, height, short_side, long_side)
        return [View(*scaled, 0, 0, *scaled)]
    scaled = scaled_size(width, height, short_side)
    free_x, free_y = (side - short_side for side in scaled)
    halves = (1,) if crops == 1 else (0, 1, 2)
    return [View(*scaled, free_x * half // 2, free_y * half // 2, short_side, short_side) for half in halves]


def crop_sizes(crop: int, width: int, height: int, scales: Sequence[float] = RGB.crop_scales) -> list[tuple[int, int]]:
    """Return the (width, height) pairs, in source pixels, of the multi-scale crop (Wang et al., TSN).

    Sides are `scales` of the shorter side, snapped to `crop` where nearer than 3 pixels (to avoid interpolation); a
    pair's two sides are at most one step apart.
    """
    base = min(width, height)
    sides = [max(1, int(base * scale)) for scale in scales]
    sides = [min(base, crop) if abs(side - crop) < SNAP_PIXELS else side for side in sides]
    return [(sides[j], sides[i]) for i in range(len(sides)) for j in range(len(sides)) if abs(i - j) <= 1]


def mirrored_x(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the x components of flow, as pictures hold them, of the mirrored video: v becomes 256 - v.

    No motion stays no motion. 0, below the least value that has an opposite, becomes 255.
    """
    return (2 * FLOW_ZERO - np.maximum(values, 1).astype(np.int16)).astype(np.uint8)


def cut(picture: NDArray[np.uint8], view: View) -> NDArray[np.uint8]:
    """Return the view's crop of an upright (height, width, C) picture: contiguous (crop_height, crop_width, C)."""
    crop = picture[view.y : view.y + view.crop_height, view.x : view.x + view.crop_width]
    if not view.flip:
        return np.ascontiguousarray(crop)
    mirrored = np.empty(crop.shape, np.uint8)
    # Channel by channel: NumPy takes three times as long if the innermost step is over the channels.
    for colour in range(crop.shape[2]):
        mirrored[..., colour] = crop[:, ::-1, colour]
    return mirrored
