"""Ranks joined by Horovod: tensors go through it, messages through MPI."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from summit_train.core.comm import messages
from summit_train.core.comm.world import SAME_EVERY_TIME, World, refuse_mixed
from summit_train.core.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# On cores that ranks compute on, Horovod's thread must not busy-wait: two ranks on two cores would have 0.6 of their
# speed. Only Open MPI reads the variable, at its start, before which no CUDA call is allowed; so look for the driver.
_GPU_DRIVER = "/dev/nvidiactl"
_YIELD = ("OMPI_MCA_mpi_yield_when_idle", "1")

# Horovod sends what is ready at the same moment as one message. A number's place in a message decides in which
# order a ring adds its parts, so runs of three ranks and more would differ by chance. Autotuning changes the threshold.
_FIXED = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_AUTOTUNE": "0"}


class HorovodWorld(World):
    """Ranks that an MPI launcher started."""

    backend = "horovod"

    def __init__(self) -> None:
        if not os.path.exists(_GPU_DRIVER):
            os.environ.setdefault(*_YIELD)
        overruled = [f"{name}={os.environ[name]}" for name in _FIXED if os.environ.get(name, "0") != _FIXED[name]]
        os.environ.update(_FIXED)
        os.environ.setdefault(*SAME_EVERY_TIME)
        os.environ.setdefault("HOROVOD_STALL_CHECK_DISABLE", "1")  # the watchdog knows who may wait, and how long
        os.environ.setdefault("UCX_ERROR_SIGNALS", "")  # a crash shows Python's stacks (faulthandler), not UCX's
        # mpi4py first: it asks MPI for full thread support, as Horovod's background thread uses MPI too.
        import horovod.torch as hvd
        from mpi4py import MPI

        self._hvd = hvd
        self._mpi = MPI.COMM_WORLD
        self._in_place = MPI.IN_PLACE
        refuse_mixed(self._mpi, self.backend, socket.gethostname())
        hvd.init()
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.local_rank = int(hvd.local_rank())
        self.local_size = int(hvd.local_size())
        super().__init__()
        if (self.rank, self.size) != (self._mpi.Get_rank(), self._mpi.Get_size()):
            counts = f"Horovod counts {self.size} ranks and mpi4py {self._mpi.Get_size()}"
            raise UserError(f"{counts}: they were built for different MPIs; see `summit-train doctor`")
        if overruled:
            self.warnings.append(f"{' '.join(overruled)}: ignored, as it would make equal runs differ in the last bits")

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Average)
        return lambda: self._hvd.synchronize(handle)

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        return lambda: self._hvd.synchronize(handle)

    def exchange(self, tensor: torch.Tensor, partner: int) -> torch.Tensor:
        import torch

        theirs = torch.empty_like(tensor)
        self._mpi.Sendrecv(tensor.numpy(), dest=partner, recvbuf=theirs.numpy(), source=partner)
        return theirs

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin a sum by Horovod: with MPI's own request, two threads would drive MPI at once."""
        import torch

        mine = torch.tensor(numbers, dtype=torch.int64)
        handle = self._hvd.allreduce_async(mine, name="start_sum", op=self._hvd.Sum)
        return lambda: self._hvd.synchronize(handle).tolist() if self._hvd.poll(handle) else None

    def sum_by_mpi(self, values: torch.Tensor) -> None:
        """Add up a tensor on the CPU in place by MPI alone: what Horovod is measured against."""
        self._mpi.Allreduce(self._in_place, values.numpy())

    def broadcast(self, value: T) -> T:
        return messages.broadcast(value, self.rank, self._mpi.Bcast)

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        messages.broadcast_tensors(tensors, self.rank, self._mpi.Bcast)

    def gather(self, value: T) -> list[T] | None:
        return messages.gather(value, self.rank, self.size, partial(self._mpi.Send, dest=0), messages.by_mpi(self._mpi))

    def abort(self, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.Abort(status)

    def close(self) -> None:
        self._mpi.Barrier()
        self._hvd.shutdown()
