"""Ranks joined by torch.distributed: gloo for tensors on CPUs and for messages, NCCL (RCCL) or XCCL on accelerators."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.core.comm import messages, rendezvous
from summit_train.core.comm.launch import SECRET, Launch, node_name
from summit_train.core.comm.world import SAME_EVERY_TIME, World
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.machine import raise_open_files
from summit_train.core.result import tell

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Of rank 0 besides its connections, without loader workers: about 24 stay open, others for a moment, several at a time
# (checkpoint, log, TensorBoard, libraries that are imported).
_OPEN_FILES = 40
# The watchdog knows what a rank waits for and how long it may; torch's own limit would only hide its message.
_FOREVER = datetime.timedelta(days=365)


class TorchWorld(World):
    """Ranks that any launcher started which numbers its processes."""

    def __init__(self, launch: Launch) -> None:
        """Join the other ranks. Raises RunFailed where they do not come within RENDEZVOUS_S seconds."""
        # Its functions' default arguments keep the group that exists when it is first imported, as torch's compiler
        # does. gloo's threads would then outlive `close`, and end the process if they let go of a tensor at its end.
        import torch.distributed.nn.functional  # noqa: F401
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_gloo_available()):
            raise UserError("this torch was built without torch.distributed or gloo; use SUMMIT_TRAIN_COMM=horovod")
        self.rank = launch.rank
        self.size = launch.size
        super().__init__()
        self.connections = 0 if self.rank else self.size * (1 + rendezvous.keeps_store(launch))
        check_open_files(self.connections)
        self._dist: Any = dist
        patience = rendezvous.RENDEZVOUS_S
        met, address = rendezvous.meet(launch, self.host)
        # torchrun keeps one store for all its attempts.
        store = self._dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), met)
        with self._joined(f"the ranks do not connect within {patience} s"):
            address = rendezvous.address_from_here(store, address, self.size)
        rendezvous.use_interface_towards(address)
        backends = _backends()
        self.backend = f"torch ({list(backends.values())[-1]})"
        os.environ.setdefault(*SAME_EVERY_TIME)
        # gloo then opens a connection where two ranks speak to each other, not between all: pytorch/pytorch 150801.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        # gloo may wait for ever for a rank that cannot reach this one.
        last_resort = threading.Timer(2 * patience, self._give_up)
        last_resort.daemon = True
        last_resort.start()
        with self._joined(f"the ranks do not connect within {patience} s"):
            dist.init_process_group(
                ",".join(f"{device}:{backend}" for device, backend in backends.items()),
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=patience),
            )
        nodes = self._prove()
        last_resort.cancel()
        # The second name is that of torch before it had the first.
        (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(_FOREVER)
        node = nodes[self.rank]
        self.local_rank = nodes[: self.rank].count(node)
        self.local_size = nodes.count(node)

    def _give_up(self) -> None:
        reach = "can they reach this one? GLOO_SOCKET_IFNAME names the interface for them"
        tell(f"{self.who}: other ranks did not connect within {2 * rendezvous.RENDEZVOUS_S} s; {reach}")
        self.abort(1)

    def _prove(self) -> list[bytes]:
        """Return a digest of each rank's node, once each rank has proven that it knows the job's secret.

        Only tensors of a fixed size are exchanged here: nothing that a rank says is read as an object before.
        """
        secret = os.environ.get(SECRET, "").encode()
        node = hashlib.sha256(node_name(os.environ, self.host).encode()).digest()
        challenges = self._exchange(os.urandom(len(node)) + node)
        everything = hashlib.sha256(
            b"".join(challenges)
        ).digest()  # once: a proof of each rank over it costs ranks x ranks
        proofs = [hmac.digest(secret, everything + struct.pack("q", rank), "sha256") for rank in range(self.size)]
        for rank, proof in enumerate(self._exchange(proofs[self.rank])):
            if not hmac.compare_digest(proof, proofs[rank]):
                differs = f"{SECRET} must be the same on all ranks, but that of rank {rank} differs"
                raise RunFailed(f"{self.who}: {differs}; does rank {rank} belong to this job?")
        return [challenge[len(node) :] for challenge in challenges]

    def _exchange(self, content: bytes) -> list[bytes]:
        """Return the equally many bytes of each rank."""
        import torch

        mine = torch.tensor(list(content), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._joined(f"the ranks do not connect within {rendezvous.RENDEZVOUS_S} s, or one left while they did"):
            self._dist.all_gather(everyone, mine)
        return [bytes(each.tolist()) for each in everyone]

    @contextmanager
    def _joined(self, what: str = "another rank has ended or is cut off") -> Iterator[None]:
        """Name the reason where the connection to another rank breaks within the block."""
        try:
            yield
        except RuntimeError as error:
            words = str(error).strip().splitlines()
            raise RunFailed(f"{self.who}: {what} ({words[-1] if words else type(error).__name__})") from error

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        wait = self.start_total(tensor, name)

        def finish() -> None:
            wait()
            tensor.div_(self.size)  # not every back end has a mean

        return finish

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        with self._joined():
            work = self._dist.all_reduce(tensor, async_op=True)

        def finish() -> None:
            with self._joined():
                work.wait()

        return finish

    def exchange(self, tensor: torch.Tensor, partner: int) -> torch.Tensor:
        import torch

        theirs = torch.empty_like(tensor)
        dist = self._dist
        pair = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, theirs, partner)]
        with self._joined():
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        return theirs

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
        with self._joined():
            return messages.broadcast(value, self.rank, self._transfer(self._dist.broadcast, src=0, async_op=True))

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._joined():
            messages.broadcast_tensors(tensors, self.rank, self._transfer(self._dist.broadcast, src=0, async_op=True))

    def gather(self, value: T) -> list[T] | None:
        import torch

        def start(piece: messages.Bytes, source: int) -> Callable[[], object]:
            return partial(self._dist.irecv(torch.from_numpy(piece), src=source).wait, _FOREVER)

        with self._joined():
            return messages.gather(value, self.rank, self.size, self._transfer(self._dist.isend, dst=0), start)

    @staticmethod
    def _transfer(start: Callable[..., Any], **rank: int) -> messages.Transfer:
        """Return a function that sends or receives bytes by `start`, however late the other rank is."""
        import torch

        return lambda piece: start(torch.from_numpy(piece), **rank).wait(_FOREVER)

    def close(self) -> None:
        self.barrier()
        self._dist.destroy_process_group()


def _backends() -> dict[str, str]:
    """Return the torch backend of each device type. Raises UserError if none supports this machine's GPUs."""
    import torch
    from torch import distributed as dist

    backends = {"cpu": "gloo"}
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            raise UserError("this torch sees GPUs and was built without NCCL; use SUMMIT_TRAIN_COMM=horovod")
        backends["cuda"] = "nccl"  # RCCL, where torch is for ROCm
    elif torch.xpu.is_available():
        backends["xpu"] = "xccl"
    return backends


def check_open_files(connections: int) -> None:
    """Let this process open as many files as it may. Raise UserError where rank 0 could not hold its `connections`.

    Those are one to each rank by gloo and, where it keeps the store, one by that. torch would print a page for each.
    """
    limit = raise_open_files()
    needed = _OPEN_FILES + connections
    if connections and limit is not None and limit < needed:
        found = f"the limit of open files must be {needed:,} or more for rank 0's connections, got {limit:,}"
        raise UserError(f"{found}; raise it by `ulimit -n`")
