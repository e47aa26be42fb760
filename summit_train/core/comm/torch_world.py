"""Ranks joined by torch.distributed: gloo for tensors on CPUs and for objects, NCCL (RCCL) or XCCL on accelerators."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.core.comm.launch import Launch
from summit_train.core.comm.rendezvous import RENDEZVOUS_S, meet, use_interface_towards
from summit_train.core.comm.world import SAME_EVERY_TIME, World
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
        import torch.distributed.nn.functional
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_gloo_available()):
            raise UserError("this torch was built without torch.distributed or gloo; use SUMMIT_TRAIN_COMM=horovod")
        self.rank, self.size = launch.rank, launch.size
        super().__init__()
        store, address = meet(launch, self.host)
        use_interface_towards(address)
        backends = {"cpu": "gloo"}
        if torch.cuda.is_available():
            if not dist.is_nccl_available():
                raise UserError("this torch sees GPUs and was built without NCCL; use SUMMIT_TRAIN_COMM=horovod")
            backends["cuda"] = "nccl"  # RCCL, where torch is for ROCm
        elif torch.xpu.is_available():
            backends["xpu"] = "xccl"
        self.backend = f"torch ({list(backends.values())[-1]})"
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
        self.local_rank, self.local_size = nodes[: self.rank].count(own), nodes.count(own)

    @contextmanager
    def _joined(self, what: str = "another rank has ended or is cut off") -> Iterator[None]:
        """Name the reason where the connection to another rank breaks within the block."""
        try:
            yield
        except RuntimeError as error:
            words = str(error).strip().splitlines()
            raise RunFailed(f"{self.who}: {what} ({words[-1] if words else type(error).__name__})") from error

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        with self._joined():
            work = self._dist.all_reduce(tensor, async_op=True)

        def finish() -> None:
            with self._joined():
                work.wait()
            tensor.div_(self.size)  # not every back end has a mean

        return finish

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        total = tensor.clone()
        with self._joined():
            self._dist.all_reduce(total)
        return total

    def start_sum(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        import torch

        total = torch.tensor(numbers, dtype=torch.int64)
        with self._joined():
            work = self._dist.all_reduce(total, async_op=True)

        def poll() -> list[int] | None:
            if not work.is_completed():
                return None
            with self._joined():
                work.wait()  # raises what went wrong
            return cast("list[int]", total.tolist())

        return poll

    def broadcast(self, value: T) -> T:
        import torch

        values = [value]
        with self._joined():
            self._dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: T) -> list[T] | None:
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._joined():
            self._dist.gather_object(value, values, dst=0)
        return values

    def close(self) -> None:
        self.barrier()
        self._dist.destroy_process_group()
