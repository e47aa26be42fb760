"""Sampling and augmentation: the frames of a video that make a clip, and the rectangle that is cut out of them.

All are pure functions of counts, sizes and a generator. Frame numbers are 0-based, in presentation order; a video with
too few frames repeats them in order. The rules for frames are those of TSM (dense) and TSN (uniform), except that a
dense training start may be any position, the last one too, and that test starts are never random. A `View` tells the
decoder to scale the whole upright frame, cut a rectangle out of it and perhaps mirror it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from summit_train.spec.modality import FLOW_ZERO, RGB

SNAP_PIXELS = 3
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

    sampling: 'dense' (`num_frames` frames, `stride` apart, from a random start) or 'uniform' (one random
    frame of each of `num_frames` equal segments; `stride` is not read).
    Raises ValueError for a count below one.
    """
    _check(sampling, num_video_frames, num_frames, stride)
    if sampling == "dense":
        start = int(generator.integers(0, _num_starts(num_video_frames, num_frames, stride)))
        return _dense(start, num_video_frames, num_frames, stride)
    # One of each segment i*N//T .. (i+1)*N//T - 1: every frame of the video can be drawn.
    edges = np.arange(num_frames + 1, dtype=np.int64) * num_video_frames // num_frames
    return edges[:-1] if num_video_frames < num_frames else generator.integers(edges[:-1], edges[1:])


