"""Ranks joined by torch.distributed: gloo for tensors on CPUs and for messages, NCCL (RCCL) or XCCL on accelerators.

How processes that only know their numbers find each other: the address of rank 0 comes from MASTER_ADDR and
MASTER_PORT, which torchrun sets; else by MPI, where the launcher is MPI's and mpi4py is installed; else it is
MASTER_ADDR or the first host of the job's list, with a port made from the job's number.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import hmac
import importlib.util
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from summit_train.core.comm import messages
from summit_train.core.comm.launch import HYDRA, LISTENER, SECRET, Launch, job_address, node_name
from summit_train.core.comm.world import SAME_EVERY_TIME, World, refuse_mixed
from summit_train.core.errors import AgreedError, RunFailed, UserError, exit_status
from summit_train.core.machine import raise_open_files
from summit_train.core.result import tell

if TYPE_CHECKING:
    import torch
    from mpi4py.MPI import Intracomm
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
RENDEZVOUS_S = 300
# Of rank 0 besides its connections, without loader workers: about 24 stay open, others for a moment, several at a time
# (checkpoint, log, TensorBoard, libraries that are imported).
_OPEN_FILES = 40
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
# The watchdog knows what a rank waits for and how long it may; torch's own limit would only hide its message.
_FOREVER = datetime.timedelta(days=365)


class TorchWorld(World):
    """Ranks that any launcher started which numbers its processes."""

    def __init__(self, launch: Launch) -> None:
        """Join the other ranks. Raises RunFailed where they do not come within RENDEZVOUS_S seconds."""
        # Its functions' default arguments keep the group that exists when it is first imported, as torch's compiler
        # does. gloo's threads would then outlive `close`, and end the process if they let go of a tensor at its end.
        import torch.distributed.nn.functional
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_gloo_available()):
            raise UserError("this torch was built without torch.distributed or gloo; use SUMMIT_TRAIN_COMM=horovod")
        self.rank = launch.rank
        self.size = launch.size
        super().__init__()
        self.connections = 0 if self.rank else self.size * (1 + _keeps_store(launch))
        check_open_files(self.connections)
        self._dist: Any = dist
        met, address = meet(launch, self.host)
        # torchrun keeps one store for all its attempts.
        store = self._dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), met)
        with self._joined(f"the ranks do not connect within {RENDEZVOUS_S} s"):
            address = self._seen_from_here(store, address)
        use_interface_towards(address)
        backends = {"cpu": "gloo"}
        if torch.cuda.is_available():
            if not dist.is_nccl_available():
                raise UserError("this torch sees GPUs and was built without NCCL; use SUMMIT_TRAIN_COMM=horovod")
            backends["cuda"] = "nccl"  # RCCL, where torch is for ROCm
        elif torch.xpu.is_available():
            backends["xpu"] = "xccl"
        self.backend = f"torch ({list(backends.values())[-1]})"
        os.environ.setdefault(*SAME_EVERY_TIME)
        # gloo then opens a connection where two ranks speak to each other, not between all: pytorch/pytorch 150801.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        # gloo may wait for ever for a rank that cannot reach this one.
        last_resort = threading.Timer(2 * RENDEZVOUS_S, self._give_up)
        last_resort.daemon = True
        last_resort.start()
        with self._joined(f"the ranks do not connect within {RENDEZVOUS_S} s"):
            dist.init_process_group(
                ",".join(f"{device}:{backend}" for device, backend in backends.items()),
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=RENDEZVOUS_S),
            )
        nodes = self._prove()
        last_resort.cancel()
        # The second name is that of torch before it had the first.
        (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(_FOREVER)
        own = nodes[self.rank]
        self.local_rank = nodes[: self.rank].count(own)
        self.local_size = nodes.count(own)

    def _give_up(self) -> None:
        reach = "can they reach this one? GLOO_SOCKET_IFNAME names the interface for them"
        tell(f"{self.who}: other ranks did not connect within {2 * RENDEZVOUS_S} s; {reach}")
        self.abort(1)

    def _seen_from_here(self, store: Store, address: str) -> str:
        """Return rank 0's address, or if that is the loopback here, the address of a rank on another host, if any is.

        Debian gives a host's own name the address 127.0.1.1, by which other hosts cannot reach it.
        """
        if address == "localhost" or _is_loopback(address):
            return address  # on all ranks, so they are on one host
        here = _address_towards(address)
        if here and not _is_loopback(here):
            store.set("other host", here)
        if store.add("placed", 1) == self.size:
            store.set("all placed", "")
        if not _is_loopback(here):
            return address
        store.wait(["all placed"], datetime.timedelta(seconds=RENDEZVOUS_S))
        return store.get("other host").decode() if store.check(["other host"]) else address

    def _prove(self) -> list[bytes]:
        """Return a digest of each rank's node, once each rank has proven that it knows the job's secret.

        Only tensors of a fixed size are exchanged here: nothing that a rank says is read as an object before.
        """
        secret = os.environ.get(SECRET, "").encode()
        node = hashlib.sha256(node_name(os.environ, self.host).encode()).digest()
        said = self._exchange(os.urandom(len(node)) + node)
        everything = hashlib.sha256(b"".join(said)).digest()  # once: a proof of each rank over it costs ranks x ranks
        proofs = [hmac.digest(secret, everything + struct.pack("q", rank), "sha256") for rank in range(self.size)]
        for rank, proof in enumerate(self._exchange(proofs[self.rank])):
            if not hmac.compare_digest(proof, proofs[rank]):
                differs = f"{SECRET} must be the same on all ranks, but that of rank {rank} differs"
                raise RunFailed(f"{self.who}: {differs}; does rank {rank} belong to this job?")
        return [words[len(node) :] for words in said]

    def _exchange(self, own: bytes) -> list[bytes]:
        """Return the equally many bytes of each rank."""
        import torch

        mine = torch.tensor(list(own), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._joined(f"the ranks do not connect within {RENDEZVOUS_S} s, or one left while they did"):
            self._dist.all_gather(everyone, mine)
        return [bytes(words.tolist()) for words in everyone]

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

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        total = tensor.clone()
        with self._joined():
            self._dist.all_reduce(total)
        return total

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
            return messages.broadcast(value, self.rank, self._mover(self._dist.broadcast, src=0, async_op=True))

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._joined():
            messages.broadcast_tensors(tensors, self.rank, self._mover(self._dist.broadcast, src=0, async_op=True))

    def gather(self, value: T) -> list[T] | None:
        import torch

        def start(piece: messages.Bytes, source: int) -> Callable[[], object]:
            return partial(self._dist.irecv(torch.from_numpy(piece), src=source).wait, _FOREVER)

        with self._joined():
            return messages.gather(value, self.rank, self.size, self._mover(self._dist.isend, dst=0), start)

    @staticmethod
    def _mover(start: Callable[..., Any], **place: int) -> Callable[..., object]:
        """Return what passes a message on by `start`, however late the other rank is."""
        import torch

        return lambda piece: start(torch.from_numpy(piece), **place).wait(_FOREVER)

    def close(self) -> None:
        self.barrier()
        self._dist.destroy_process_group()


def check_open_files(connections: int) -> None:
    """Let this process open as many files as it may. Raise UserError where rank 0 could not hold its `connections`.

    Those are one to each rank by gloo and, where it keeps the store, one by that. torch would print a page for each.
    """
    limit = raise_open_files()
    needed = _OPEN_FILES + connections
    if connections and limit is not None and limit < needed:
        found = f"the limit of open files must be {needed:,} or more for rank 0's connections, got {limit:,}"
        raise UserError(f"{found}; raise it by `ulimit -n`")


def meet(launch: Launch, host: str) -> tuple[TCPStore, str]:
    """Return the store in which the ranks find each other, and the address of the host that keeps it.

    Raises UserError where nothing says who keeps it, RunFailed where a port is taken or ranks do not come.
    """
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    keeps = launch.rank == 0
    if (world := _mpi_world(launch)) is not None:
        refuse_mixed(world, "torch", host)
        if address is None or port is None:
            return _meet_by_mpi(world, launch, address or host)
    if address is None or port is None:
        address, number = job_address(os.environ, launch)
        return _store(launch, address, number, keeps=keeps), address
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT must be a port's number, got {port!r}")
    return _store(launch, address, int(port), keeps=_keeps_store(launch)), address


def _keeps_store(launch: Launch) -> bool:
    """Return whether this process is rank 0 and keeps the store; torchrun's own process keeps that of its ranks."""
    return launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _mpi_world(launch: Launch) -> Intracomm | None:
    """Return MPI's world of the ranks; None without mpi4py, or where it is of an MPI that does not know them."""
    if not launch.by_mpi or importlib.util.find_spec("mpi4py") is None:
        return None
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    if launch.launcher == HYDRA and MPI.get_vendor()[0] == "Open MPI":
        return None  # among another MPI's variables its MPI_Init ends the process
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() == launch.size else None


