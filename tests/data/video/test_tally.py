from __future__ import annotations

from fractions import Fraction

import pytest

from summit_train.data.video.decode import Tally


def _tally(times: list[int | None], duration: int) -> Tally:
    tally = Tally(Fraction(1, 10))
    for time in times:
        tally.add(time, duration, is_damaged=False)
    return tally


def test_the_duration_ends_with_the_last_frame() -> None:
    assert _tally([20, 25, 22], 3).duration == pytest.approx(0.8)


def test_a_last_frame_without_a_duration_lasts_a_mean_interval() -> None:
    assert _tally([0, 1, 4], 0).duration == pytest.approx(0.6)


@pytest.mark.parametrize("times", [[], [None, None], [5]])
def test_without_times_there_is_no_duration(times: list[int | None]) -> None:
    assert _tally(times, 0).duration is None


def test_the_first_damage_is_told() -> None:
    tally = _tally([0], 1)
    tally.add(1, 1, is_damaged=True)
    tally.damage.append("the file is cut short")
    assert (tally.num_frames, tally.damage[0]) == (2, "frame 1 is damaged")
