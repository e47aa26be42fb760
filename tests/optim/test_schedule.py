"""The learning rate against numbers worked by hand from the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.optim.schedule import Schedule, peak_learning_rate


@pytest.mark.parametrize(
    ("base_lr", "base_batch", "global_batch", "rule", "peak"),
    [
        (0.00125, 8, 8, "linear", 0.00125),  # "0.00125 for every 8 samples"
        (0.00125, 8, 96, "linear", 0.015),  # the baseline: 6 GPUs of 16 clips
        (0.00125, 8, 1536 * 8, "linear", 1.92),  # "0.00125 k" of k = 1,536 GPUs
        (0.1, 256, 1024, "sqrt", 0.2),
        (0.1, 256, 1024, "none", 0.1),
    ],
)
def test_the_peak_is_the_papers(base_lr: float, base_batch: int, global_batch: int, rule: Any, peak: float) -> None:
    assert peak_learning_rate(base_lr, base_batch, global_batch, rule) == pytest.approx(peak, rel=1e-14)


def _rates(schedule: Schedule, steps: int | None = None) -> list[float]:
    return [schedule.learning_rate(step) for step in range(steps or schedule.total_steps)]


def test_a_run_of_ten_steps_by_hand() -> None:
    rates = _rates(Schedule(0.8, 10, 4), 11)
    # Half cosines at 0, 30, 60, ... 180 degrees: (1 + cos) / 2.
    root = math.sqrt(3) / 2
    after = [1, (1 + root) / 2, 0.75, 0.5, 0.25, (1 - root) / 2, 0]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8 * after[0], *(0.8 * share for share in after)], abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(1.0, 6, 2, decay="none"), [0.5, 1, 1, 1, 1, 1]),
        (Schedule(1.0, 4, 4), [0.25, 0.5, 0.75, 1.0]),
        # The floor of the linear decay is never above the peak.
        (Schedule(1e-7, 4, 2, decay="linear"), [5e-8, 1e-7, 1e-7, 1e-7]),
        (Schedule(1.6, 6, 4, warmup="squared", decay="none"), [0.1, 0.4, 0.9, 1.6, 1.6, 1.6]),
        # (T - i) / (T - W) with i = 3, 4, 5, 6, the last one at the floor.
        (Schedule(1.0, 6, 2, decay="linear"), [0.5, 1, 0.75, 0.5, 0.25, 1e-6]),
        # Squares of what is left of the four updates after the warm-up: 4, 3, 2, 1 quarters.
        (Schedule(1.6, 6, 2, decay="polynomial"), [0.8, 1.6, 1.6, 0.9, 0.4, 0.1]),
        (Schedule(1.0, 4, 0, decay="polynomial", power=0.5), [1, math.sqrt(0.75), math.sqrt(0.5), 0.5]),
        # Update 2 is the first of the second epoch of two updates.
        (Schedule(1.0, 6, 1, decay="steps", milestones=(2, 5), factor=0.1), [1, 1, 0.1, 0.1, 0.1, 0.01]),
    ],
)
def test_shapes_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert _rates(schedule) == pytest.approx(expected, rel=1e-14)


# DATE's worked example, section 3.6: LeNet on MNIST, 60,000 samples, 30 epochs; B_0 = 1,024 with LR 1.25e-3 and 2
# epochs of warm-up; B = 8,192. Algorithm 1 counts the warm-up in epochs, 16 of 60,000 / 8,192 updates, and the decay
# in I = 220 updates: so the decay is that of a run whose warm-up is 16 / 30 of its updates.
ALGORITHM_1 = {
    1: 3.016989e-5, 58: 1.749854e-3, 117: 3.529877e-3, 118: 3.512576e-3, 150: 2.410591e-3, 200: 6.887404e-4, 220: 1e-6,
}  # fmt: skip


def test_the_worked_example_of_date() -> None:
    peak = peak_learning_rate(1.25e-3, 1024, 8192, "sqrt")
    assert peak == pytest.approx(3.535534e-3, rel=1e-6)
    for iteration, expected in ALGORITHM_1.items():
        warmup_steps = 16 * 60_000 / 8192 if iteration <= 117 else 16 / 30 * 220
        rate = Schedule(peak, 220, warmup_steps, decay="linear").learning_rate(iteration - 1)
        assert rate == pytest.approx(expected, rel=3e-7)


DECAYS = """
import random

def by_epoch(progress, epoch, shares=(1, 0.5, 0.25)):
    return shares[int(epoch)]

def by_progress(progress, epoch):
    return 2 - progress

class Counts:
    calls = 0
    def __call__(self, progress, epoch):
        self.calls += 1
        return 1 / self.calls

def random_one(progress, epoch):
    return random.random()

def negative(progress, epoch):
    return 0.5 - progress

def infinite(progress, epoch):
    return float("inf")

def unknown(progress, epoch):
    return float("nan")

def text(progress, epoch):
    return "1"

def flag(progress, epoch):
    return True

def alone(progress):
    return 1
"""


def _own(folder: Path, name: str, **options: object) -> OwnPart:
    (folder / "decays.py").write_text(DECAYS)
    return OwnPart.open("schedule.decay", f"{folder}/decays.py:{name}", options)


def test_a_decay_of_the_users_own_by_hand(tmp_path: Path) -> None:
    """Six updates, two an epoch, and one or two of them warm-up."""
    own = Schedule(0.8, 6, 1, decay=_own(tmp_path, "by_epoch"), steps_per_epoch=2)
    assert own.check() == own.check() != replace(own, peak_lr=0.4).check()
    assert replace(own, decay="cosine").check() is None  # all ranks have the same built-in ones
    assert _rates(own) == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2, 0.2], rel=1e-14)
    assert own.learning_rate(3.9) == 0.4  # a grown batch has steps in between
    other = replace(own, decay=_own(tmp_path, "by_epoch", shares=(1, 0, 1)))
    assert _rates(other) == pytest.approx([0.8, 0.8, 0, 0, 0.8, 0.8], rel=1e-14)
    above = replace(own, warmup_steps=2, decay=_own(tmp_path, "by_progress"))
    assert _rates(above) == pytest.approx([0.4, 0.8, 1.6, 1.4, 1.2, 1.0], rel=1e-14)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counts", "Counts must return the same for the same input, got other factors; draw nothing, and keep no stat"),
        ("random_one", "random_one must return the same for the same input"),
        ("negative", r"negative must return a finite factor, 0 or more, got -0\.16\d+ at epoch 2$"),
        ("infinite", "infinite must return a finite factor, 0 or more, got inf at epoch 0"),
        ("unknown", "unknown must return a finite factor, 0 or more, got nan at epoch 0"),
        ("text", "text must return a finite factor, 0 or more, got '1' at epoch 0"),
        ("flag", "flag must return a finite factor, 0 or more, got True at epoch 0"),
        ("alone", r"alone\(progress\) must take progress, epoch: too many positional arguments"),
        ("none", "must have a class or function none, found none"),
    ],
)
def test_a_decay_that_gives_no_rate_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^schedule\.decay: .*{message}") as raised:
        Schedule(1.0, 6, 0, decay=_own(tmp_path, name), steps_per_epoch=2).check()
    assert "\n" not in str(raised.value)
