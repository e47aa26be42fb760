"""Two ranks on one GPU against one rank: the same weights, statistics and losses, in double precision.

Sums go through the host, so nothing here is about speed: each rank's tensors must be where they should be, and sums and
kernels must keep their order. Four virtual GPUs, synchronous and averaging.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from summit_train.core.comm import World
from tests.gpu.host_world import METHODS, State, trained
from tests.gpu.processes import environment
from tests.worlds import PATIENCE_S, ROOT

RANKS = 2
# Sums in another order: rounding of 1e-16, which four steps of 18 layers may multiply by a thousand or so.
BOUND = 1e-11


def problems(alone: State, ranks: Sequence[State]) -> list[str]:
    first, *others = ranks
    found = [
        f"the ranks differ in {name}" for other in others for name in first if not torch.equal(first[name], other[name])
    ]
    one, several = (torch.cat([value.double().flatten() for value in state.values()]) for state in (alone, first))
    difference = float((one - several).norm() / one.norm())
    return found + ([] if difference <= BOUND else [f"two ranks and one differ by {difference:.2g}"])


def test_two_ranks_end_as_one_does(device: torch.device, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.gpu.host_world", str(device), str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(rank), str(RANKS)], cwd=ROOT, env=environment(device)) for rank in range(RANKS)
    ]
    try:
        alone = {method: trained(method, World(), device) for method in METHODS}
        assert [process.wait(PATIENCE_S) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    ranks = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(RANKS)]
    assert {method: problems(alone[method], [state[method] for state in ranks]) for method in METHODS} == {
        method: [] for method in METHODS
    }


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [
        (1.0, (1.0, 1.0), []),
        (1.0, (1.0, 1 + 1e-15), ["the ranks differ in weight"]),
        (1 + 1e-9, (1.0, 1.0), ["two ranks and one differ by 1e-09"]),
    ],
)
def test_ranks_that_differ_are_found(own: float, others: tuple[float, ...], found: list[str]) -> None:
    alone, *ranks = ({"weight": torch.tensor([value], dtype=torch.float64)} for value in (own, *others))
    assert problems(alone, ranks) == found
