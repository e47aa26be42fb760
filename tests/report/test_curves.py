from __future__ import annotations

import numpy as np
import pytest

from summit_train.report.figures import axis_name, finite, moving_mean, positions, smoothed, thinned
from summit_train.report.metrics import Run


def test_moving_mean_is_centred_and_shorter_at_the_ends():
    got = moving_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3)
    np.testing.assert_allclose(got, [1.5, 3.0, 3.0, 3.0])


def test_moving_mean_passes_over_what_is_not_finite():
    got = moving_mean(np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.nan]), 3)
    np.testing.assert_allclose(got, [1.0, 2.0, 3.0, 3.0, np.nan, np.nan])


def test_thinned_keeps_both_spikes_of_a_long_curve():
    y = np.zeros(100_000)
    y[12_345], y[54_321], y[777] = 9.0, -9.0, np.nan
    x, thin = thinned(np.arange(100_000.0), y, most=1000)
    assert len(x) <= 1000 and (np.diff(x) > 0).all()
    assert thin[x == 12_345] == [9.0] and thin[x == 54_321] == [-9.0]


def test_short_curves_are_not_thinned():
    x, y = np.arange(5.0), np.array([1.0, np.nan, 2.0, 3.0, 4.0])
    assert thinned(x, y)[1] is y


def test_smoothed_keeps_the_mean_of_a_long_curve():
    x, y = smoothed(np.arange(60_000.0), np.tile([1.0, 2.0, 3.0], 20_000), most=1000)
    assert len(x) == len(y) == 1000
    np.testing.assert_allclose(y, 2.0, atol=0.02)


def test_finite_turns_the_rest_into_gaps():
    np.testing.assert_array_equal(finite([1.0, None, float("inf")]), [1.0, np.nan, np.nan])


def test_the_axis_is_epochs_unless_a_run_does_not_know_them(write_run, run_records):
    run = Run(write_run("a"))
    young = Run(write_run("b", lines=run_records()[:5], leave_out=("plan.json",)))
    assert axis_name([run]) == "epoch" and axis_name([run, young]) == "step"
    np.testing.assert_allclose(positions(run, [5, 40], "epoch"), [0.5, 4.0])
    np.testing.assert_allclose(positions(run, [5, 40], "step"), [5, 40])


@pytest.mark.parametrize("length", [0, 1, 2])
def test_curves_of_hardly_any_points(length):
    y = np.ones(length)
    assert smoothed(y, y)[1].shape == thinned(y, y)[1].shape == (length,)
