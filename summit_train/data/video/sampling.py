"""Sampling: the frames of a video that make a clip, as pure functions of counts and a generator.

Frame numbers are 0-based, in presentation order. A video with too few frames repeats them in order. The rules are those
of TSM (dense) and TSN (uniform), except that a dense training start may be any position, the last one too, and that
test starts are never random.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def train_frames(
    sampling: str, num_video_frames: int, num_frames: int, stride: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the frames of one training clip, int64 (num_frames,).

    sampling: 'dense' (`num_frames` frames, `stride` apart, from a random start) or 'uniform' (one random
    frame of each of `num_frames` equal segments; `stride` is not read).
    Raises ValueError for another name or a count below one.
    """
    _check(sampling, num_video_frames, num_frames, stride)
    if sampling == "dense":
        start = int(generator.integers(0, _num_starts(num_video_frames, num_frames, stride)))
        return _dense(start, num_video_frames, num_frames, stride)
    return _uniform_train(num_video_frames, num_frames, generator)


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
    if sampling == "dense":
        last = _num_starts(num_video_frames, num_frames, stride) - 1
        numbers = np.arange(num_clips, dtype=np.int64)
        starts = numbers * last // (num_clips - 1) if num_clips > 1 else numbers + last // 2
        return _dense(starts[:, None], num_video_frames, num_frames, stride)
    # int(tick * (i + (c + 1/2)/k)), tick = N/T, in integers: floor(N * (2*k*i + 2*c + 1) / (2*k*T)).
    clip = np.arange(num_clips, dtype=np.int64)[:, None]
    segment = np.arange(num_frames, dtype=np.int64)[None, :]
    if num_video_frames < num_frames:
        return np.repeat(segment * num_video_frames // num_frames, num_clips, axis=0)
    halves = 2 * num_clips * segment + 2 * clip + 1
    return num_video_frames * halves // (2 * num_clips * num_frames)


def _num_starts(num_video_frames: int, num_frames: int, stride: int) -> int:
    """Return max(1, 1 + N - window), the starts that keep the window of num_frames * stride inside the video."""
    return max(1, 1 + num_video_frames - num_frames * stride)


def _dense(start: int | NDArray[np.int64], num_video_frames: int, num_frames: int, stride: int) -> NDArray[np.int64]:
    """Return (start + i * stride) mod N, i = 0..T-1."""
    return (start + np.arange(num_frames, dtype=np.int64) * stride) % num_video_frames


def _uniform_train(num_video_frames: int, num_frames: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw one frame of each segment i*N//T .. (i+1)*N//T - 1, so that every frame of the video can be drawn."""
    edges = np.arange(num_frames + 1, dtype=np.int64) * num_video_frames // num_frames
    if num_video_frames < num_frames:
        return edges[:-1]
    return generator.integers(edges[:-1], edges[1:])


def _check(sampling: str, num_video_frames: int, num_frames: int, stride: int) -> None:
    if sampling not in ("dense", "uniform"):
        raise ValueError(f"unknown sampling {sampling!r}: choose dense or uniform")
    for name, value in (("video frames", num_video_frames), ("frames", num_frames), ("stride", stride)):
        if value < 1:
            raise ValueError(f"the number of {name} must be at least 1, not {value}")
