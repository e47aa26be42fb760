"""Videos of a test from their first frame to their last: the frames that are wanted, in order, in bounded memory.

A walk through a long video is cut into pieces, each of which is read by itself. Where the manifest has the number of
frames, a piece is decoded from the key frame before it, else from the video's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.data.batches.loader import in_direction
from summit_train.data.batches.stores import Store
from summit_train.data.batches.workers import Batches, Reading
from summit_train.data.video import augment
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

PICTURES_AT_ONCE = 384  # frames times crops of a piece: 75 MB at 256 x 256 pixels

# From the number of a video's frames to those that are wanted, rising and without repeats. Pure, and can be pickled.
Wanted = Callable[[int], NDArray[np.int64]]


@dataclass(frozen=True)
class StreamedFrames:
    """The frames that a stream sees: the Wanted of evaluation in mode stream."""

    data: DataSpec

    def __call__(self, num_video_frames: int) -> NDArray[np.int64]:
        return np.unique(self.in_order(num_video_frames))

    def in_order(self, num_video_frames: int) -> NDArray[np.int64]:
        """Return the numbers as the stream sees them, (S,): some twice where the video has too few."""
        data = self.data
        return augment.stream_frames(data.sampling, num_video_frames, data.num_frames, data.frame_stride)


@dataclass(frozen=True)
class ObservedFrames:
    """The frames of a clip for each observed fraction, and those of a stream beside them if there is one."""

    data: DataSpec
    fractions: tuple[Fraction, ...]
    streamed: StreamedFrames | None

    def __call__(self, num_video_frames: int) -> NDArray[np.int64]:
        clips = np.unique(self.clips(num_video_frames))
        return clips if self.streamed is None else np.union1d(clips, self.streamed(num_video_frames))

    def clips(self, num_video_frames: int) -> NDArray[np.int64]:
        """Return the numbers of the clips' frames, (fractions, T)."""
        return augment.observed_frames(num_video_frames, self.fractions, self.data.num_frames)


@dataclass(frozen=True)
class Piece:
    """Some frames of one video.

    num_frames: of the video. wanted: how many of them are wanted in all. numbers: of the frames here, in order of
    playing. views: uint8 (crops, len(numbers), height, width, C). error: why there is no view.
    """

    video: int
    start: int
    num_frames: int
    wanted: int
    numbers: NDArray[np.int64]
    views: torch.Tensor
    error: DecodeError | None = None

    def pin_memory(self) -> Piece:
        """Return the piece in page-locked memory; called by the DataLoader."""
        return replace(self, views=self.views.pin_memory())


@dataclass(frozen=True)
class Walk:
    """One video, of which the first piece is read."""

    first: Piece
    reader: _Pieces

    @property
    def video(self) -> int:
        """Return the video's place in the manifest."""
        return self.first.video

    @property
    def num_frames(self) -> int:
        """Return how many frames the video has. Raises DecodeError where it cannot be read."""
        if self.first.error is not None:
            raise self.first.error
        return self.first.num_frames

    def pieces(self) -> Iterator[Piece]:
        """Yield the video's pieces. Raises DecodeError where one cannot be read."""
        data, size = self.reader.data, self.reader.size
        later = [(self.video, start) for start in range(size, self.first.wanted, size)]
        yield _read(self.first)
        if later:
            with Batches(self.reader, later, min(data.workers, len(later)), data.clip_seconds) as pieces:
                yield from map(_read, pieces)


def walks(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], wanted: Wanted
) -> Iterator[Walk]:
    """Yield the walk through each of the given videos, in their order, in the crops that `evaluate` asks for.

    A video that cannot be read is a walk whose pieces raise DecodeError.
    """
    crops = evaluate.crops if isinstance(evaluate.crops, int) else 1
    reader = _Pieces(data, evaluate, store, wanted, max(1, PICTURES_AT_ONCE // crops))
    keys = [(int(video), 0) for video in videos]
    with Batches(reader, keys, min(data.workers, len(keys)), data.clip_seconds) as firsts:
        for first in firsts:
            yield Walk(first, reader)


def _read(piece: Piece) -> Piece:
    if piece.error is not None:
        raise piece.error
    return piece


@dataclass(frozen=True)
class _Pieces:
    """Reads the piece of a video that begins with its wanted frame number `start`."""

    data: DataSpec
    evaluate: EvaluateSpec
    store: Store
    wanted: Wanted
    size: int

    def __call__(self, key: tuple[int, int], reading: Reading) -> Piece:
        video, start = key
        manifest = self.store.manifest
        views_of = partial(augment.test_views, self.evaluate.short_side, self.evaluate.crops)
        # As the last choice had it, which is the one that counts: the first may begin with a wrong number of frames.
        num_frames, frames, anchors = 0, np.zeros(0, np.int64), 0

        def choose(number: int) -> NDArray[np.int64]:
            nonlocal num_frames, frames, anchors
            num_frames, frames = number, self.wanted(number)
            stored = in_direction(frames, number, manifest.is_reversed(video))
            here = stored[start : start + self.size]
            # Every piece reads the first and the last frame too: the one gives the size of the picture, the other
            # shows a number of frames that is too high.
            ends = np.array([stored.min(), stored.max()]) if len(stored) > self.size else here[:0]
            anchors = len(ends)
            return np.concatenate([ends, here])[None]

        try:
            with reading(video, manifest.path(video)):
                views = self.store.read_views(video, choose, views_of)
        except DecodeError as error:
            return Piece(video, start, 0, 0, frames[:0], torch.zeros(0, dtype=torch.uint8), error)
        here = frames[start : start + self.size]
        return Piece(video, start, num_frames, len(frames), here, torch.from_numpy(views[:, anchors:]))
