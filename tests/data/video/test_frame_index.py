from __future__ import annotations

from collections.abc import Sequence

import pytest

from summit_train.data.video.decode import AmbiguousTimes, FrameIndex

# Two groups of pictures in decoding order, as an encoder with B-frames orders them: I P B B, I P B B, ...
# Presentation:   0  3  1  2   4  7  5  6   8  ...
TIMES = [0, 30, 10, 20, 40, 70, 50, 60, 80, 110, 90, 100]
KEYS = [True, False, False, False] * 3


def _index() -> FrameIndex:
    return FrameIndex(_packets(TIMES, KEYS), 12)


def _packets(
    times: Sequence[int | None], keys: Sequence[bool], discarded: Sequence[bool] = ()
) -> list[tuple[int | None, bool, bool]]:
    return list(zip(times, keys, discarded or [False] * len(times), strict=True))


def test_times_number_the_frames() -> None:
    assert [_index().number_of[time] for time in TIMES] == [0, 3, 1, 2, 4, 7, 5, 6, 8, 11, 9, 10]


def test_a_late_frame_is_decoded_from_its_key_frame() -> None:
    assert list(_index().spans([9])) == [(8, 10, {90})]


def test_a_span_reaches_to_the_last_packet_that_a_wanted_frame_needs() -> None:
    # Frame 7 stands before frames 5 and 6 in decoding order.
    assert list(_index().spans([6, 7])) == [(4, 7, {60, 70})]


def test_a_short_jump_is_not_worth_it() -> None:
    assert list(_index().spans([2, 5])) == [(0, 6, {20, 50})]


def test_a_jump_between_two_wanted_frames() -> None:
    assert list(_index().spans({10, 0})) == [(0, 0, {0}), (8, 11, {100})]


def test_packets_that_are_not_shown_have_no_number() -> None:
    index = FrameIndex(_packets([-20, -10, *TIMES], [True, False, *KEYS], [True, True, *[False] * 12]), 12)
    assert index.number_of[0] == 0 and -10 not in index.number_of
    assert list(index.spans([9])) == [(10, 12, {90})]


def test_frames_before_the_first_key_frame_are_decoded_from_the_start() -> None:
    index = FrameIndex(_packets(TIMES, [False] * 8 + KEYS[8:]), 12)
    assert list(index.spans([5])) == [(0, 6, {50})]


@pytest.mark.parametrize(
    ("times", "keys", "num_frames"),
    [
        ([0, 1, 2], [True, False, False], 4),
        ([0, 1, 2], [True, False, False], 2),
        ([0, None, 2], [True, False, False], 3),
        ([0, None, 2], [True, False, False], 2),
        ([0, 1, 1], [True, False, False], 3),
        ([0, 1, 2], [False, False, False], 3),
        ([], [], 0),
    ],
)
def test_doubtful_times_are_refused(times: list[int | None], keys: list[bool], num_frames: int) -> None:
    with pytest.raises(AmbiguousTimes):
        FrameIndex(_packets(times, keys), num_frames)
