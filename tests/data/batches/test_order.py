from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.data.batches import order


@st.composite
def _runs(draw: st.DrawFn) -> dict[str, int]:
    """A run's numbers, without a rank."""
    virtual_gpus = draw(st.integers(1, 12))
    clips_per_gpu = draw(st.integers(1, 5))
    steps_per_epoch = draw(st.integers(1, 5))
    left_over = draw(st.integers(0, virtual_gpus * clips_per_gpu - 1))
    return {
        "num_clips": steps_per_epoch * virtual_gpus * clips_per_gpu + left_over,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "virtual_gpus": virtual_gpus,
        "clips_per_gpu": clips_per_gpu,
        "steps_per_epoch": steps_per_epoch,
    }


def _play(run: dict[str, int], rank: int = 0, ranks: int = 1, start: int = 0, end: int = 0) -> list[tuple[Any, ...]]:
    played = order.Order(**run).micro_batches(rank, ranks, range(start, end))
    return [(step, gpu, epoch, tuple(clips.tolist())) for step, gpu, epoch, clips in played]


@given(num_clips=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
@example(1_000_000, 0, 7)
def test_an_epoch_is_a_permutation(num_clips: int, seed: int, epoch: int) -> None:
    played = order.epoch_order(num_clips, seed, epoch)
    assert played.dtype == np.int32
    assert np.array_equal(np.sort(played), np.arange(num_clips))


def test_each_seed_and_epoch_has_its_order_which_stays_the_same_over_versions() -> None:
    orders = {tuple(order.epoch_order(50, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert order.epoch_order(8, 0, 0).tolist() == [0, 5, 6, 4, 3, 2, 1, 7]
    # Also where the order once was int64.
    assert np.array_equal(order.epoch_order(70_000, 3, 1), rng.key(3, "order", 1).permutation(70_000))


def test_the_order_is_cut_by_step_and_then_by_virtual_gpu() -> None:
    batches = list(order.Order(30, 7, 3, 4, 2).micro_batches(0, 1, range(2)))
    # 3 virtual GPUs of 4 clips: step 1 starts at 12, its virtual GPU 2 at 12 + 8.
    step, virtual_gpu, epoch, clips = batches[-1]
    assert (step, virtual_gpu, epoch) == (1, 2, 0)
    assert clips.tolist() == order.epoch_order(30, 7, 0)[20:24].tolist()
    assert clips.dtype == np.int64
    assert clips.base is None, "a kept batch keeps the epoch's order alive"


@given(run=_runs(), epochs=st.integers(1, 3))
def test_each_clip_at_most_once_an_epoch_and_as_many_as_the_steps_take(run: dict[str, int], epochs: int) -> None:
    per_epoch = run["steps_per_epoch"]
    played = _play(run, end=epochs * per_epoch)
    for epoch in range(epochs):
        clips = [clip for _, _, e, batch in played if e == epoch for clip in batch]
        assert len(set(clips)) == len(clips) == per_epoch * run["virtual_gpus"] * run["clips_per_gpu"]
        steps = {step for step, _, e, _ in played if e == epoch}
        assert steps == set(range(epoch * per_epoch, (epoch + 1) * per_epoch))


@given(run=_runs())
def test_together_the_ranks_play_the_same_whatever_their_number(run: dict[str, int]) -> None:
    end = 2 * run["steps_per_epoch"]
    alone = _play(run, end=end)
    for ranks in range(1, run["virtual_gpus"] + 1):
        shares = [_play(run, rank, ranks, end=end) for rank in range(ranks)]
        assert sorted(batch for share in shares for batch in share) == alone
        fewest = end * (run["virtual_gpus"] // ranks)
        assert all(fewest <= len(share) <= fewest + end for share in shares)


@settings(max_examples=50)
@given(run=_runs(), data=st.data())
def test_a_start_at_any_step_gives_the_tail(run: dict[str, int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, 3 * run["steps_per_epoch"]))
    start = data.draw(st.integers(0, end))
    assert _play(run, start=start, end=end) == [batch for batch in _play(run, end=end) if batch[0] >= start]


def test_left_over_clips_have_their_turn_in_another_epoch() -> None:
    run = {"num_clips": 11, "seed": 0, "virtual_gpus": 2, "clips_per_gpu": 2, "steps_per_epoch": 2}
    played = {clip for *_, clips in _play(run, end=40) for clip in clips}
    assert played == set(range(11))


def test_a_rank_has_neighbouring_virtual_gpus_at_least_one() -> None:
    assert order.virtual_gpus_of(1, 3, 6) == range(2, 4)
    assert [order.virtual_gpus_of(rank, 3, 7) for rank in range(3)] == [range(2), range(2, 4), range(4, 7)]
    for rank, ranks in ((0, 7), (2, 2)):
        with pytest.raises(AssertionError):
            order.virtual_gpus_of(rank, ranks, 6)


def _balanced(sizes: list[int], num_clips: int, epoch: int = 0, seed: int = 0) -> list[int]:
    ends = np.cumsum([0, *sizes])
    classes = tuple(np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(ends))
    played = order.balanced_order(classes, num_clips, seed, epoch)
    assert played.dtype == np.int32 and len(played) == num_clips
    return np.bincount(played, minlength=ends[-1]).tolist()


def test_balanced_classes_have_the_same_share_of_an_epoch_and_their_clips_of_them() -> None:
    """14 clips of classes of 1, 3 and 10: 5, 5 and 4 in some order; each of three clips once or twice."""
    one, *others = _balanced([1, 3, 10], 14)
    assert sorted([one, sum(others[:3]), sum(others[3:])]) == [4, 5, 5]
    assert set(others[:3]) <= {1, 2} and set(others[3:]) <= {0, 1}
    shares = [_balanced([1, 3, 10], 14, epoch)[0] for epoch in range(30)]
    assert set(shares) == {4, 5}  # which class has one less changes from epoch to epoch
    assert _balanced([5, 2], 4) == _balanced([5, 2], 4) != _balanced([5, 2], 4, seed=1)
    assert _balanced([4, 4], 1) in np.eye(8).tolist()  # more classes than clips


def test_a_balanced_order_is_cut_like_any_other_and_stays_the_same_over_versions() -> None:
    classes = (np.array([0], np.int32), np.array([1, 2, 3, 4, 5], np.int32))
    run = order.Order(6, 7, 1, 2, 3, classes=classes)
    played = [clip for *_, clips in run.micro_batches(0, 1, range(6)) for clip in clips.tolist()]
    assert played[:6] == order.balanced_order(classes, 6, 7, 0).tolist()
    assert played[6:] == order.balanced_order(classes, 6, 7, 1).tolist() and played.count(0) == 6
