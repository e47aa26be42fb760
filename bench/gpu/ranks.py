"""Two ranks on one GPU against one rank: the same weights, statistics and votes.

NCCL refuses two ranks on one GPU, so the sums go through the host's memory, by torch.distributed's gloo, which is part
of every torch. It says nothing about speed: it checks that each rank's tensors are where they should be and that sums
and kernels keep their order. In double precision; four virtual GPUs, synchronous and averaging.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from outcome import Check, Outcome, fact, run_part

from summit_train.core.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from summit_train.training.run import build_step, fresh_model

VIRTUAL_GPUS, STEPS, RANKS = 4, 4, 2
METHODS = {"synchronous": [], "averaging": ["parallel.method=averaging", "parallel.period=2"]}
# Sums in another order: rounding of 1e-16, which four steps of 18 layers may multiply by a thousand or so.
BOUND = 1e-11
State = dict[str, torch.Tensor]


class HostWorld(World):
    """Ranks whose sums go through the host's memory."""

    backend = "gloo"

    def __init__(self, rank: int, size: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self.rank, self.size, self.local_rank, self.local_size = rank, size, rank, size
        super().__init__()

    def start_mean(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Average in place."""
        tensor.copy_(self.sum(tensor, name) / self.size)
        return lambda: None

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum on the host."""
        host = tensor.detach().cpu()
        if host.data_ptr() == tensor.data_ptr():
            host = host.clone()
        dist.all_reduce(host)
        return host.to(tensor.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def ranks(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Train on one rank here and on two ranks in processes of their own; compare. A rank writes its state."""
    if args.rank is not None:
        as_rank(args.rank, args.folder, device)
        return
    alone = {method: trained(method, World(), device) for method in METHODS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_ranks(folder, args)
        states = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for method in METHODS:
        compare(method, alone[method], [state[method] for state in states], outcome)
    outcome.values["skipped"] = {
        "Horovod": "its two ranks need a GPU each; `summit-train bench allreduce` measures them"
    }


def start_ranks(folder: Path, args: argparse.Namespace) -> None:
    """Start the ranks and wait for them. Raises RuntimeError if one fails."""
    words = [sys.executable, __file__, "--device", args.device, "--folder", str(folder)]
    processes = [
        subprocess.Popen([*words, "--rank", str(rank), "--out", str(folder / f"{rank}.json")]) for rank in range(RANKS)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError("a rank failed; its traceback stands above")


def as_rank(rank: int, folder: Path, device: torch.device) -> None:
    """Train as one of the ranks and write the state of the network."""
    world = HostWorld(rank, RANKS, str(folder / "store"))
    states = {method: trained(method, world, device) for method in METHODS}
    torch.save(states, folder / f"rank_{rank}.pt")
    world.close()


def trained(method: str, world: World, device: torch.device) -> State:
    """Return the network after STEPS updates, and the loss of the last one."""
    spec = _spec(method)
    plan = make_plan(spec, world.size, VIRTUAL_GPUS * spec.scale.clips_per_gpu * STEPS)
    model = fresh_model(spec, device)
    step = build_step(spec, plan, world, model, device)
    for number in range(STEPS):
        of_rank = virtual_gpus_of(world.rank, world.size, VIRTUAL_GPUS)
        vote = step([batch_of(spec, number, virtual_gpu) for virtual_gpu in of_rank], lr=0.05).read(
            plan.global_batch, VIRTUAL_GPUS, world.size
        )
    # Without num_batches_tracked, which counts a rank's passes until a checkpoint sets it to the updates.
    floats = {name: value.cpu() for name, value in model.state_dict().items() if value.is_floating_point()}
    return floats | {"loss": torch.tensor(vote.loss)}


def _spec(method: str) -> Spec:
    words = [f"scale.gpus={VIRTUAL_GPUS}", "scale.clips_per_gpu=2", "noise_scale.every_steps=0", "schedule.epochs=1"]
    words += ["precision=fp64", "schedule.warmup_epochs=0", "model.width=0.125", "data.crop=32", *METHODS[method]]
    return load_spec(shipped("configs/motion") / "tsm.yaml", words)


def batch_of(spec: Spec, step: int, virtual_gpu: int) -> MicroBatch:
    """Return the random clips of a virtual GPU, the same on whichever rank it is."""
    generator = torch.Generator().manual_seed(1000 * step + virtual_gpu)
    data, clips = spec.data, spec.scale.clips_per_gpu
    shape = (clips, *data.input.clip_shape(data.num_frames, data.crop))
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
    return MicroBatch(step, virtual_gpu, frames, labels, torch.arange(clips))


def compare(method: str, alone: State, states: list[State], outcome: Outcome) -> None:
    """Check that all ranks have the same bits, and those of one rank to rounding."""
    first, *others = states
    same = all(torch.equal(first[name], other[name]) for other in others for name in first)
    outcome.add(fact(f"{method}: the ranks have the same bits", same))
    one, two = (torch.cat([value.double().flatten() for value in state.values()]) for state in (alone, first))
    difference = (torch.linalg.vector_norm(one - two) / torch.linalg.vector_norm(one)).item()
    outcome.add(Check(f"{method}: two ranks against one, relative", difference, BOUND))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    sys.exit(run_part(__doc__, ranks, _arguments))
