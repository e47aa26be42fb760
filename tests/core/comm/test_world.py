"""The serial world, and that it has every function of the other."""

from __future__ import annotations

import inspect
import json
import os
import socket
from contextlib import nullcontext

import pytest
import torch

from summit_train.core.comm import World, choose_backend, open_world
from summit_train.core.comm.horovod_world import HorovodWorld
from summit_train.core.comm.launch import Launch, this_launch
from summit_train.core.comm.torch_world import TorchWorld
from summit_train.core.errors import UserError
from tests.worlds import joined, lines, needs_ranks, run


@pytest.mark.parametrize("kind", [HorovodWorld, TorchWorld])
def test_every_world_has_the_same_functions(kind: type[World]) -> None:
    shared = {"together", "from_first", "wait", "barrier", "sum"}  # made of the others
    shared |= {"abort"} if kind is TorchWorld else set()
    names = [name for name in vars(World) if not name.startswith("_") and callable(getattr(World, name))]
    assert len(names) >= 10 and shared < set(names)
    for name in names:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(World, name)), name
        assert (name in vars(kind)) == (name not in shared), f"{name} is the one of a single rank"


def test_a_world_of_one_needs_no_mpi() -> None:
    program = """
import sys
from summit_train.core.comm import open_world
world = open_world()
print(world.rank, world.size, world.gather("x"), world.broadcast(3), "mpi4py" in sys.modules, "horovod" in sys.modules)
"""
    assert run(0, "-c", program) == (0, "0 1 ['x'] 3 False False\n")


def test_more_processes_than_the_world_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(World):
        size = 1

    monkeypatch.setattr("summit_train.core.comm.HorovodWorld", Small)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(UserError, match="4 processes were started, but Horovod joined 1"):
        open_world(Launch("mpirun (Open MPI)", 0, 4, by_mpi=True))


@pytest.mark.parametrize(
    ("wish", "by_mpi", "installed", "chosen"),
    [
        (None, True, True, "horovod"),
        ("auto", True, True, "horovod"),
        ("auto", False, True, "torch"),
        ("auto", True, False, "torch"),
        ("torch", True, True, "torch"),
        ("horovod", True, True, "horovod"),
        ("horovod", True, False, "needs horovod, not installed here; run `summit-train build-horovod`, or use SUMMIT"),
        ("horovod", False, True, "torchrun started 4 processes without MPI, which Horovod needs"),
        ("gloo", True, True, "SUMMIT_TRAIN_COMM must be horovod, torch or auto, got 'gloo'"),
    ],
)
def test_the_back_end_is_the_one_named_or_the_one_that_works(
    monkeypatch: pytest.MonkeyPatch, wish: str | None, by_mpi: bool, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "horovod" or installed or None)
    launch = Launch("mpirun (Open MPI)" if by_mpi else "torchrun", 0, 4, by_mpi=by_mpi)
    environ = {} if wish is None else {"SUMMIT_TRAIN_COMM": wish}
    with pytest.raises(UserError) if " " in chosen else nullcontext() as caught:
        assert choose_backend(launch, environ) == chosen
    assert caught is None or chosen in str(caught.value)


_WORLD = """
import json, os, time
from array import array
import torch
from summit_train.core.comm import open_world
from summit_train.core.errors import AgreedError, RunFailed, UserError
world = open_world()
mine = torch.tensor([float(world.rank), 1.0], dtype=torch.float64)
total = world.sum(mine, "total").tolist()
mean = torch.full((3,), float(world.rank + 1))
world.start_mean(mean, "mean")()
if world.backend == "horovod":
    by_mpi = torch.tensor([float(world.rank), 1.0])
    world.sum_by_mpi(by_mpi)
    assert by_mpi.tolist() == total, by_mpi
if world.rank > 0:  # rank 0 has no partner
    theirs = world.exchange(torch.full((5,), float(world.rank)), 3 - world.rank)
    assert theirs.tolist() == [3.0 - world.rank] * 5, theirs
said = world.broadcast(f"from {world.rank}")
ranks = world.gather((world.rank, said, mean.tolist(), total))
world.barrier()
ticks = []
if world.rank == 0:
    time.sleep(1)  # the others wait for it, and tick meanwhile
world.wait(lambda: ticks.append(1))
ticked = world.gather(len(ticks))

found = []  # sums that no rank waits for
for round in range(40):
    sums = world.start_sum([round, world.rank])
    if world.rank == round % 3:
        time.sleep(0.001)
    while (ready := sums()) is None:
        others = [array("q", [7, 7]) for _ in range(9)]  # what would lie in memory that is given back
    found.append(ready == [3 * round, 3])
assert all(found), found
assert world.together(lambda: world.rank) == world.rank
assert world.from_first(lambda: world.rank) == 0

def fail():
    if world.rank == 1:
        raise UserError("no such list")
    if world.rank == 2:
        raise RunFailed("the disk is full")

def refuse():
    raise UserError(f"no such folder on {world.rank}")

told = []
for call in (lambda: world.together(fail), lambda: world.from_first(refuse)):
    try:
        call()
    except AgreedError as error:
        told.append((str(error), error.status))
told = world.gather(told)
switches = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE", "OMPI_MCA_mpi_yield_when_idle")
environ = world.gather([os.environ.get(name) for name in switches])
nvls = world.gather(os.environ["NCCL_NVLS_ENABLE"])
if ranks is not None:
    local = [world.local_rank, world.local_size]
    found = dict(ranks=ranks, local=local, ticked=ticked, told=told, warned=world.warnings, environ=environ, nvls=nvls)
    print(json.dumps(found))
world.close()
"""


@pytest.mark.parametrize("backend", [pytest.param("horovod", marks=needs_ranks), "torch"])
def test_sums_means_objects_and_errors_over_3_ranks(backend: str) -> None:
    """The lowest failed rank is named on all, with its status.

    Horovod fuses nothing, whatever it is told. Waiting ranks yield, and have no NVLS, but for the last one, whose user
    says otherwise.
    """

    def work() -> int:
        os.environ |= {"NCCL_NVLS_ENABLE": "1"} if this_launch().rank == 2 else {}
        if backend == "horovod":
            os.environ["HOROVOD_FUSION_THRESHOLD"] = "1000000"
            os.environ |= {"OMPI_MCA_mpi_yield_when_idle": "0"} if this_launch().rank == 2 else {}
        exec(_WORLD, {})
        return 0

    status, output = joined(3, work, backend)
    assert status == 0, output
    result = json.loads(next(line for line in lines(output) if line.startswith("{")))
    assert result["ranks"] == [[rank, "from 0", [2.0, 2.0, 2.0], [3.0, 3.0]] for rank in range(3)]
    assert result["nvls"] == ["0", "0", "1"]
    assert result["local"] == [0, 3] and min(result["ticked"][1:]) > 1
    assert result["told"] == [[[f"rank 1 on {socket.gethostname()}: no such list", 2], ["no such folder on 0", 2]]] * 3
    if backend == "horovod":
        warning = "HOROVOD_FUSION_THRESHOLD=1000000: ignored, as it would make equal runs differ in the last bits"
        # Beside GPUs waiting ranks do not yield.
        yields = None if os.path.exists("/dev/nvidiactl") else "1"
        assert result["warned"] == [warning]
        assert result["environ"] == [["0", "0", said] for said in (yields, yields, "0")]


def test_serial_sums_and_means_leave_a_tensor_as_it_is() -> None:
    world, tensor = World(), torch.arange(3.0)
    world.start_mean(tensor, "mean")()
    assert world.sum(tensor, "sum").tolist() == [0, 1, 2]
