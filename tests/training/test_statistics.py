"""BN's running statistics under accumulation, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.training.step import RunningStatistics, count_updates
from tests.closeness import assert_near


def _batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64) + 1 for _ in range(count)]


@pytest.mark.parametrize("accumulation", [1, 2, 3, 8])
def test_every_micro_batch_has_the_same_weight(accumulation: int) -> None:
    """r <- (1 - m) r + m / A * sum(s_i), for mean and (unbiased) variance, over three steps."""
    norm = nn.BatchNorm2d(3, momentum=0.1, dtype=torch.float64)
    statistics = RunningStatistics(norm, accumulation, World())
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    batches = _batches(3 * accumulation)
    for step in range(3):
        mine = batches[step * accumulation : (step + 1) * accumulation]
        statistics.begin_step()
        for index, batch in enumerate(mine):
            statistics.begin_pass(index)
            norm(batch)
        statistics.start_mean()
        statistics.finish(torch.zeros(()))
        mean = 0.9 * mean + 0.1 * torch.stack([b.mean((0, 2, 3)) for b in mine]).mean(0)
        var = 0.9 * var + 0.1 * torch.stack([b.var((0, 2, 3)) for b in mine]).mean(0)
    assert norm.running_mean is not None and norm.running_var is not None
    assert_near(norm.running_mean, mean, 1e-13)
    assert_near(norm.running_var, var, 1e-13)


def test_a_skipped_step_leaves_no_trace() -> None:
    norm = nn.BatchNorm2d(3)
    statistics = RunningStatistics(norm, 2, World())
    statistics.begin_step()
    for index in range(2):
        statistics.begin_pass(index)
        norm(torch.full((2, 3, 2, 2), float("nan")))
    assert norm.running_mean is not None and norm.running_mean.isnan().all()
    statistics.start_mean()
    statistics.finish(torch.ones(()))
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.running_var is not None and norm.running_var.tolist() == [1, 1, 1]


def test_the_counter_counts_updates_not_passes() -> None:
    norm = nn.BatchNorm2d(3)
    for batch in _batches(4):
        norm(batch.float())
    count_updates(norm, 1)
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 1
