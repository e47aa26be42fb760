"""Ranks joined by torch.distributed: gloo for tensors on CPUs and for objects, NCCL (RCCL) or XCCL on accelerators."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.core.comm.launch import Launch
from summit_train.core.comm.rendezvous import RENDEZVOUS_S, meet, use_interface_towards
from summit_train.core.comm.world import SAME_EVERY_TIME, World, flush_output
from summit_train.core.errors import RunFailed, UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# The watchdog knows what a rank waits for and how long it may; torch's own limit would only hide its message.
_FOREVER = datetime.timedelta(days=365)


class TorchWorld(World):
    """Ranks that any launcher started which numbers its processes."""

    def __init__(self, launch: Launch) -> None:
        """Join the other ranks. Raises RunFailed where they do not come within RENDEZVOUS_S seconds."""
        # Its functions' default arguments keep the group that exists when it is first imported, as torch's compiler
        # does. gloo's threads would then outlive `close`, and end the process if they let go of a tensor while Python
        # shuts down.
        import torch.distributed.nn.functional  # noqa: F401
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_gloo_available()):
            raise UserError("this torch was built without torch.distributed or gloo; use SUMMIT_TRAIN_COMM=horovod")
        self.rank, self.size = launch.rank, launch.size
        super().__init__()
        store, address = meet(launch, self.host)
        use_interface_towards(address)
        backends = dict(_backends())
        self.backend = f"torch ({backends.get('cuda') or backends.get('xpu') or backends['cpu']})"
        self._dist: Any = dist
        os.environ.setdefault(*SAME_EVERY_TIME)
        with self._joined(f"the ranks do not connect within {RENDEZVOUS_S} s"):
            dist.init_process_group(
                ",".join(f"{device}:{backend}" for device, backend in backends.items()),
                # torchrun keeps one store for all its attempts.
                store=self._dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store),
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=RENDEZVOUS_S),
            )
        nodes, own = [""] * self.size, os.environ.get("SLURMD_NODENAME", self.host)
        with self._joined("a rank ended while all got to know each other"):
            dist.all_gather_object(nodes, own)
        dist.distributed_c10d._set_pg_timeout(_FOREVER)
        self._node = [rank for rank, node in enumerate(nodes) if node == own]
        self.local_rank, self.local_size = self._node.index(self.rank), len(self._node)

    @contextmanager
    def _joined(self, what: str = "another rank has ended or is cut off") -> Iterator[None]:
        """Name the reason where the connection to another rank breaks within the block."""
        try:
            yield
        except RuntimeError as error:
            words = str(error).strip().splitlines()
            raise RunFailed(f"{self.who}: {what} ({words[-1] if words else type(error).__name__})") from error

    def _start(self, tensor: torch.Tensor) -> Any:
        with self._joined():
            return self._dist.all_reduce(tensor, async_op=True)

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Begin a sum, and divide it at the end: not every back end has a mean."""
        work = self._start(tensor)

        def finish() -> None:
            with self._joined():
                work.wait()
            tensor.div_(self.size)

        return finish

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum a copy."""
        total = tensor.clone()
        with self._joined():
            self._dist.all_reduce(total)
        return total

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin a sum by gloo."""
        import torch

        total = torch.tensor(numbers, dtype=torch.int64)
        work = self._start(total)

        def poll() -> list[int] | None:
            if not work.is_completed():
                return None
            with self._joined():
                work.wait()  # raises what went wrong
            return cast("list[int]", total.tolist())

        return poll

    def broadcast(self, value: T) -> T:
        """Broadcast by gloo."""
        import torch

        values = [value]
        with self._joined():
            self._dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: T) -> list[T] | None:
        """Gather by gloo."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._joined():
            self._dist.gather_object(value, values, dst=0)
        return values

    def gather_node(self, value: T) -> list[T] | None:
        """Send to the node's first rank."""
        import torch

        first, *others = self._node
        with self._joined():
            if self.rank != first:
                self._dist.send_object_list([value], dst=first, device=torch.device("cpu"))
                return None
            values = [value]
            for other in others:
                received: list[Any] = [None]
                self._dist.recv_object_list(received, src=other, device=torch.device("cpu"))
                values += received
            return values

    def barrier(self) -> None:
        """Wait for a sum of nothing."""
        import torch

        self.sum(torch.zeros(1), "barrier")

    def abort(self, status: int) -> None:
        """End this process; the launcher ends the others, whose connection to it breaks."""
        flush_output()
        os._exit(status)

    def close(self) -> None:
        """Leave the group when all ranks have come here."""
        self.barrier()
        self._dist.destroy_process_group()


def _backends() -> Iterator[tuple[str, str]]:
    """Yield (device, back end) for each kind of device that this process sees."""
    import torch
    import torch.distributed as dist

    yield "cpu", "gloo"
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            raise UserError("this torch sees GPUs and was built without NCCL; use SUMMIT_TRAIN_COMM=horovod")
        yield "cuda", "nccl"  # RCCL, where torch is for ROCm
    elif torch.xpu.is_available():
        yield "xpu", "xccl"
