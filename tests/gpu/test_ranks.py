"""Two ranks on one GPU against one rank: the same weights, statistics and losses, in double precision.

Sums go through the host, so nothing here is about speed: each rank's tensors must be where they should be, and sums and
kernels must keep their order. Four virtual GPUs, synchronous and averaging.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from summit_train.core.comm import World
from tests.gpu.devices import flat, relative_error
from tests.gpu.host_world import METHODS, trained
from tests.gpu.processes import environment
from tests.worlds import PATIENCE_S, ROOT

RANKS = 2
# Sums in another order: rounding of 1e-16, which four steps of 18 layers may multiply by a thousand or so.
BOUND = 1e-11


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
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(RANKS))
    for method in METHODS:
        assert all(torch.equal(value, second[method][name]) for name, value in first[method].items()), method
        assert relative_error(flat(first[method].values()), flat(alone[method].values())) <= BOUND, method
