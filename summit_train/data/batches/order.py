"""Which clips each virtual GPU trains on in each step: pure numpy, the same on every rank.

Each epoch is one permutation of all clips, or as many drawn with equal shares of the classes, a function of (seed,
epoch) alone. Each step takes the next virtual_gpus * clips_per_gpu of them, virtual GPU v the v-th share. The number of
ranks only decides which rank runs which virtual GPU, so it can change between runs, and any step can be the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng

# step, virtual GPU, epoch, clips int64 (clips_per_gpu,)
MicroBatchKey = tuple[int, int, int, NDArray[np.int64]]
PREFETCHED_PER_WORKER = 2  # batches that each worker reads ahead
Classes = tuple[NDArray[np.int32], ...]  # the clips of each, at least one


def epoch_order(num_clips: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Return the order of the clips in an epoch: a permutation of 0..num_clips-1, int32 (num_clips,)."""
    # Four bytes a clip: what is drawn for a place depends on its number alone, so int64 gives the same order.
    order = np.arange(num_clips, dtype=np.int32)
    rng.key(seed, "order", epoch).shuffle(order)
    return order


def balanced_order(classes: Classes, num_clips: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Return `num_clips` clips in order, int32: the same number of each class, or one more of some.

    A class's clips are taken in permutations, so that none has its third turn before all have had the second. A clip of
    several classes has its turns in each.
    """
    generator = rng.key(seed, "balance", epoch)
    share, rest = divmod(num_clips, len(classes))
    with_one_more = set(generator.permutation(len(classes))[:rest].tolist())
    drawn = list[NDArray[np.int32]]()
    for number, clips in enumerate(classes):
        count = share + (number in with_one_more)
        turns = [generator.permutation(clips) for _ in range(0, count, len(clips))]
        drawn.append(np.concatenate([clips[:0], *turns])[:count])
    order = np.concatenate(drawn)
    generator.shuffle(order)
    return order


def virtual_gpus_of(rank: int, ranks: int, virtual_gpus: int) -> range:
    """Return the virtual GPUs of a rank, at least one: floor(V / R) of them, or one more on V mod R of the ranks."""
    assert 0 <= rank < ranks <= virtual_gpus, (rank, ranks, virtual_gpus)
    return range(rank * virtual_gpus // ranks, (rank + 1) * virtual_gpus // ranks)


@dataclass(frozen=True)
class Order:
    """The clips of a run by step and virtual GPU. Steps count over the whole run, from 0.

    The remainder of num_clips by the global batch differs from epoch to epoch. step_numbers_per_epoch: the steps of an
    epoch with a smaller batch, if that is the first one; the epoch's steps have the last of these numbers. classes:
    each class's clips, where all are to have the same share of an epoch.
    """

    num_clips: int
    seed: int
    virtual_gpus: int
    clips_per_gpu: int
    steps_per_epoch: int
    step_numbers_per_epoch: int | None = None
    classes: Classes | None = None

    def micro_batches(self, rank: int, ranks: int, steps: range) -> Iterator[MicroBatchKey]:
        """Yield a rank's micro-batches of `steps`, those of one step one after the other."""
        shape = (self.steps_per_epoch, self.virtual_gpus, self.clips_per_gpu)
        numbers = self.step_numbers_per_epoch or self.steps_per_epoch
        for epoch in range(steps.start // numbers, -(-steps.stop // numbers)):
            first = (epoch + 1) * numbers - self.steps_per_epoch
            if self.classes is None:
                order = epoch_order(self.num_clips, self.seed, epoch)
            else:
                order = balanced_order(self.classes, self.num_clips, self.seed, epoch)
            clips = order[: np.prod(shape)].reshape(shape)
            for step in range(max(steps.start - first, 0), min(steps.stop - first, self.steps_per_epoch)):
                for virtual_gpu in virtual_gpus_of(rank, ranks, self.virtual_gpus):
                    # A copy, which does not keep the epoch's order alive.
                    yield first + step, virtual_gpu, epoch, clips[step, virtual_gpu].astype(np.int64)
            del clips, order  # before the next epoch's are made
