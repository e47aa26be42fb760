"""The serial world, and that it has every function of the other."""

from __future__ import annotations

import inspect
import json
import os
import socket

import pytest
import torch

from summit_train.comm import HorovodWorld, World, WorldError, open_world
from tests.worlds import lines, needs_ranks, run


def test_the_serial_twin_has_the_same_functions() -> None:
    names = [name for name in vars(World) if not name.startswith("_") and callable(getattr(World, name))]
    assert len(names) >= 10
    for name in names:
        wanted = inspect.signature(getattr(World, name))
        assert inspect.signature(getattr(HorovodWorld, name)) == wanted, name
        assert name in vars(HorovodWorld), f"{name} is the one of a single rank"


def test_a_world_of_one_needs_no_mpi() -> None:
    program = """
import sys
from summit_train.comm import open_world
world = open_world(1)
print(world.rank, world.size, world.gather("x"), world.broadcast(3), "mpi4py" in sys.modules, "horovod" in sys.modules)
"""
    assert run(0, "-c", program) == (0, "0 1 ['x'] 3 False False\n")


@needs_ranks
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="ranks beside GPUs wait without a pause")
@pytest.mark.parametrize("wish", [None, "0"])
def test_on_a_machine_without_gpus_waiting_ranks_yield_unless_told_otherwise(wish: str | None) -> None:
    program = """
import os
from summit_train.comm import open_world
world = open_world(2)
told = world.gather(os.environ["OMPI_MCA_mpi_yield_when_idle"])
if world.rank == 0:
    print(told)
world.close()
"""
    env = {} if wish is None else {"OMPI_MCA_mpi_yield_when_idle": wish}
    assert run(2, "-c", program, env=env) == (0, f"['{wish or 1}', '{wish or 1}']\n")


def test_more_processes_than_the_world_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(World):
        size = 1

    monkeypatch.setattr("summit_train.comm.HorovodWorld", Small)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(WorldError, match="4 processes were started, but Horovod joined 1"):
        open_world(4)


_WORLD = """
import json, sys, time
import torch
from summit_train.comm import open_world
world = open_world(int(sys.argv[1]))
mine = torch.tensor([float(world.rank), 1.0], dtype=torch.float64)
total = world.sum(mine, "total").tolist()
mean = torch.full((3,), float(world.rank + 1))
world.finish(world.start_mean(mean, "mean"))
by_mpi = torch.tensor([float(world.rank), 1.0])
world.sum_by_mpi(by_mpi)
assert by_mpi.tolist() == total, by_mpi
said = world.broadcast(f"from {world.rank}")
ranks = world.gather((world.rank, said, mean.tolist(), total))
world.barrier()
node = world.gather_node(world.rank)
ticks = []
if world.rank == 0:
    time.sleep(1)  # the others wait for it, and tick meanwhile
world.wait(lambda: ticks.append(1))
ticked = world.gather(len(ticks))
if ranks is not None:
    local = [world.local_rank, world.local_size]
    print(json.dumps({"ranks": ranks, "local": local, "node": node, "ticked": ticked}))
else:
    assert node is None
world.close()
"""


@needs_ranks
def test_sums_means_and_objects_over_3_ranks() -> None:
    status, output = run(3, "-c", _WORLD, "3")
    assert status == 0, output
    result = json.loads(next(line for line in lines(output) if line.startswith("{")))
    assert result["ranks"] == [[rank, "from 0", [2.0, 2.0, 2.0], [3.0, 3.0]] for rank in range(3)]
    assert result["local"] == [0, 3]
    assert result["node"] == [0, 1, 2]
    assert min(result["ticked"][1:]) > 1


@needs_ranks
def test_gradients_are_averaged_over_ranks_and_summed_over_passes() -> None:
    """Rank r's two passes have the gradients r + 1 and 2 (r + 1): 3 (r + 1), on average over two ranks 4.5."""
    program = """
import torch
from summit_train.comm import open_world
world = open_world(2)
model = torch.nn.Module()
model.weight = weight = torch.nn.Parameter(torch.zeros(2))
optimizer = world.wrap(torch.optim.SGD([weight], lr=1.0), model, 2, "none")
for factor in (1, 2):
    (weight * factor * (world.rank + 1)).sum().backward()
world.synchronize(optimizer)
world.update(optimizer)
everyone = world.gather((world.rank, weight.tolist()))
if everyone is not None:
    print(everyone)
world.close()
"""
    status, output = run(2, "-c", program)
    assert status == 0, output
    assert "[(0, [-4.5, -4.5]), (1, [-4.5, -4.5])]" in lines(output)


_TOGETHER = """
import time
from array import array
from summit_train.comm import open_world
from summit_train.errors import AgreedError, RunFailed, UserError
world = open_world(3)
found = []
for round in range(300):
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
everyone = world.gather(told)
if world.rank == 0:
    print(everyone)
world.close()
"""


@needs_ranks
def test_sums_that_nobody_waits_for_and_errors_of_some_ranks() -> None:
    """The lowest of the ranks that failed is named on all, with its status."""
    status, output = run(3, "-c", _TOGETHER)
    assert status == 0, output
    told = [(f"rank 1 on {socket.gethostname()}: no such list", 2), ("no such folder on 0", 2)]
    assert output == f"{[told] * 3}\n"


def test_serial_sums_and_means_leave_a_tensor_as_it_is() -> None:
    world, tensor = World(), torch.arange(3.0)
    world.finish(world.start_mean(tensor, "mean"))
    assert world.sum(tensor, "sum").tolist() == [0, 1, 2]
