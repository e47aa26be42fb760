"""Where ranks find each other, with and without MPI."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import distributed as dist

from summit_train.core.comm import open_world, rendezvous
from summit_train.core.comm.launch import HYDRA, Launch, this_launch
from summit_train.core.comm.rendezvous import meet, use_interface_towards
from summit_train.core.errors import AgreedError, RunFailed, UserError
from tests.worlds import PATIENCE_S, ROOT, environment, forked, needs_ranks, under_mpirun

LAUNCH = Launch("srun", 1, 4)
At = Callable[[str, object], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Says where rank 0 is."""

    def at(address: str, port: object) -> None:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))

    return at


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_an_address_is_named_at_once(at: At, rank: int) -> None:
    at("nowhere.invalid", 12345)
    with pytest.raises(UserError, match=f"rank {rank} on .*: rank 0's host nowhere.invalid has no address here; set"):
        meet(Launch("srun", rank, 4), "here")


@pytest.mark.parametrize("port", ["many", "0", "65536", ""])
def test_a_port_that_is_none_is_refused(at: At, port: str) -> None:
    at("localhost", port)
    with pytest.raises(UserError, match=re.escape(f"MASTER_PORT must be a port's number, got {port!r}")):
        meet(LAUNCH, "here")


def test_a_port_that_is_taken_is_named(at: At) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        at("localhost", port := taken.getsockname()[1])
        with pytest.raises(RunFailed, match=f"rank 0 on .*: cannot keep the rendezvous at port {port} .*address alr"):
            meet(Launch("srun", 0, 4), "here")


def test_a_rank_0_that_does_not_come_is_named_with_host_and_seconds(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("summit_train.core.comm.rendezvous.RENDEZVOUS_S", 1)
    with socket.socket() as silent:  # it keeps the port from others, and does not listen
        silent.bind(("127.0.0.1", 0))
        at("127.0.0.1", port := silent.getsockname()[1])
        with pytest.raises(RunFailed, match=f"rank 1 on .*: no answer from 127.0.0.1, port {port}, within 1 s"):
            meet(LAUNCH, "here")


def test_gloo_uses_the_interface_that_leads_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_address(self: socket.socket) -> tuple[str, int]:
        return own, 9

    class Probe(socket.socket):
        getsockname = own_address

    def ask(probe: int, what: int, name: bytes) -> bytes:
        if name.startswith(b"down"):
            raise OSError("an interface without an address")
        name = name.rstrip(bytes(1))
        return bytes(20) + socket.inet_aton("127.0.0.1" if name == b"lo" else f"10.0.0.{len(name)}")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_towards("127.0.0.1")  # the loopback: ranks of other hosts may have to reach this one
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr("socket.socket", Probe)
    monkeypatch.setattr("fcntl.ioctl", ask)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(["lo", "down0", "ib0", "eth0"], 1)))
    own = "10.0.0.3"
    use_interface_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with pytest.raises(UserError, match=r"IFNAME must be an interface .*, such as ib0, got lo, the loopback"):
        use_interface_towards("10.0.0.9")
    use_interface_towards("10.0.0.3")  # this host itself


def test_rank_0_takes_the_way_to_other_hosts_where_its_name_is_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Debian's /etc/hosts. The last of three ranks is on another host; of two ranks none is."""
    ways = {"hosta": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(rendezvous, "_address_towards", ways.__getitem__)
    for size, expected in ((3, "10.0.0.2"), (2, "hosta")):
        store = dist.HashStore()
        store.add("placed", size - 1)  # as the others do
        if size == 3:
            store.set("other host", "10.0.0.2")
        assert rendezvous.address_from_here(store, "hosta", size) == expected
        assert rendezvous.address_from_here(store, "localhost", size) == "localhost"


_IN_NAMESPACES = """
set -eu
a=summit_train_a$$ b=summit_train_b$$
trap 'ip netns del $a; ip netns del $b' EXIT
ip netns add $a; ip netns add $b
ip -n $a link add v0 type veth peer name v0 netns $b
for n in $a $b; do ip -n $n link set lo up; ip -n $n link set v0 up; done
ip -n $a addr add 192.168.91.1/24 dev v0; ip -n $b addr add 192.168.91.2/24 dev v0
printf '127.0.0.1 localhost\n127.0.1.1 hosta\n192.168.91.2 hostb\n' >hosta
printf '127.0.0.1 localhost\n127.0.1.1 hostb\n192.168.91.1 hosta\n' >hostb
rank() { RANK=$3 ip netns exec $1 unshare -m -u sh -c "mount --bind $2 /etc/hosts; hostname $2; exec $PYTHON rank.py"; }
rank $b hostb 1 & rank $a hosta 0
wait $!
"""
_RANK = """
from summit_train.core.comm import open_world
world = open_world()
print(world.gather(world.who))
world.close()
"""


def test_ranks_of_two_hosts_meet_where_their_own_names_are_the_loopback(tmp_path: Path) -> None:
    """Two network namespaces of this machine are the hosts, as Debian sets them up."""
    tried = subprocess.run(["sh", "-c", "ip netns add summit_train_try$$ && ip netns del summit_train_try$$"],
        capture_output=True)  # fmt: skip
    if tried.returncode:
        pytest.skip(f"no network namespaces: {tried.stderr.decode().strip()}")
    (tmp_path / "rank.py").write_text(_RANK)
    meeting = {"MASTER_ADDR": "hosta", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environ = environment(SUMMIT_TRAIN_COMM="torch", PYTHON=sys.executable, PYTHONPATH=str(ROOT), **meeting)
    done = subprocess.run(
        ["bash", "-c", _IN_NAMESPACES], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and "['rank 0 on hosta', 'rank 1 on hostb']" in done.stdout, done.stdout + done.stderr


def _refused() -> str:
    with pytest.raises((UserError, AgreedError)) as caught:
        open_world()
    return f"{caught.value}\n"


@needs_ranks
def test_ranks_of_different_back_ends_are_refused_before_they_meet() -> None:
    def work() -> int:
        os.environ["SUMMIT_TRAIN_COMM"] = ("horovod", "torch")[this_launch().rank]
        print(_refused(), end="")
        return 0

    status, output = under_mpirun(2, work)
    host = socket.gethostname()
    line = f"rank 1 on {host} uses torch, but rank 0 on {host} uses horovod; set SUMMIT_TRAIN_COMM to the same value"
    assert status == 0 and output.count(line) == 2, output


@needs_ranks
def test_under_mpirun_a_host_without_an_address_can_be_named() -> None:
    def work() -> int:
        socket.gethostname = lambda: "no-such-host.invalid"
        print(_refused(), end="")
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        world = open_world()
        print(f"{world.size} ranks\n", end="")
        world.close()
        return 0

    status, output = under_mpirun(2, work, {"SUMMIT_TRAIN_COMM": "torch"})
    assert status == 0 and output.count("set MASTER_ADDR to one that every rank") == output.count("2 ranks\n") == 2, (
        output
    )


def test_an_open_mpi_among_another_launchers_ranks_is_left_alone() -> None:
    """Its MPI_Init would end the process. Under its own mpirun it joins the ranks, which the tests above show."""
    pytest.importorskip("mpi4py")

    def work() -> int:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        foreign = MPI.get_vendor()[0] == "Open MPI"
        return 0 if not foreign or rendezvous._mpi_world(Launch(HYDRA, 0, 2, by_mpi=True)) is None else 1

    assert forked(0, work) == (0, "")
