"""BN's running statistics of a step against their definition, however often a norm runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from summit_train.core.comm import World
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.training.running_statistics import RunningStatistics
from tests.closeness import assert_near

DONE = torch.zeros(())


class _Foreign(nn.BatchNorm2d):
    """A norm of a network that runs it as often as it likes."""

    replaceable = False


def _normed_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64) + 1 for _ in range(count)]


def _step(
    statistics: RunningStatistics, norm: nn.Module, batches: Sequence[torch.Tensor], skipped: torch.Tensor = DONE
) -> None:
    """Make a step in which the norm runs once in each micro-batch."""
    statistics.begin_step()
    for batch in batches:
        norm(batch)
        statistics.end_pass()
    statistics.start_mean()
    statistics.finish(skipped, 0)


@pytest.mark.parametrize("accumulation", [1, 2, 3, 8])
def test_every_micro_batch_has_the_same_weight(accumulation: int) -> None:
    """r <- (1 - m) r + m / A * sum(s_i), for mean and (unbiased) variance, over three steps."""
    norm = nn.BatchNorm2d(3, momentum=0.1, dtype=torch.float64)
    statistics = RunningStatistics(norm, accumulation, World())
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    batches = _normed_batches(3 * accumulation)
    for step in range(3):
        mine = batches[step * accumulation : (step + 1) * accumulation]
        _step(statistics, norm, mine)
        mean = 0.9 * mean + 0.1 * torch.stack([b.mean((0, 2, 3)) for b in mine]).mean(0)
        var = 0.9 * var + 0.1 * torch.stack([b.var((0, 2, 3)) for b in mine]).mean(0)
    assert_near(norm.get_buffer("running_mean"), mean, 1e-13)
    assert_near(norm.get_buffer("running_var"), var, 1e-13)


def test_a_skipped_step_leaves_no_trace() -> None:
    norm = nn.BatchNorm2d(3)
    nan = torch.full((2, 3, 2, 2), float("nan"))
    _step(RunningStatistics(norm, 2, World()), norm, [nan, nan], skipped=torch.ones(()))
    assert norm.get_buffer("running_mean").tolist() == [0, 0, 0]
    assert norm.get_buffer("running_var").tolist() == [1, 1, 1]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_norm_may_run_any_number_of_times(accumulation: int, momentum: float | None, use_reentrant: bool) -> None:
    """r <- (1 - m) r + m / A * sum(mean of the calls, or r for none). Each call runs again in the backward pass."""
    norm = _Foreign(3, momentum=momentum, dtype=torch.float64)
    statistics = RunningStatistics(norm, accumulation, World())
    expected = {"mean": torch.zeros(3, dtype=torch.float64), "var": torch.ones(3, dtype=torch.float64)}
    for step, counts in enumerate([[2, 0, 1], [4, 1, 3], [0, 0, 0], [1, 1, 0]]):
        passes = [_normed_batches(count) for count in counts[:accumulation]]
        statistics.begin_step()
        for index, batches in enumerate(passes):
            total = torch.zeros((), requires_grad=True) + sum(
                checkpoint(norm, batch.requires_grad_(), use_reentrant=use_reentrant).sum() for batch in batches
            )
            statistics.end_pass()
            if index == accumulation - 1:
                statistics.start_mean()
            with statistics.kept():
                torch.autograd.backward(total)
        statistics.finish(torch.zeros(()), step)
        for name, own in expected.items():
            seen = [[getattr(batch.detach(), name)((0, 2, 3)) for batch in batches] for batches in passes]
            means = [torch.stack(calls).mean(0) if calls else own for calls in seen]
            m = 1 / (step + 1) if momentum is None else momentum
            expected[name] = (1 - m) * own + m * torch.stack(means).mean(0)
            assert_near(norm.get_buffer(f"running_{name}"), expected[name], 1e-13)


class _Rank(World):
    """One rank of some, whose sums the test takes: `brought` is what it gives to the total."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        super().__init__()

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        self.brought = tensor
        return lambda: None


@pytest.mark.parametrize(
    ("kind", "calls", "momentum"),
    [
        *((nn.BatchNorm2d, 1, momentum) for momentum in (0.1, 1.0)),
        *((_Foreign, 2, momentum) for momentum in (0.1, 1.0, None)),
    ],
)
def test_uneven_shares_add_up_to_one_ranks(kind: type[nn.BatchNorm2d], calls: int, momentum: float | None) -> None:
    """Three virtual GPUs on two ranks, in a first step, where momentum None is 1: r <- (1 - m) r + m/3 sum(s_i)."""
    batches, m = _normed_batches(3 * calls), 1.0 if momentum is None else momentum
    ranks, norms, ends = [_Rank(0, 2), _Rank(1, 2)], [], []
    for rank in ranks:
        norm = kind(3, momentum=momentum, dtype=torch.float64)
        statistics = RunningStatistics(norm, 3, rank)
        statistics.begin_step()
        for gpu in virtual_gpus_of(rank.rank, 2, 3):
            for batch in batches[gpu * calls : (gpu + 1) * calls]:
                norm(batch)
            statistics.end_pass()
        statistics.start_mean()
        norms.append(norm)
        ends.append(statistics)
    total = ranks[0].brought + ranks[1].brought
    first = torch.cat([torch.zeros(3), torch.ones(3)]).double()
    seen = torch.stack([torch.cat([batch.mean((0, 2, 3)), batch.var((0, 2, 3))]) for batch in batches]).mean(0)
    for rank, norm, statistics in zip(ranks, norms, ends, strict=True):
        rank.brought.copy_(total)
        statistics.finish(torch.zeros(()), 0)
        found = torch.cat([norm.get_buffer("running_mean"), norm.get_buffer("running_var")])
        assert_near(found, (1 - m) * first + m * seen, 1e-13)
        assert norm.momentum == momentum


def test_a_call_outside_of_a_step_is_torchs_and_does_not_count_within_one() -> None:
    norm, batches = _Foreign(3, momentum=0.5, dtype=torch.float64), _normed_batches(2)
    outside, inside = (batch.mean((0, 2, 3)) for batch in batches)
    statistics = RunningStatistics(norm, 1, World())
    norm(batches[0])
    assert_near(norm.get_buffer("running_mean"), 0.5 * outside, 1e-13)
    _step(statistics, norm, batches[1:])
    assert_near(norm.get_buffer("running_mean"), 0.25 * outside + 0.5 * inside, 1e-13)