def _meet_by_mpi(world: Intracomm, launch: Launch, address: str) -> tuple[TCPStore, str]:
    """Let rank 0 keep the store and tell where it is. If it cannot, all ranks raise its error: none waits for it."""
    store: TCPStore | None = None
    failure: tuple[str, int] | None = None
    if launch.rank == 0:
        try:
            store = _store(launch, address, 0, keeps=True)
        except (UserError, RunFailed) as error:
            failure = str(error), exit_status(error)
    meeting = address, 0 if store is None else store.port
    (address, port), failure = messages.broadcast((meeting, failure), launch.rank, world.Bcast)
    if failure is not None:
        raise AgreedError(*failure)
    return store or _store(launch, address, port, keeps=False), address


def _store(launch: Launch, address: str, port: int, *, keeps: bool) -> TCPStore:
    """Return rank 0's store, where this rank keeps it, else a connection to it; port 0: any that is free."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    who = f"rank {launch.rank} on {socket.gethostname()}"
    patience = datetime.timedelta(seconds=RENDEZVOUS_S)
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:  # TCPStore would ask for it again and again
        if error.errno == socket.EAI_NONAME:
            right = "set MASTER_ADDR to one that every rank can reach"
            raise UserError(f"{who}: rank 0's host {address} has no address here; {right}") from error
    # By `--ranks`: a socket that listens on the loopback alone; torch's own would listen on every interface.
    listener = int(os.environ[LISTENER]) if keeps and LISTENER in os.environ else None
    # libuv takes a socket since torch 2.8.
    server: dict[str, Any] = {"master_listen_fd": listener, "use_libuv": torch.__version__ >= "2.8"}
    try:
        return TCPStore(address, port, None, keeps, patience, wait_for_workers=False, **server)
    except RuntimeError as error:
        if keeps:
            reason = str(error).strip().splitlines()[0]
            what = f"cannot keep the rendezvous at port {port} ({reason}); set MASTER_PORT to one that is free"
        else:
            where = "on this host" if _is_loopback(socket.gethostbyname(address)) else "there"
            what = f"no answer from {address}, port {port}, within {RENDEZVOUS_S} s; is rank 0 running {where}?"
        raise RunFailed(f"{who}: {what}") from error


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _address_towards(address: str) -> str:
    """Return the address of this host on its way to another; "" without a way by IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])
    return ""


def use_interface_towards(address: str) -> None:
    """Let gloo use the network interface through which this host reaches `address`, unless GLOO_SOCKET_IFNAME is set.

    Without it gloo takes the one with the address of the host's own name, which on many machines is the loopback.
    Where the way is the loopback, gloo chooses. Raises UserError where the variable names the loopback across hosts.
    """
    here = _address_towards(address)
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if not here or _is_loopback(here):
        return
    addresses = dict[str, str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    towards = next((name for name, its in addresses.items() if its == here), None)
    if named is None and towards is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=towards)
    elif named is not None and _is_loopback(addresses.get(named, "")) and here != socket.gethostbyname(address):
        right = f"an interface that reaches other hosts, such as {towards or 'eth0'}"
        raise UserError(f"{socket.gethostname()}: GLOO_SOCKET_IFNAME must be {right}, got {named}, the loopback")
