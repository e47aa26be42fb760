"""Allreduces timed over the ranks of a world, by Horovod and by MPI alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from summit_train.comm import World
from summit_train.scaling.network import AlphaBeta, fit_alpha_beta

LIBRARIES = ("horovod", "mpi4py")
_WARM_UP, _FEWEST, _MOST = 2, 5, 40  # repeats of one size


@dataclass(frozen=True)
class Sample:
    """One size by one library, in seconds: of each repeat the slowest rank's time; its median, least and most."""

    library: str
    num_bytes: int
    repeats: int
    median_s: float
    low_s: float
    high_s: float


def message_sizes(largest: int) -> list[int]:
    """4 B, then every fourth power of 2 from 256 B up to `largest` bytes, and that one."""
    return sorted({4, largest // 4 * 4, *(4**i for i in range(4, 20) if 4**i < largest)})


def measure(world: World, device: torch.device, sizes: Sequence[int], seconds: float) -> Iterator[Sample]:
    """Time every size by both libraries, about `seconds` in all; the same samples on every rank.

    Collective: all ranks must take all samples. Tensors are fp32, Horovod's on `device`, MPI's on the CPU.
    """
    share = seconds / (len(LIBRARIES) * len(sizes))
    for library in LIBRARIES:
        for num_bytes in sizes:
            once = _operation(world, device, library, num_bytes)
            yield _sample(world, library, num_bytes, once, share)


def fit_library(samples: Sequence[Sample], library: str) -> AlphaBeta:
    """Latency and bandwidth of one library's medians. Raises NoFit where they are no line."""
    mine = [sample for sample in samples if sample.library == library]
    return fit_alpha_beta([sample.num_bytes for sample in mine], [sample.median_s for sample in mine])


def _operation(world: World, device: torch.device, library: str, num_bytes: int) -> Callable[[], None]:
    if library == "mpi4py":
        buffer = torch.zeros(num_bytes // 4)
        return lambda: world.sum_by_mpi(buffer)
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> None:
        world.finish(world.start_mean(tensor, f"bench.{num_bytes}"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return once


def _sample(world: World, library: str, num_bytes: int, once: Callable[[], None], share: float) -> Sample:
    for _ in range(_WARM_UP):
        estimate = _timed(world, once)
    # Rank 0's word, as every rank must repeat equally often.
    repeats = int(world.broadcast(max(_FEWEST, min(_MOST, share / estimate))))
    mine = [_timed(world, once) for _ in range(repeats)]
    ranks = world.gather(mine)
    slowest = world.broadcast(None if ranks is None else [max(times) for times in zip(*ranks, strict=True)])
    assert slowest is not None
    return Sample(library, num_bytes, repeats, statistics.median(slowest), min(slowest), max(slowest))


def _timed(world: World, once: Callable[[], None]) -> float:
    world.barrier()
    start = time.perf_counter()
    once()
    return time.perf_counter() - start
