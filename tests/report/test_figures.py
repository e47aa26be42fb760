"""How names and curves are prepared for a figure."""

from __future__ import annotations

import numpy as np
import pytest

from summit_train.report.figures import drawable, finite, moving_mean, smoothed, thinned


def test_names_are_cut_and_letters_the_font_lacks_replaced():
    assert drawable("tsm_r50 ± µ") == "tsm_r50 ± µ"
    assert drawable("\u6771\u4eac\n\x00") == "□" * 4
    assert len(drawable("x" * 500)) == 60


@pytest.mark.parametrize(
    ("values", "means"),
    [
        ([0.0, 3.0, 6.0, 0.0], [1.5, 3.0, 3.0, 3.0]),
        ([1.0, np.nan, 3.0, np.nan, np.nan, np.nan], [1.0, 2.0, 3.0, 3.0, np.nan, np.nan]),
    ],
)
def test_the_moving_mean_is_shorter_at_the_ends_and_passes_over_gaps(values, means):
    np.testing.assert_allclose(moving_mean(np.array(values), 3), means)


def test_thinned_keeps_both_spikes_of_a_long_curve():
    y = np.zeros(100_000)
    y[12_345], y[54_321], y[777] = 9.0, -9.0, np.nan
    x, thin = thinned(np.arange(100_000.0), y)
    assert len(x) <= 1500 and (np.diff(x) > 0).all()
    assert thin[x == 12_345] == [9.0] and thin[x == 54_321] == [-9.0]


def test_smoothed_keeps_the_mean_of_a_long_curve():
    x, y = smoothed(np.arange(60_000.0), np.tile([1.0, 2.0, 3.0], 20_000))
    assert len(x) == len(y) == 1500
    np.testing.assert_allclose(y, 2.0, atol=0.02)


def test_finite_turns_the_rest_into_gaps():
    np.testing.assert_array_equal(finite([1.0, None, float("inf")]), [1.0, np.nan, np.nan])


@pytest.mark.parametrize("length", [0, 1, 2])
def test_curves_of_hardly_any_points(length):
    y = np.ones(length)
    assert smoothed(y, y)[1].shape == thinned(y, y)[1].shape == (length,)
