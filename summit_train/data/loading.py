"""From a clip of a list to arrays: its frames, its views, their pixels, and its boxes in them.

What is drawn for training is a function of a key, (seed, epoch, clip), and of nothing else: not of the rank or the
worker that reads the clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.data.manifest import Manifest
from summit_train.data.video.augment import View, train_frames, train_view
from summit_train.data.video.clips import ChooseAgain, Numbers, OpenClip
from summit_train.data.video.render import Frames
from summit_train.spec import DataSpec

Sample = Callable[[int], Numbers]  # from a number of frames to those of K clips, int64 (K, T), in order of playing
Crop = Callable[[int, int], Sequence[View]]  # from a frame's width and height to C views whose crops have one size
Targets = list[list[NDArray[np.float32]]]  # boxes as Boxes.targets gives them, [view][frame]; [] without
Draw = tuple[int, ...]  # (epoch, clip), with data.balance: classes (epoch, clip, step, virtual GPU, place)


class Store(Protocol):
    """The clips of a manifest. It is pickled to the loader's workers, so it opens files where it reads."""

    @property
    def manifest(self) -> Manifest:
        """The list of the clips."""

    def open(self, clip: int) -> OpenClip:
        """Open a clip; frame 0 is its first stored frame. Raises DecodeError."""


class Decoded(NamedTuple):
    """K clips of a video in C views, and what they were cut from and by.

    pixels: uint8 (K * C, T, height, width, channels), clip by clip. frames: their numbers in the video, int64 (K, T).
    num_frames, size: of the clip.
    """

    pixels: Frames
    frames: Numbers
    views: Sequence[View]
    num_frames: int
    size: tuple[int, int]

    def targets(self, manifest: Manifest, clip: int) -> Targets:
        """Return a clip's boxes in each view; nothing for a list without boxes. Raises DecodeError."""
        if (boxes := manifest.boxes) is None:
            return []
        boxes.check(clip, manifest.path(clip), manifest.clip(clip).span.start + self.num_frames, *self.size)
        return [boxes.targets(clip, self.frames[0], view, self.size) for view in self.views]


def read_clip(store: Store, clip: int, sample: Sample, crop: Crop) -> Decoded:
    """Read the clips that `sample` and `crop` choose of a clip of a list. Raises DecodeError."""
    listed = store.manifest.clip(clip)
    with store.open(clip) as opened:
        decoded = read_open(opened, sample, crop, is_reversed=listed.is_reversed)
    return decoded._replace(frames=listed.span.start + decoded.frames)


def read_open(opened: OpenClip, sample: Sample, crop: Crop, *, is_reversed: bool = False) -> Decoded:
    """Read an open clip as `read_clip` does, its own frames numbered from 0.

    If decoding shows another length or size than the container states, call `sample` and `crop` again.
    """
    while True:
        num_frames = opened.num_frames
        played = sample(num_frames)
        frames = num_frames - 1 - played if is_reversed else played
        try:
            size = opened.size(frames)
            views = crop(*size)
            pixels = opened.read(frames, views)
        except ChooseAgain:
            continue
        return Decoded(pixels, opened.stored(frames), views, num_frames, size)


def read_training_clip(data: DataSpec, store: Store, clip: int, seed: int, drawn: Draw) -> Decoded:
    """Read a clip in `data.repeats` views. drawn: the key of its random draws, which a substitute takes over.

    Raises DecodeError.
    """

    def sample(num_frames: int) -> Numbers:
        generator = rng.key(seed, "sampling", *drawn)
        return train_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, generator)[None]

    def crop(width: int, height: int) -> list[View]:
        keys = draws_of_views(data.repeats, drawn)
        return [train_view(data, width, height, rng.key(seed, "augment", *key)) for key in keys]

    return read_clip(store, clip, sample, crop)


def draws_of_views(repeats: int, drawn: Draw) -> list[Draw]:
    """Return the key of each view of a clip; the first has that of a clip that is not repeated."""
    return [drawn, *((*drawn, repeat) for repeat in range(1, repeats))]


def whole_video(store: Store, video: int, sample: Sample, crop: Crop, size: int) -> Iterator[Decoded]:
    """Yield the chosen frames of a video, each once, in blocks of `size` in one view of each crop.

    sample: is taken as a set of frames, which are shown, and numbered in the blocks, in order of playing. With a listed
    number of frames it is one pass if the video does not play backwards. Raises DecodeError.
    """
    is_reversed = store.manifest.clip(video).is_reversed

    def chosen(num_frames: int) -> Numbers:
        return np.unique(sample(num_frames))

    def edges(num_frames: int) -> Numbers:
        """Choose a short video whole; of a long one the first frame for its size, and the last for its length."""
        frames = chosen(num_frames)
        return (frames if len(frames) <= size else frames[[0, -1]])[None]

    with store.open(video) as opened:
        decoded = read_open(opened, edges, crop, is_reversed=is_reversed)
        frames = chosen(decoded.num_frames)
        if len(frames) <= size:
            yield decoded._replace(frames=frames[None])
            return
        for start in range(0, len(frames), size):
            played = frames[None, start : start + size]
            stored = decoded.num_frames - 1 - played if is_reversed else played
            yield decoded._replace(pixels=opened.read(stored, decoded.views), frames=played)
