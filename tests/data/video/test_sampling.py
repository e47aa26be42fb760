from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.data.video import augment
from summit_train.spec import DataSpec

COUNTS = {
    "num_video_frames": st.integers(1, 400),
    "num_frames": st.integers(1, 33),
    "stride": st.integers(1, 9),
}


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
        # tick = 100 / 8 = 12.5: int(6.25 + 12.5 * i).
        (("uniform", 100, 8, 1, 1), [[6, 18, 31, 43, 56, 68, 81, 93]]),
        # tick = 25; two clips: a quarter and three quarters of it, 6.25 and 18.75.
        (("uniform", 100, 4, 1, 2), [[6, 31, 56, 81], [18, 43, 68, 93]]),
    ],
)
def test_test_clips_by_hand(arguments: tuple[Any, ...], clips: list[list[int]]) -> None:
    assert augment.test_frames(*arguments).tolist() == clips


def test_dense_test_starts_reach_from_the_first_to_the_last_position() -> None:
    # 100 frames, window 64: starts 0..36; ten of them, 4 apart.
    clips = augment.test_frames("dense", 100, 8, 8, 10)
    assert clips[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert clips[3].tolist() == [12, 20, 28, 36, 44, 52, 60, 68]


@given(kind=st.sampled_from(["dense", "uniform"]), **COUNTS, num_clips=st.integers(1, 12))
def test_test_clips_lie_in_the_video_and_rise(
    kind: str, num_video_frames: int, num_frames: int, stride: int, num_clips: int
) -> None:
    clips = augment.test_frames(kind, num_video_frames, num_frames, stride, num_clips)
    assert (clips.dtype, clips.shape) == (np.int64, (num_clips, num_frames))
    assert clips.min() >= 0 and clips.max() < num_video_frames
    assert (np.diff(clips[:, 0]) >= 0).all()


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
