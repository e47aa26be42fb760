"""Open the world of ranks: Horovod for gradients, MPI for objects, or one rank alone.

This is the only importer of horovod and mpi4py. Both are imported when a world is opened, never before: a process
alone needs neither, and on some clusters merely importing MPI on a login node ends the process.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.errors import AgreedError, UserError, describe, exit_status, is_bug

if TYPE_CHECKING:
    import torch  # for the types alone: commands that need no torch have worlds too

T = TypeVar("T")
_WAIT_SECONDS = 0.1


class WorldError(UserError):
    """The world that the launcher promised cannot be opened."""


class World:
    """The ranks of a run, and what one of them asks of the others. The methods here are those of a world of one.

    All ranks call every method but `abort` together.
    """

    backend = "serial"
    rank, size, local_rank, local_size = 0, 1, 0, 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.who = f"rank {self.rank} on {self.host}"  # this rank's name in messages

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, accumulation: int, compression: str
    ) -> torch.optim.Optimizer:
        """Return an optimizer of `model` whose gradients are averaged over the ranks while the backward pass runs."""
        return optimizer

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until every gradient of `optimizer` is the average over the ranks."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step after `synchronize`, without a second average."""
        optimizer.step()

    def start_mean(self, tensor: torch.Tensor, name: str) -> int:
        """Begin to average `tensor` over the ranks in place; return a handle for `finish`."""
        return 0

    def finish(self, handle: int) -> None:
        """Wait for what `start_mean` began."""

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, the same bits on each."""
        return tensor

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Start a sum over the ranks; return a function that gives the sums, or None until all ranks have started.

        Does not wait. Call no other method until it has given the sums.
        """
        return lambda: list(numbers)

    def sum_by_mpi(self, values: torch.Tensor) -> None:
        """Add up a tensor on the CPU over the ranks in place, by MPI alone: what Horovod is measured against."""

    def broadcast(self, value: T) -> T:
        """Return rank 0's object on every rank."""
        return value

    def gather(self, value: T) -> list[T] | None:
        """Return the objects of all ranks, in the order of ranks, on rank 0, None elsewhere."""
        return [value]

    def gather_node(self, value: T) -> list[T] | None:
        """Return the objects of the ranks that share this one's node on the first of them, None elsewhere."""
        return [value]

    def together(self, work: Callable[[], T]) -> T:
        """Return this rank's `work()`, which must not involve other ranks.

        If it raises an error that is not a bug on any rank, all ranks raise AgreedError.
        """
        return work()

    def from_first(self, work: Callable[[], T]) -> T:
        """Return rank 0's `work()` on every rank. Errors are raised as `together` raises them."""
        return work()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def wait(self, tick: Callable[[], None]) -> None:
        """Wait for all ranks, for long, without keeping a core busy; call `tick` now and then."""

    def abort(self, status: int) -> None:
        """End every rank now. The one rank calls it that has met an error the others don't know of."""

    def close(self) -> None:
        """Leave the world in order."""


# On cores that ranks compute on, Horovod's thread must not busy-wait: two ranks on two cores would have 0.6 of their
# speed. Only Open MPI reads the variable, at its start, before which no CUDA call is allowed; so look for the driver.
_GPU_DRIVER = "/dev/nvidiactl"
_YIELD = ("OMPI_MCA_mpi_yield_when_idle", "1")


