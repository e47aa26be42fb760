"""The ranks of a run, and what one of them asks of the others."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.core.comm import messages
from summit_train.core.errors import AgreedError, UserError, describe, exit_status, is_bug

if TYPE_CHECKING:
    import torch  # for the types alone: commands that need no torch have worlds too

T = TypeVar("T")
_WAIT_SECONDS = 0.1

# Switches that add for NCCL (NVLS, on Hopper and later) add in another order in each call: NVIDIA/nccl issue 1497.
# They add up to a quarter of bandwidth, for messages of gigabytes within a node (issue 1455). A user's setting wins.
SAME_EVERY_TIME = ("NCCL_NVLS_ENABLE", "0")


class World:
    """The ranks of a run. The methods here are those of a world of one.

    All ranks call every method but `abort` together, and in the same order. backend: what carries tensors, by name.
    connections: open files of this rank that the other ranks need, where their number grows with the ranks.
    """

    backend = "serial"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    connections = 0

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.who = f"rank {self.rank} on {self.host}"  # this rank's name in messages
        self.warnings: list[str] = []  # for people, the same on all ranks

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Begin to average `tensor` over the ranks in place; return a function that waits for the mean.

        The order of the additions depends on the tensor's shape and the ranks alone, so equal runs have equal bits.
        """
        return lambda: None

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Begin to add up `tensor` over the ranks in place, as `start_mean` averages it."""
        return lambda: None

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, the same bits on each."""
        total = tensor.clone()
        self.start_total(total, name)()
        return total

    def exchange(self, tensor: torch.Tensor, partner: int) -> torch.Tensor:
        """Give `tensor` to another rank, and return the one that it gives. Ranks without a partner do not call this.

        Between GPUs the ranks have exchanged something before. Horovod's exchange tensors on the CPU, by MPI.
        """
        return tensor

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Start a sum over the ranks; return a function that gives the sums, or None until all ranks have started.

        Does not wait. Call no other method until it has given the sums.
        """
        return lambda: list(numbers)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank: plain values, arrays and tensors (`messages.encode`)."""
        return value

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy rank 0's numbers into the tensors of every rank, which have the same names and shapes everywhere."""

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in the order of ranks, on rank 0, None elsewhere."""
        return [value]

    def barrier(self) -> None:
        self.broadcast(self.gather(None))

    def abort(self, status: int) -> None:
        """End every rank now; called by a rank that failed while the others did not."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a launcher ends the others, whose connection to this one breaks

    def close(self) -> None:
        """Leave the world in order."""

    def wait(self, tick: Callable[[], None]) -> None:
        """Wait for all ranks, for long, without keeping a core busy; call `tick` now and then."""
        poll = self.start_sum([0])
        while poll() is None:
            tick()
            time.sleep(_WAIT_SECONDS)

    def together(self, work: Callable[[], T]) -> T:
        """Return this rank's `work()`, which must not involve other ranks.

        If it raises an error that is not a bug on any of several ranks, all raise AgreedError with that of the lowest.
        """
        if self.size == 1:
            return work()
        failure = None
        try:
            value = work()
        except Exception as error:
            if is_bug(error):
                raise
            failure = self.who, describe(error), exit_status(error)
        failures = [each for each in self.gather(failure) or [] if each is not None]
        first = self.broadcast((failures[0], len(failures)) if failures else None)
        if first is None:
            return value
        (who, message, status), count = first
        if count < self.size and not (message.startswith("rank ") or who.startswith("rank 0 ")):
            message = f"{who}: {message}"
        raise AgreedError(message, status)

    def from_first(self, work: Callable[[], T]) -> T:
        """Return rank 0's `work()` on every rank. Errors are raised as `together` raises them."""
        return cast(T, self.broadcast(self.together(lambda: work() if self.rank == 0 else None)))


def refuse_mixed(mpi: Any, backend: str, host: str) -> None:
    """Raise UserError where the ranks of MPI's world were started for different back ends. Collective."""
    gathered = messages.gather((backend, host), mpi.rank, mpi.size, partial(mpi.Send, dest=0), messages.by_mpi(mpi))
    ranks = messages.broadcast(gathered, mpi.rank, mpi.Bcast) or []
    first, first_host = ranks[0]
    for rank, (other, other_host) in enumerate(ranks):
        if other != first:
            mixed = f"rank {rank} on {other_host} uses {other}, but rank 0 on {first_host} uses {first}"
            raise UserError(f"{mixed}; set SUMMIT_TRAIN_COMM to the same value on all ranks")
