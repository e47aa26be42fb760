"""Ranks that torch.distributed joins: how they connect, and which are refused."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from summit_train.core.comm import open_world, rendezvous
from summit_train.core.comm import torch_world as module
from summit_train.core.comm.launch import Launch, this_launch
from summit_train.core.comm.rendezvous import meet
from summit_train.core.errors import RunFailed, UserError
from tests.worlds import PATIENCE_S, forked, run


def test_a_rank_that_others_cannot_reach_ends() -> None:
    """gloo may wait far longer than it was told to."""

    def work() -> int:
        rendezvous.RENDEZVOUS_S = 1
        if this_launch().rank == 0:
            dist.init_process_group = lambda *_, **__: time.sleep(PATIENCE_S)  # type: ignore[assignment]
        open_world()
        return 0

    status, output = forked(2, work)
    assert status == 1 and "other ranks did not connect within 2 s; can they reach this one? GLOO_SOCKET" in output


def test_a_rank_that_ends_before_all_are_connected_is_not_waited_for() -> None:
    def work() -> int:
        rendezvous.RENDEZVOUS_S = 2
        if this_launch().rank == 1:  # it knows where the others are, and does not come
            rendezvous.use_interface_towards = lambda address: sys.exit(0)  # type: ignore[assignment]
        with pytest.raises(RunFailed, match=f"{socket.gethostname()}: the ranks do not connect within 2 s"):
            open_world()
        return 0

    status, output = forked(2, work)
    assert status == 0, output


class _Planted:
    """Pickled, it writes a file where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("planted"),)


@pytest.mark.parametrize("knows_protocol", [True, False])
def test_a_stranger_that_joins_as_a_rank_is_refused_and_runs_no_code(tmp_path: Path, knows_protocol: bool) -> None:
    def work() -> int:
        os.chdir(tmp_path)
        if (launch := this_launch()).rank == 0:
            os.environ["SUMMIT_TRAIN_SECRET"] = "ours"
            with pytest.raises(RunFailed, match=r"that of rank 1 differs|or one left"):
                open_world()
            return 0
        store, _ = meet(launch, "here")
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as rank 0 has it
        dist.init_process_group("gloo", store=dist.PrefixStore("0", store), rank=1, world_size=2)
        with suppress(RuntimeError):  # rank 0 has left
            for size in (64, 32) if knows_protocol else ():
                dist.all_gather([torch.zeros(size, dtype=torch.uint8) for _ in range(2)], torch.ones(size).byte())
            dist.all_gather_object([None, None], _Planted())
            dist.gather_object(_Planted(), None)
        return 0

    status, output = forked(2, work)
    assert status == 0 or not knows_protocol, output  # gloo ends a process that gets more bytes than it expects
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("secret", "is_believed"), [("ours", True), ("theirs", False), ("", False)])
def test_a_rank_is_believed_if_it_knows_the_secret(secret: str, is_believed: bool) -> None:
    def work() -> int:
        os.environ["SUMMIT_TRAIN_SECRET"] = secret if this_launch().rank == 2 else "ours"
        with nullcontext() if is_believed else pytest.raises(RunFailed, match=wrong):
            open_world().close()
        return 0

    wrong = "(rank [01] on .*SUMMIT_TRAIN_SECRET must be the same .* rank 2|rank 2 on .* rank 0) differs"
    status, output = forked(3, work)
    assert status == 0, output


def test_a_rank_may_be_late_for_longer_than_the_ranks_may_take_to_connect() -> None:
    def work() -> int:
        rendezvous.RENDEZVOUS_S = 2
        world = open_world()
        if world.rank == 2:  # with which rank 0 has no connection yet
            time.sleep(4)
        assert world.gather(world.rank) in ([0, 1, 2, 3], None)
        world.close()
        return 0

    status, output = forked(4, work)
    assert status == 0, output


_COUNT = """
import os
from summit_train.core.comm import open_world
world = open_world()
os.write(1, f"{world.backend} {world.gather((world.rank, world.local_rank, world.local_size))}\\n".encode())
import torch.distributed.nn.functional  # as torch's compiler does; it must not keep the group
world.close()
threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
assert not any("gloo" in thread for thread in threads), threads
"""


@pytest.mark.nightly
def test_torchrun_starts_ranks_without_mpi(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(_COUNT)
    status, output = run(
        0, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(tmp_path / "count.py")
    )
    assert status == 0, output
    assert "torch (gloo) [(0, 0, 3), (1, 1, 3), (2, 2, 3)]" in output


@pytest.mark.parametrize(("agent", "needed"), [("True", 40 + 1536), ("", 40 + 2 * 1536)])
def test_rank_0_needs_open_files_for_all_ranks(monkeypatch: pytest.MonkeyPatch, agent: str, needed: int) -> None:
    """torchrun's own process keeps the store of its ranks."""
    monkeypatch.setattr(module, "raise_open_files", lambda: 1024)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    with pytest.raises(UserError, match=f"^the limit of open files must be {needed:,} or more .*, got 1,024; raise"):
        open_world(Launch("torchrun", 0, 1536))
