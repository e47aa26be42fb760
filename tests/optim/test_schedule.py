"""The learning rate against numbers worked by hand from the paper."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.optim.schedule import learning_rate, peak_learning_rate

# No deadline and no limit on drawing: how fast the machine is, is not the question.
LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("global_batch", "peak"),
    [
        (8, 0.00125),  # "0.00125 for every 8 samples"
        (96, 0.015),  # the baseline: 6 GPUs of 16 clips
        (48 * 8, 0.06),
        (1536 * 8, 1.92),  # "0.00125 k" of k = 1,536 GPUs
        (6144 * 8, 7.68),
    ],
)
def test_the_peak_is_the_papers(global_batch: int, peak: float) -> None:
    assert peak_learning_rate(0.00125, 8, global_batch, "linear") == pytest.approx(peak, rel=1e-14)


def test_the_other_rules() -> None:
    assert peak_learning_rate(0.1, 256, 1024, "sqrt") == pytest.approx(0.2)
    assert peak_learning_rate(0.1, 256, 1024, "none") == 0.1
    with pytest.raises(ValueError, match="'cubic'; valid: linear, sqrt, none"):
        peak_learning_rate(0.1, 256, 1024, "cubic")


def test_a_run_of_ten_steps_by_hand() -> None:
    rates = [learning_rate(step, peak_lr=0.8, total_steps=10, warmup_steps=4, decay="cosine") for step in range(11)]
    # Half cosines at 0, 30, 60, ... 180 degrees: (1 + cos) / 2.
    root = math.sqrt(3) / 2
    after = [1, (1 + root) / 2, 0.75, 0.5, 0.25, (1 - root) / 2, 0]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8 * after[0], *(0.8 * share for share in after)], abs=1e-15)


def test_without_decay_the_peak_stays() -> None:
    rates = [learning_rate(step, peak_lr=1.0, total_steps=6, warmup_steps=2, decay="none") for step in range(6)]
    assert rates == [0.5, 1, 1, 1, 1, 1]


def test_a_run_that_is_all_warm_up_ends_at_the_peak() -> None:
    rates = [learning_rate(step, peak_lr=1.0, total_steps=4, warmup_steps=4, decay="cosine") for step in range(4)]
    assert rates == [0.25, 0.5, 0.75, 1.0]


def test_a_run_without_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, peak_lr=1.0, total_steps=4, warmup_steps=0, decay="cosine") == 1.0


@LAWS
@given(total=st.integers(1, 400), share=st.floats(0, 1), peak=st.floats(1e-9, 1e3))
def test_up_without_a_jump_then_down_and_never_below_zero(total: int, share: float, peak: float) -> None:
    warmup = round(share * total)
    rates = [
        learning_rate(step, peak_lr=peak, total_steps=total, warmup_steps=warmup, decay="cosine")
        for step in range(total)
    ]
    assert all(after > before > 0 for before, after in pairwise(rates[:warmup]))
    assert all(before >= after > 0 for before, after in pairwise(rates[warmup:]))
    # No jump between the two, and the peak on both sides (but for the last bit of peak * n / n).
    assert warmup == 0 or rates[warmup - 1] == pytest.approx(peak, rel=1e-15)
    assert warmup == total or rates[warmup] == peak
    # The steepest step of warm-up and of half a cosine bounds every step.
    steepest = max(1 / max(1, warmup), math.pi / 2 / max(1, total - warmup))
    assert all(abs(b - a) <= peak * steepest * (1 + 1e-9) for a, b in pairwise(rates))