class HorovodWorld(World):
    """Ranks that a launcher started: gradients and sums go through Horovod, objects through MPI."""

    backend = "horovod"

    def __init__(self) -> None:
        if not os.path.exists(_GPU_DRIVER):
            os.environ.setdefault(*_YIELD)
        # mpi4py first: it asks MPI for full thread support, which Horovod's background thread needs beside it.
        import horovod.torch as hvd
        from mpi4py import MPI

        hvd.init()
        self._hvd, self._mpi, self._in_place = hvd, MPI.COMM_WORLD, MPI.IN_PLACE
        self._node = self._mpi.Split_type(MPI.COMM_TYPE_SHARED, key=self._mpi.Get_rank())
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())
        super().__init__()
        if (self.rank, self.size) != (self._mpi.Get_rank(), self._mpi.Get_size()):
            raise WorldError(
                f"Horovod counts {self.size} ranks and mpi4py {self._mpi.Get_size()}: they were built for different "
                "MPIs; see `summit-train doctor`"
            )

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, accumulation: int, compression: str
    ) -> torch.optim.Optimizer:
        """Wrap by Horovod, which averages each gradient as soon as it is ready."""
        wrapped = self._hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(self._hvd.Compression, compression),
            backward_passes_per_step=accumulation,
            op=self._hvd.Average,
        )
        return cast("torch.optim.Optimizer", wrapped)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for Horovod."""
        cast(Any, optimizer).synchronize()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step without a second average."""
        with cast(Any, optimizer).skip_synchronize():
            optimizer.step()

    def start_mean(self, tensor: torch.Tensor, name: str) -> int:
        """Begin a mean by Horovod."""
        return int(self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Average))

    def finish(self, handle: int) -> None:
        """Wait for Horovod's handle."""
        self._hvd.synchronize(handle)

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum by Horovod."""
        return cast("torch.Tensor", self._hvd.allreduce(tensor, name=name, op=self._hvd.Sum))

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin a sum by MPI."""
        buffers = array("q", numbers), array("q", numbers)  # both must live until the end; the request holds neither
        request = self._mpi.Iallreduce(*buffers)
        return lambda: list(buffers[1]) if request.Test() else None

    def sum_by_mpi(self, values: torch.Tensor) -> None:
        """Sum by MPI."""
        self._mpi.Allreduce(self._in_place, values.numpy())

    def broadcast(self, value: T) -> T:
        """Broadcast by MPI."""
        return cast(T, self._mpi.bcast(value, root=0))

    def gather(self, value: T) -> list[T] | None:
        """Gather by MPI."""
        return cast("list[T] | None", self._mpi.gather(value, root=0))

    def gather_node(self, value: T) -> list[T] | None:
        """Gather by the node's own communicator."""
        return cast("list[T] | None", self._node.gather(value, root=0))

    def together(self, work: Callable[[], T]) -> T:
        """Report the error of the lowest rank that failed to all ranks."""
        failure = None
        try:
            value = work()
        except Exception as error:
            if is_bug(error):
                raise
            failure = self.who, describe(error), exit_status(error)
        failures = [found for found in self.gather(failure) or [] if found is not None]
        told = self.broadcast((failures[0], len(failures)) if failures else None)
        if told is None:
            return value
        (who, message, status), count = told
        if count < self.size and not (message.startswith("rank ") or who.startswith("rank 0 ")):
            message = f"{who}: {message}"
        raise AgreedError(message, status)

    def from_first(self, work: Callable[[], T]) -> T:
        """Broadcast by MPI what rank 0 has done without an error."""
        return cast(T, self.broadcast(self.together(lambda: work() if self.rank == 0 else None)))

    def barrier(self) -> None:
        """Wait by MPI."""
        self._mpi.Barrier()

    def wait(self, tick: Callable[[], None]) -> None:
        """Poll MPI's barrier."""
        request = self._mpi.Ibarrier()
        while not request.Test():
            tick()
            time.sleep(_WAIT_SECONDS)

    def abort(self, status: int) -> None:
        """Abort by MPI."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.Abort(status)

    def close(self) -> None:
        """Shut Horovod down."""
        self._mpi.Barrier()
        self._hvd.shutdown()


def open_world(launched: int) -> World:
    """Open the world of `launched` processes, by the launcher's count; 1 for a process started by hand.

    Raises WorldError if several processes were started and Horovod does not join them: N processes that each train a
    model of their own would look like a run.
    """
    if launched == 1:
        return World()
    started = f"{launched} processes were started"
    for package in ("mpi4py", "horovod"):
        if importlib.util.find_spec(package) is None:
            raise WorldError(f"{started}, but {package} is not installed to join them; run `make setup`")
    try:
        world = HorovodWorld()
    except (ImportError, RuntimeError) as error:
        reason = f"Horovod does not start: {error}; see `summit-train doctor`"
        raise WorldError(f"{started}, but {reason}") from error
    if world.size != launched:
        raise WorldError(
            f"{started}, but Horovod joined {world.size}: the launcher and Horovod belong to different MPIs; "
            "see `summit-train doctor`"
        )
    return world