def test_frames(
    sampling: str, num_video_frames: int, num_frames: int, stride: int, num_clips: int
) -> NDArray[np.int64]:
    """Return the frames of a video's test clips, int64 (num_clips, num_frames); nothing is random.

    dense: starts evenly spaced from the first to the last possible one (one clip: halfway between them).
    uniform: one clip takes the segments' centres; k clips stand at (c + 1/2)/k of a segment, c = 0..k-1.
    """
    _check(sampling, num_video_frames, num_frames, stride)
    if num_clips < 1:
        raise ValueError(f"a video needs at least one test clip, not {num_clips}")
    clip = np.arange(num_clips, dtype=np.int64)[:, None]
    if sampling == "dense":
        last = _num_starts(num_video_frames, num_frames, stride) - 1
        starts = clip * last // (num_clips - 1) if num_clips > 1 else clip + last // 2
        return _dense(starts, num_video_frames, num_frames, stride)
    # int(tick * (i + (c + 1/2)/k)), tick = N/T, in integers: floor(N * (2*k*i + 2*c + 1) / (2*k*T)).
    segment = np.arange(num_frames, dtype=np.int64)[None, :]
    if num_video_frames < num_frames:
        return np.repeat(segment * num_video_frames // num_frames, num_clips, axis=0)
    halves = 2 * num_clips * segment + 2 * clip + 1
    return num_video_frames * halves // (2 * num_clips * num_frames)


def stream_frames(sampling: str, num_video_frames: int, num_frames: int, stride: int) -> NDArray[np.int64]:
    """Return the frames of a video that a stream sees, int64 (S,), rising.

    dense: every `stride`-th from the first to the end. uniform: those of the one test clip, which repeats frames of a
    video with fewer than `num_frames`.
    """
    if sampling == "dense":
        _check(sampling, num_video_frames, num_frames, stride)
        return np.arange(0, num_video_frames, stride, dtype=np.int64)
    one: NDArray[np.int64] = test_frames(sampling, num_video_frames, num_frames, stride, num_clips=1)[0]
    return one


def num_flow_frames(sampling: str, num_fields: int, length: int) -> int:
    """Return at how many fields of a video of flow a frame of `length` fields may start; at least 1.

    dense: at each, the last ones repeat. uniform: where all of the frame lies in the video. Source: the TSM authors'
    code (ops/dataset.py).
    """
    return num_fields if sampling == "dense" else max(1, num_fields - length + 1)


def flow_pictures(starts: NDArray[np.int64], num_fields: int, length: int) -> NDArray[np.int64]:
    """Return the pictures of frames of flow, int64 (K, T * 2 * length), for the fields (K, T) that they start at.

    Picture 2 t has the x component of field t, picture 2 t + 1 the y component. Past the end the last field repeats.
    """
    fields = np.minimum(starts[..., None] + np.arange(length, dtype=np.int64), num_fields - 1)
    return np.stack([2 * fields, 2 * fields + 1], -1).reshape(len(starts), -1)


def mirrored_x(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the x components of flow, as pictures hold them, of the mirrored video: v becomes 256 - v.

    No motion stays no motion. 0, below the least value that has an opposite, becomes 255.
    """
    opposite: NDArray[np.uint8] = (2 * FLOW_ZERO - np.maximum(values, 1).astype(np.int16)).astype(np.uint8)
    return opposite


def num_observed(num_video_frames: int, fraction: Fraction) -> int:
    """Return ceil(fraction * N): how many frames, from the first, are observed. A float would miss by one at times."""
    return math.ceil(fraction * num_video_frames)


def observed_frames(num_video_frames: int, fractions: Sequence[Fraction], num_frames: int) -> NDArray[np.int64]:
    """Return clips for early recognition, int64 (len(fractions), num_frames): uniform in what is observed by then."""
    observed = [num_observed(num_video_frames, fraction) for fraction in fractions]
    return np.concatenate([test_frames("uniform", number, num_frames, 1, num_clips=1) for number in observed])


def _num_starts(num_video_frames: int, num_frames: int, stride: int) -> int:
    """Return max(1, 1 + N - window), the starts that keep the window of num_frames * stride inside the video."""
    return max(1, 1 + num_video_frames - num_frames * stride)


def _dense(start: int | NDArray[np.int64], num_video_frames: int, num_frames: int, stride: int) -> NDArray[np.int64]:
    """Return (start + i * stride) mod N, i = 0..T-1."""
    return (start + np.arange(num_frames, dtype=np.int64) * stride) % num_video_frames


def _check(sampling: str, num_video_frames: int, num_frames: int, stride: int) -> None:
    assert sampling in ("dense", "uniform")
    for name, value in (("video frames", num_video_frames), ("frames", num_frames), ("stride", stride)):
        if value < 1:
            raise ValueError(f"the number of {name} must be at least 1, not {value}")


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
    shorter = min(width, height)
    return width * short_side // shorter, height * short_side // shorter


@dataclass(frozen=True)
class Augmentation:
    """The distribution of training views, `crop` x `crop` squares.

    kind: 'scale_jitter' (the paper's: the short side is uniform over the integers of `short_side`, both ends included,
    then the crop is uniform) or 'multi_scale_crop' (TSN's and TSM's: `scales` in place of `short_side`, see
    `crop_sizes`). flip: mirror half of them.
    """

    kind: str
    short_side: tuple[int, int]
    crop: int
    flip: bool
    scales: tuple[float, ...] = RGB.crop_scales


def train_view(how: Augmentation, width: int, height: int, generator: np.random.Generator) -> View:
    """Draw the view of one training clip, of a `width` x `height` frame.

    Raises ValueError for an unknown kind, and where the crop is larger than the smallest short side.
    """
    crop = how.crop
    if how.kind == "scale_jitter":
        low, high = how.short_side
        if not 0 < crop <= low <= high:
            raise ValueError(f"short_side {low}..{high} must rise and be at least the crop, {crop}")
        scaled_width, scaled_height = scaled_size(width, height, int(generator.integers(low, high + 1)))
        x = int(generator.integers(0, scaled_width - crop + 1))
        y = int(generator.integers(0, scaled_height - crop + 1))
        view = View(scaled_width, scaled_height, x, y, crop, crop)
    elif how.kind == "multi_scale_crop":
        view = _multi_scale_crop(how, width, height, generator)
    else:
        raise ValueError(f"unknown augment {how.kind!r}: choose scale_jitter or multi_scale_crop")
    # Always drawn: switching flips off must not change the crops.
    mirrored = bool(generator.random() < 0.5)
    return replace(view, flip=how.flip and mirrored)


def test_views(short_side: int, crops: int | str, width: int, height: int) -> list[View]:
    """Return the views of one test clip, all of one size, of a `width` x `height` frame.

    crops: 1 (the centre square of side `short_side`), 3 (left, centre, right along the longer side) or
    'full' (the whole frame, its shorter side scaled to `short_side`). Raises ValueError for anything else.
    """
    scaled = scaled_size(width, height, short_side)
    if crops == "full":
        return [View(*scaled, 0, 0, *scaled)]
    if crops not in (1, 3):
        raise ValueError(f"crops must be 1, 3 or 'full', not {crops!r}")
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


def _multi_scale_crop(how: Augmentation, width: int, height: int, generator: np.random.Generator) -> View:
    """Draw one size and one of 13 positions; the box becomes `crop` x `crop`."""
    crop, sizes = how.crop, crop_sizes(how.crop, width, height, how.scales)
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
    if not view.flip:
        return np.ascontiguousarray(crop)
    mirrored = np.empty(crop.shape, np.uint8)
    # Channel by channel: NumPy takes three times as long where the innermost step is over the channels.
    for colour in range(crop.shape[2]):
        mirrored[..., colour] = crop[:, ::-1, colour]
    return mirrored
