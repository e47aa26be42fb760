"""Which clips each virtual GPU trains on in each step: pure numpy, the same on every rank.

Each epoch is one permutation of all clips, a function of (seed, epoch) alone. Each step takes the next
virtual_gpus * clips_per_gpu of them, virtual GPU v the v-th share. The number of ranks only decides which rank runs
which virtual GPU, so it can change between runs, and any step can be the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng

# step, virtual GPU, epoch, clips int64 (clips_per_gpu,)
MicroBatchKey = tuple[int, int, int, NDArray[np.int64]]


def epoch_order(num_clips: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Return the order of the clips in an epoch: a permutation of 0..num_clips-1, int32 (num_clips,)."""
    # Four bytes a clip: what is drawn for a place depends on its number alone, so int64 gives the same order.
    order = np.arange(num_clips, dtype=np.int32)
    rng.key(seed, "order", epoch).shuffle(order)
    return order


def virtual_gpus_of(rank: int, ranks: int, virtual_gpus: int) -> range:
    """Return the virtual GPUs of a rank: rank * A .. (rank + 1) * A - 1, A = virtual_gpus / ranks.

    Raises ValueError where the ranks do not divide the virtual GPUs, or there is no such rank.
    """
    if ranks < 1 or virtual_gpus % ranks:
        raise ValueError(f"{virtual_gpus} virtual GPUs cannot be shared evenly by {ranks} ranks")
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} among {ranks}")
    accumulation = virtual_gpus // ranks
    return range(rank * accumulation, (rank + 1) * accumulation)


@dataclass(frozen=True)
class Order:
    """The clips of a run by step and virtual GPU. Steps count over the whole run, from 0.

    The clips that are left over when num_clips is no multiple of the global batch differ from epoch to epoch.
    numbers_per_epoch: the step numbers of an epoch where they are more than its steps, those of a smaller batch; its
    steps have the last ones. Raises ValueError where an epoch needs more clips than there are.
    """

    num_clips: int
    seed: int
    virtual_gpus: int
    clips_per_gpu: int
    steps_per_epoch: int
    numbers_per_epoch: int | None = None

    def __post_init__(self) -> None:
        steps, gpus, clips = self.steps_per_epoch, self.virtual_gpus, self.clips_per_gpu
        if steps < 1 or clips < 1 or steps * gpus * clips > self.num_clips:
            raise ValueError(f"{steps} steps of {gpus} x {clips} clips cannot be taken from {self.num_clips} clips")
        if self.numbers_per_epoch is not None and self.numbers_per_epoch < steps:
            raise ValueError(f"{self.numbers_per_epoch} numbers are too few for {steps} steps")

    def micro_batches(self, rank: int, ranks: int, steps: range) -> Iterator[MicroBatchKey]:
        """Return a rank's micro-batches of `steps`, those of one step one after the other.

        Raises ValueError where the ranks do not divide the virtual GPUs, before the first is asked for.
        """
        return self._micro_batches(virtual_gpus_of(rank, ranks, self.virtual_gpus), steps)

    def _micro_batches(self, virtual_gpus: range, steps: range) -> Iterator[MicroBatchKey]:
        for epoch, first, taken, clips in self._epochs(steps):
            for step in taken:
                for virtual_gpu in virtual_gpus:
                    # A copy, which does not keep the epoch's order alive.
                    yield first + step, virtual_gpu, epoch, clips[step, virtual_gpu].astype(np.int64)
            del clips  # before the next epoch's are made

    def clips_of_ranks(self, ranks: Iterable[int], num_ranks: int, steps: range) -> Iterator[NDArray[np.int64]]:
        """Yield the clips that some of `num_ranks` ranks train on, one array int64 an epoch, in the order of use."""
        mine = [gpu for rank in sorted(ranks) for gpu in virtual_gpus_of(rank, num_ranks, self.virtual_gpus)]
        for _, _, taken, clips in self._epochs(steps):
            yield clips[taken.start : taken.stop, mine].ravel().astype(np.int64)
            del clips

    def _epochs(self, steps: range) -> Iterator[tuple[int, int, range, NDArray[np.int32]]]:
        """Yield (epoch, its first step, the wanted steps counted from that one, its clips by step and virtual GPU)."""
        length, shape = self.steps_per_epoch, (self.steps_per_epoch, self.virtual_gpus, self.clips_per_gpu)
        numbers = self.numbers_per_epoch or length
        for epoch in range(steps.start // numbers, -(-steps.stop // numbers)):
            first = (epoch + 1) * numbers - length
            taken = range(max(steps.start - first, 0), max(0, min(steps.stop - first, length)))
            yield epoch, first, taken, epoch_order(self.num_clips, self.seed, epoch)[: math.prod(shape)].reshape(shape)
