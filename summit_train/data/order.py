"""Which clip is played by which virtual GPU in which step: pure numpy, the same on every rank.

Each epoch is one permutation of all clips, a function of (seed, epoch) alone. Each step takes the next
virtual_gpus * clips_per_gpu of them, virtual GPU v the v-th share. The number of ranks only decides who plays
which virtual GPU, so it can change between runs, and any step can be the first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from summit_train import rng


def epoch_order(num_clips: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """The order of the clips in an epoch: a permutation of 0..num_clips-1, int32 (num_clips,)."""
    # Four bytes a clip: what is drawn for a place depends on its number alone, so int64 gives the same order.
    order = np.arange(num_clips, dtype=np.int32)
    rng.key(seed, "order", epoch).shuffle(order)
    return order


def clips_of(
    order: NDArray[np.int32], step_in_epoch: int, virtual_gpu: int, virtual_gpus: int, clips_per_gpu: int
) -> NDArray[np.int64]:
    """The clips of one virtual GPU in one step, int64 (clips_per_gpu,): a copy, which does not hold on to the order."""
    first = (step_in_epoch * virtual_gpus + virtual_gpu) * clips_per_gpu
    return order[first : first + clips_per_gpu].astype(np.int64)


def virtual_gpus_of(rank: int, ranks: int, virtual_gpus: int) -> range:
    """The virtual GPUs that a rank plays, one after the other: rank * A .. (rank + 1) * A - 1, A = V / ranks.

    Raises ValueError where the ranks do not divide the virtual GPUs, or there is no such rank.
    """
    if ranks < 1 or virtual_gpus % ranks:
        raise ValueError(f"{virtual_gpus} virtual GPUs cannot be shared evenly by {ranks} ranks")
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} among {ranks}")
    accumulation = virtual_gpus // ranks
    return range(rank * accumulation, (rank + 1) * accumulation)


def micro_batches(
    num_clips: int,
    seed: int,
    virtual_gpus: int,
    clips_per_gpu: int,
    steps_per_epoch: int,
    rank: int,
    ranks: int,
    start_step: int,
    end_step: int,
) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    """A rank's micro-batches, steps start_step .. end_step - 1: (step, virtual_gpu, epoch, clips int64 (n,)).

    Steps count over the whole run, from 0; epoch = step // steps_per_epoch. The clips that are left over when
    num_clips is no multiple of the global batch are other ones in each epoch.
    Raises ValueError where an epoch wants more clips than there are, or ranks don't divide virtual_gpus.
    """
    mine = virtual_gpus_of(rank, ranks, virtual_gpus)
    wanted = steps_per_epoch * virtual_gpus * clips_per_gpu
    if steps_per_epoch < 1 or clips_per_gpu < 1 or wanted > num_clips:
        raise ValueError(
            f"{steps_per_epoch} steps of {virtual_gpus} x {clips_per_gpu} clips cannot be taken from {num_clips} clips"
        )
    return _play(num_clips, seed, mine, virtual_gpus, clips_per_gpu, steps_per_epoch, start_step, end_step)


def _play(
    num_clips: int,
    seed: int,
    mine: range,
    virtual_gpus: int,
    clips_per_gpu: int,
    steps_per_epoch: int,
    start_step: int,
    end_step: int,
) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    for epoch in range(start_step // steps_per_epoch, -(-end_step // steps_per_epoch)):
        order = epoch_order(num_clips, seed, epoch)
        first = epoch * steps_per_epoch
        for step in range(max(first, start_step), min(first + steps_per_epoch, end_step)):
            for virtual_gpu in mine:
                yield (
                    step,
                    virtual_gpu,
                    epoch,
                    clips_of(order, step - first, virtual_gpu, virtual_gpus, clips_per_gpu),
                )
        del order  # before the next one is made
