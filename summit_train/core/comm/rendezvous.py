"""How ranks that only know their numbers find each other: rank 0 keeps a store, to which the others connect.

Where it is comes from MASTER_ADDR and MASTER_PORT, which torchrun sets; else by MPI, where the launcher is MPI's and
mpi4py is installed; else it is MASTER_ADDR or the first host of the job's list, with a port made from the job's number.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.util
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from summit_train.core.comm import messages
from summit_train.core.comm.launch import HYDRA, LISTENER, Launch, job_address
from summit_train.core.comm.world import refuse_mixed
from summit_train.core.errors import AgreedError, RunFailed, UserError, exit_status

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

RENDEZVOUS_S = 300
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def meet(launch: Launch, host: str) -> tuple[TCPStore, str]:
    """Return the store in which the ranks find each other, and the address of the host that keeps it.

    Raises UserError where nothing says who keeps it, RunFailed where a port is taken or ranks do not come.
    """
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    world = _mpi_world(launch)
    if world is not None:
        refuse_mixed(world, "torch", host)
    if address is not None and port is not None:
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UserError(f"MASTER_PORT must be a port's number, got {port!r}")
        return _store(launch, address, int(port), keeps=keeps_store(launch)), address
    if world is not None:
        return _meet_by_mpi(world, launch, address or host)
    address, number = job_address(os.environ, launch)
    return _store(launch, address, number, keeps=launch.rank == 0), address


def keeps_store(launch: Launch) -> bool:
    """True if this process is rank 0 and keeps the store; torchrun's agent keeps that of its ranks."""
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


def address_from_here(store: Store, address: str, ranks: int) -> str:
    """Return rank 0's address, or if that is the loopback here, the address of a rank on another host, if any is.

    Debian gives a host's own name the address 127.0.1.1, by which other hosts cannot reach it. Collective.
    """
    if address == "localhost" or _is_loopback(address):
        return address  # on all ranks, so they are on one host
    here = _address_towards(address)
    if here and not _is_loopback(here):
        store.set("other host", here)
    if store.add("placed", 1) == ranks:
        store.set("all placed", "")
    if not _is_loopback(here):
        return address
    store.wait(["all placed"], datetime.timedelta(seconds=RENDEZVOUS_S))
    return store.get("other host").decode() if store.check(["other host"]) else address


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
