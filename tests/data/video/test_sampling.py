from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.data.video import augment

COUNTS = {
    "num_video_frames": st.integers(1, 400),
    "num_frames": st.integers(1, 33),
    "stride": st.integers(1, 9),
}


def _train(kind: str, num_video_frames: int, num_frames: int, stride: int, draw: int = 0) -> list[int]:
    generator = rng.key(0, "sampling", draw)
    return [int(i) for i in augment.train_frames(kind, num_video_frames, num_frames, stride, generator)]


# Dense: T frames, `stride` apart, of a window of T * stride frames.


def test_dense_starts_are_all_positions_and_nothing_else() -> None:
    # Window 4 * 2 = 8 frames of 11: starts 0, 1, 2, 3 and no other.
    drawn = {tuple(_train("dense", 11, 4, 2, draw)) for draw in range(200)}
    assert drawn == {(0, 2, 4, 6), (1, 3, 5, 7), (2, 4, 6, 8), (3, 5, 7, 9)}


def test_dense_starts_are_drawn_evenly() -> None:
    starts = [_train("dense", 73, 8, 8, draw)[0] for draw in range(4000)]
    counts = np.bincount(starts, minlength=10)
    assert len(counts) == 10  # 73 - 64 + 1
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400)


def test_dense_frames_of_a_short_video_repeat_in_order() -> None:
    assert _train("dense", 5, 4, 2) == [0, 2, 4, 1]
    assert _train("dense", 3, 8, 1) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert _train("dense", 1, 3, 8) == [0, 0, 0]


@given(**COUNTS, draw=st.integers(0, 9))
def test_dense_frames_lie_in_the_video_and_a_stride_apart(
    num_video_frames: int, num_frames: int, stride: int, draw: int
) -> None:
    frames = _train("dense", num_video_frames, num_frames, stride, draw)
    assert len(frames) == num_frames
    assert all(0 <= frame < num_video_frames for frame in frames)
    assert all((after - before - stride) % num_video_frames == 0 for before, after in pairwise(frames))
    if num_video_frames >= num_frames * stride:
        assert frames == sorted(frames)


def test_dense_test_starts_reach_from_the_first_to_the_last_position() -> None:
    # 100 frames, window 64: starts 0..36; ten of them, 4 apart.
    clips = augment.test_frames("dense", 100, 8, 8, 10)
    assert clips[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert clips[3].tolist() == [12, 20, 28, 36, 44, 52, 60, 68]


def test_dense_test_clips_of_a_short_video_are_all_the_same() -> None:
    assert augment.test_frames("dense", 5, 4, 2, 3).tolist() == [[0, 2, 4, 1]] * 3


def test_one_dense_test_clip_stands_in_the_middle() -> None:
    """93 starts, 0 to 92, for a window of 8 frames in 100."""
    assert augment.test_frames("dense", 100, 4, 2, 1).tolist() == [[46, 48, 50, 52]]


# Uniform: one frame of each of T equal segments.


def test_uniform_draws_one_frame_of_each_segment_and_every_frame_can_be_drawn() -> None:
    # 10 frames in 4 segments: edges 0, 2, 5, 7, 10.
    drawn = np.array([_train("uniform", 10, 4, 1, draw) for draw in range(300)])
    assert [sorted(set(column)) for column in drawn.T.tolist()] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_uniform_takes_every_frame_where_there_are_as_many_as_wanted() -> None:
    assert _train("uniform", 6, 6, 8) == [0, 1, 2, 3, 4, 5]
    assert augment.test_frames("uniform", 6, 6, 8, 1).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_uniform_frames_of_a_short_video_repeat_in_order() -> None:
    assert _train("uniform", 3, 8, 1) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert augment.test_frames("uniform", 3, 8, 1, 2).tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]] * 2


def test_one_uniform_test_clip_takes_the_centres_of_the_segments() -> None:
    # tick = 100 / 8 = 12.5: int(6.25 + 12.5 * i).
    assert augment.test_frames("uniform", 100, 8, 1, 1).tolist() == [[6, 18, 31, 43, 56, 68, 81, 93]]


def test_uniform_test_clips_stand_evenly_within_the_segments() -> None:
    # tick = 25; two clips: a quarter and three quarters of it, 6.25 and 18.75.
    assert augment.test_frames("uniform", 100, 4, 1, 2).tolist() == [[6, 31, 56, 81], [18, 43, 68, 93]]


@given(**COUNTS, draw=st.integers(0, 9))
def test_uniform_frames_rise_through_the_video(num_video_frames: int, num_frames: int, stride: int, draw: int) -> None:
    frames = _train("uniform", num_video_frames, num_frames, stride, draw)
    assert len(frames) == num_frames
    assert frames == sorted(frames)
    assert 0 <= frames[0] <= frames[-1] < num_video_frames
    if num_video_frames >= num_frames:
        assert len(set(frames)) == num_frames


@given(kind=st.sampled_from(["dense", "uniform"]), **COUNTS, num_clips=st.integers(1, 12))
def test_test_clips_lie_in_the_video_and_rise(
    kind: str, num_video_frames: int, num_frames: int, stride: int, num_clips: int
) -> None:
    clips = augment.test_frames(kind, num_video_frames, num_frames, stride, num_clips)
    assert clips.dtype == np.int64
    assert clips.shape == (num_clips, num_frames)
    assert clips.min() >= 0
    assert clips.max() < num_video_frames
    assert (np.diff(clips[:, 0]) >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dense", 0, 4, 2), "video frames must be at least 1, not 0"),
        (("uniform", 10, 0, 2), "frames must be at least 1, not 0"),
        (("dense", 10, 4, -1), "stride must be at least 1, not -1"),
    ],
)
def test_what_cannot_be_sampled_is_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _train(*arguments)
    with pytest.raises(ValueError, match=message):
        augment.test_frames(*arguments, 1)


def test_no_test_clip_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one test clip, not 0"):
        augment.test_frames("dense", 10, 4, 2, 0)


# Streams, and early recognition.


def test_a_dense_stream_sees_every_strides_frame_to_the_end() -> None:
    assert augment.stream_frames("dense", 25, 4, 8).tolist() == [0, 8, 16, 24]
    assert augment.stream_frames("dense", 24, 4, 8).tolist() == [0, 8, 16]
    assert augment.stream_frames("dense", 3, 4, 8).tolist() == [0]


def test_a_uniform_stream_sees_the_one_clip() -> None:
    assert augment.stream_frames("uniform", 100, 8, 5).tolist() == [6, 18, 31, 43, 56, 68, 81, 93]
    assert augment.stream_frames("uniform", 3, 8, 5).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


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
    assert clips[-1:].tolist() == augment.test_frames("uniform", 25, 4, 1, 1).tolist()
