from __future__ import annotations

import pytest

from summit_train.core.text import csv_text, duration, mean_std, show


def test_long_lists_say_how_long_they_are():
    assert show(list(range(1000))).endswith("19, … (1,000 in all)")


def test_a_csv_for_people_holds_no_formulas():
    rows = [["=cmd|'/C calc'!A0", "+1+1", "-video.mp4", "@SUM(1)", "\tx", -1.5, "-1.5", "+2", "a=b"]]
    assert csv_text(rows) == "'=cmd|'/C calc'!A0,'+1+1,'-video.mp4,'@SUM(1),'\tx,-1.5,-1.5,+2,a=b\n"
    assert csv_text(rows, exact=True) == "=cmd|'/C calc'!A0,+1+1,-video.mp4,@SUM(1),\tx,-1.5,-1.5,+2,a=b\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.4, "0.4 s"), (8, "8 s"), (8.06, "8.1 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (60, "1 min 00 s"),
        (200, "3 min 20 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min"), (360_060, "100 h 01 min"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_mean_and_deviation_as_far_as_known():
    assert [mean_std(73.807, 0.049), mean_std(73.8, None), mean_std(None, None)] == [
        "73.81 ± 0.05 %",
        "73.80 %",
        "—",
    ]
