"""The noise scale in the report: the formulas by hand, the standard error by simulation."""

from __future__ import annotations

import random
import statistics

import pytest

from summit_train.core.text import noise_text
from summit_train.report.noise import batch_rows, pooled


def test_the_cost_of_a_batch_by_hand() -> None:
    """Noise scale 96: a batch of 32 takes 4 times the fewest steps and 4/3 of the fewest clips."""
    rows = batch_rows(32, 96)
    assert rows[0] == ("32", "4.00", "1.33", "100 %", "100 %")
    # 128 clips: 1 + 96/128 = 1.75 of 4 steps; 1 + 128/96 = 2.33 of 1.33 clips
    assert rows[2] == ("128", "1.75", "2.33", "44 %", "175 %")
    assert rows[-1][0] == "2,048"
    assert batch_rows(96, 96)[0][1:3] == ("2.00", "2.00")  # equation 2.11: (2 - 1) (2 - 1) = 1


def test_the_ratio_of_the_means_with_its_error_by_hand() -> None:
    """Variances 8 and 4, squares 3 and 1: 12/4 = 3; both residuals v - 3 s are -1 and 1, so sqrt(2 / 1 / 2) / 2."""
    found = pooled([(3.0, 8.0), (1.0, 4.0)])
    assert (found.count, found.value, found.error) == (2, 3.0, 0.5)
    assert found.text == "3 ± 0.5 clips"
    assert pooled([(2.0, 8.0)]).text == "4 clips"
    assert pooled([(-2.0, 8.0), (1.0, 8.0)]).text == "unclear"


def test_the_standard_error_is_the_scatter_of_repeated_measurements() -> None:
    draw = random.Random(5)
    runs = [pooled([(draw.gauss(2, 1), draw.gauss(14, 3)) for _ in range(200)]) for _ in range(400)]
    values, errors = [run.value or 0.0 for run in runs], [run.error or 0.0 for run in runs]
    assert statistics.fmean(values) == pytest.approx(7, rel=0.01)
    assert statistics.stdev(values) == pytest.approx(statistics.fmean(errors), rel=0.1)


def test_a_noise_scale_for_people() -> None:
    for clips, text in ((3.14159, "3.14 clips"), (999.4, "999 clips"), (12345.0, "12,300 clips"), (None, "unclear")):
        assert noise_text(clips) == text
    assert noise_text(float("inf")) == "unclear"
