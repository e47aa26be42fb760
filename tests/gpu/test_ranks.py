"""Two ranks on one GPU against one rank: the same weights, statistics and losses, in double precision.

NCCL refuses two ranks on a GPU, so sums go through the host's memory, by torch.distributed's gloo. Nothing here is
about speed: each rank's tensors must be where they should be, and sums and kernels must keep their order. Four virtual
GPUs, synchronous and averaging.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from summit_train.core.comm import World
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.models.network import initial_network
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training.build import build_step
from tests.gpu.devices import batches_of, environment, flat, relative_error
from tests.worlds import PATIENCE_S, ROOT, take_step

RANKS = 2
# Sums in another order: rounding of 1e-16, which four steps of 18 layers may multiply by a thousand or so.
BOUND = 1e-11
VIRTUAL_GPUS, STEPS = 4, 4
METHODS = {"synchronous": (), "averaging": ("parallel.method=averaging", "parallel.period=2")}
SPEC = (
    f"scale.gpus={VIRTUAL_GPUS} scale.clips_per_gpu=2 noise_scale.every_steps=0 schedule.epochs=1 precision=fp64 "
    "schedule.warmup_epochs=0 model.width=0.125 data.crop=32"
)
State = dict[str, torch.Tensor]


class HostWorld(World):
    """Ranks whose sums go through the host's memory."""

    backend = "gloo"

    def __init__(self, rank: int, size: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self.rank, self.size, self.local_rank, self.local_size = rank, size, rank, size
        super().__init__()

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        tensor.copy_(self.sum(tensor, name) / self.size)
        return lambda: None

    def start_total(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        tensor.copy_(self.sum(tensor, name))
        return lambda: None

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        host = tensor.detach().cpu().clone()
        dist.all_reduce(host)
        return host.to(tensor.device)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


def trained(method: str, world: World, device: torch.device) -> State:
    """The network after STEPS updates, and the loss of the last one."""
    spec = load_spec(shipped("configs/motion") / "tsm.yaml", [*SPEC.split(), *METHODS[method]])
    plan = make_plan(spec, world.size, VIRTUAL_GPUS * spec.scale.clips_per_gpu * STEPS)
    model = initial_network(spec, device)
    step = build_step(spec, plan, world, model, device)
    own = virtual_gpus_of(world.rank, world.size, VIRTUAL_GPUS)
    for number in range(STEPS):
        result = take_step(step, batches_of(spec, number, own), lr=0.05)
        vote = result.read(plan.global_batch, VIRTUAL_GPUS, world.size)
    # Without num_batches_tracked, which counts a rank's passes until a checkpoint sets it to the updates.
    floats = {name: value.cpu() for name, value in model.state_dict().items() if value.is_floating_point()}
    return floats | {"loss": torch.tensor(vote.loss)}


@pytest.mark.nightly
def test_two_ranks_end_as_one_does(device: torch.device, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.gpu.test_ranks", str(device), str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(rank), str(RANKS)], cwd=ROOT, env=environment(device)) for rank in range(RANKS)
    ]
    try:
        alone = {method: trained(method, World(), device) for method in METHODS}
        assert [process.wait(PATIENCE_S) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(RANKS))
    for method in METHODS:
        assert all(torch.equal(value, second[method][name]) for name, value in first[method].items()), method
        assert relative_error(flat(first[method].values()), flat(alone[method].values())) <= BOUND, method


if __name__ == "__main__":  # DEVICE FOLDER RANK RANKS
    torch.set_num_threads(1)
    device, folder, rank, ranks = torch.device(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    world = HostWorld(rank, ranks, str(folder / "store"))
    torch.save({method: trained(method, world, device) for method in METHODS}, folder / f"rank_{rank}.pt")
    world.close()
