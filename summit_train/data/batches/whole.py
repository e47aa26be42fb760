"""Whole videos of a test, from the first frame to the last: the chosen frames, in order, in bounded memory.

A long video is read in blocks of frames, each on its own. If the manifest has the number of frames, a block is decoded
from the key frame before it, else from the video's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.data.batches.loader import Pinned
from summit_train.data.batches.stores import Store
from summit_train.data.batches.workers import Batches, Reading
from summit_train.data.video import augment
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

PICTURES_AT_ONCE = 384  # frames times crops of a block: 75 MB at 256 x 256 pixels

# From the number of a video's frames to the wanted ones, in any order and with repeats. Pure, and can be pickled.
ChooseFrames = Callable[[int], NDArray[np.int64]]


@dataclass(frozen=True)
class FrameBlock(Pinned):
    """Some frames of one video.

    num_frames: of the video, 0 with an error. num_chosen: how many of them are chosen in all. numbers: of the frames
    here, in order of playing. views: uint8 (crops, len(numbers), height, width, C). error: why it has no views.
    """

    video: int
    num_frames: int
    num_chosen: int
    numbers: NDArray[np.int64]
    views: torch.Tensor
    error: DecodeError | None = None


@dataclass(frozen=True)
class WholeVideo:
    """One video, `video` its place in the manifest, of which the first block is read."""

    video: int
    first: FrameBlock
    blocks_at: Callable[[Sequence[tuple[int, int]]], Batches[FrameBlock]]
    size: int

    def blocks(self) -> Iterator[FrameBlock]:
        """Yield the video's blocks. Raises DecodeError at one that could not be read."""
        if self.first.error is not None:
            raise self.first.error
        yield self.first
        later = [(self.video, start) for start in range(self.size, self.first.num_chosen, self.size)]
        if later:
            with self.blocks_at(later) as blocks:
                for block in blocks:
                    if block.error is not None:
                        raise block.error
                    yield block


def whole_videos(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], choose_frames: ChooseFrames
) -> Iterator[WholeVideo]:
    """Yield each of the given videos, in their order, in the crops that `evaluate` asks for.

    The blocks have the chosen frames in order, each once. Those of a video that cannot be read raise DecodeError.
    """
    size = max(1, PICTURES_AT_ONCE // (evaluate.crops if isinstance(evaluate.crops, int) else 1))
    read = partial(_read_block, evaluate, store, choose_frames, size)

    def blocks_at(keys: Sequence[tuple[int, int]]) -> Batches[FrameBlock]:
        return Batches(read, keys, min(data.workers, len(keys)), data.clip_seconds)

    with blocks_at([(int(video), 0) for video in videos]) as firsts:
        for first in firsts:
            yield WholeVideo(first.video, first, blocks_at, size)


def _read_block(
    evaluate: EvaluateSpec,
    store: Store,
    choose_frames: ChooseFrames,
    size: int,
    key: tuple[int, int],
    reading: Reading,
) -> FrameBlock:
    """Read at most `size` frames of a video. key: the video, and the place among its chosen frames of the first."""
    (video, start), manifest = key, store.manifest
    # As the last choice had it, which is the one that counts: the first may begin with a wrong number of frames.
    num_frames, frames, num_anchors = 0, np.zeros(0, np.int64), 0

    def choose(number: int) -> NDArray[np.int64]:
        nonlocal num_frames, frames, num_anchors
        num_frames, frames = number, np.unique(choose_frames(number))
        stored = number - 1 - frames if manifest.is_reversed(video) else frames
        here = stored[start : start + size]
        # Every block reads the first and the last frame too: the one gives the size of the picture, the other shows a
        # number of frames that is too high.
        anchors = np.array([stored.min(), stored.max()]) if len(stored) > size else here[:0]
        num_anchors = len(anchors)
        return np.concatenate([anchors, here])[None]

    views_of = partial(augment.test_views, evaluate.short_side, evaluate.crops)
    try:
        with reading(video, manifest.path(video)):
            views = store.read_views(video, choose, views_of)
    except DecodeError as error:
        return FrameBlock(video, 0, 0, frames[:0], torch.zeros(0, dtype=torch.uint8), error)
    here = frames[start : start + size]
    return FrameBlock(video, num_frames, len(frames), here, torch.from_numpy(views[:, num_anchors:]))
