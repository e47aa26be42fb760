from __future__ import annotations

import numpy as np
import pytest

from summit_train.core.text import binary_size, counted, csv_text, duration, mean_std, noise_text, show


def test_long_lists_say_how_long_they_are():
    assert show(list(range(1000))).endswith("19, … (1,000 in all)")


def test_a_csv_for_people_holds_no_formulas():
    rows = [["=cmd|'/C calc'!A0", "+1+1", "-video.mp4", "@SUM(1)", "\tx", -1.5, "-1.5", "+2", "a=b"]]
    assert csv_text(rows) == "'=cmd|'/C calc'!A0,'+1+1,'-video.mp4,'@SUM(1),'\tx,-1.5,-1.5,+2,a=b\n"
    assert csv_text(rows, exact=True) == "=cmd|'/C calc'!A0,+1+1,-video.mp4,@SUM(1),\tx,-1.5,-1.5,+2,a=b\n"
    assert csv_text([[f"+{'1' * 1_000_000}x"]])[:3] == "'+1"  # in time that grows with the length, not its square


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


def test_one_thing_is_counted_as_one():
    assert [counted(1, "epoch"), counted(1.0, "epoch"), counted(2.5, "epoch"), counted(1536, "rank")] == [
        "1 epoch", "1 epoch", "2.5 epochs", "1,536 ranks",
    ]  # fmt: skip
    assert [counted(12345.6, "image"), counted(np.int64(123_456), "clip"), counted(np.int64(1), "clip")] == [
        "12,346 images", "123,456 clips", "1 clip",
    ]  # fmt: skip
    assert [noise_text(1.0), noise_text(6.29), noise_text(1234.5)] == ["1 clip", "6.29 clips", "1,230 clips"]


def test_memory_below_one_gib_is_in_mib():
    assert [binary_size(50e6), binary_size(2**30), binary_size(14.83e9)] == ["48 MiB", "1.0 GiB", "13.8 GiB"]


def test_mean_and_deviation_as_far_as_known():
    assert [mean_std(73.807, 0.049), mean_std(73.8, None), mean_std(None, None)] == [
        "73.81 ± 0.05 %",
        "73.80 %",
        "—",
    ]
