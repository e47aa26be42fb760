"""Quantiles of a histogram against those of the numbers themselves."""

from __future__ import annotations

import numpy as np
import pytest

from summit_train.inference.stream.latencies import Latencies


def test_quantiles_by_hand() -> None:
    latencies = Latencies()
    for milliseconds in range(1, 101):
        latencies.add(milliseconds / 1000)
    assert latencies.quantile(0.5) == pytest.approx(0.050, rel=0.006)
    assert latencies.quantile(0.99) == pytest.approx(0.099, rel=0.006)
    assert latencies.quantile(1.0) == pytest.approx(0.100, rel=0.006)
    assert (latencies.count, latencies.maximum) == (100, 0.1)


def test_the_memory_depends_on_the_range_alone() -> None:
    latencies, seconds = Latencies(), np.random.default_rng(0).lognormal(-5, 1, 20_000)
    for value in seconds.tolist():
        latencies.add(value)
    for part in (0.01, 0.5, 0.99):
        assert latencies.quantile(part) == pytest.approx(np.quantile(seconds, part), rel=0.01)
    assert len(latencies._bins) < 1000


def test_the_ends() -> None:
    latencies = Latencies()
    assert latencies.quantile(0.5) == latencies.maximum == 0.0
    latencies.add(0.0)
    latencies.add(3.0)
    assert latencies.quantile(0.5) <= 1e-7 and latencies.quantile(0.51) == pytest.approx(3.0, rel=0.006)
