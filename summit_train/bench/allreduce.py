"""`mpirun -np N summit-train bench allreduce SPEC`: what an allreduce costs over these ranks.

It times the library that carries the gradients and, with Horovod, also MPI alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from summit_train.bench.measure import Values, add_spec, open_context
from summit_train.core.comm import World
from summit_train.core.comm.horovod_world import HorovodWorld
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.core.files import check_output, write_text
from summit_train.core.result import TextTable
from summit_train.models.count import count_network
from summit_train.scaling.collectives import AlphaBeta, NoFit, bus_bandwidth, fit_alpha_beta, link_of
from summit_train.scaling.cost import gradient_element_bytes
from summit_train.scaling.machines import Machine, Network
from summit_train.spec import load_spec
from summit_train.spec.source import to_yaml

# Repeats of one size.
_WARM_UP = 2
_FEWEST = 5
_MOST = 40
_MACHINE_HEADER = (
    "# Written by `summit-train bench allreduce --write`. It has no rates of computing: give --clips-per-second\n"
    "# to `simulate`, or add compute.rates.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec(parser)
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="about how long (default 30)")
    parser.add_argument("--max-bytes", type=int, default=2**26, metavar="N", help="largest message (default 64 MB)")
    parser.add_argument("--write", metavar="FILE.yaml", help="write this machine for `simulate --machine FILE.yaml`")


def run(args: argparse.Namespace) -> Values | None:
    """Measure. Raises UserError for a wrong spec or option, or for one rank alone."""
    spec = load_spec(args.spec, args.overrides)
    launch = this_launch()
    if args.max_bytes < 4096:
        raise UserError(f"--max-bytes must be 4096 or more, got {args.max_bytes}")
    if args.write is not None and Path(args.write).suffix not in (".yaml", ".yml"):
        raise UserError(f"--write must end in .yaml, got {args.write}")
    if launch.size == 1:
        raise UserError("bench allreduce needs two or more ranks; try mpirun -np 2 summit-train bench allreduce SPEC")
    num_bytes = gradient_element_bytes(spec) * count_network(spec).trained_parameters
    # 4 B, the powers of 4 from 256 B up to the largest message, that message, and all gradients in one
    powers = (4**i for i in range(4, 20) if 4**i < args.max_bytes)
    sizes = sorted({4, *powers, args.max_bytes // 4 * 4, num_bytes})
    with open_context() as context:
        if args.write is not None:
            context.world.from_first(lambda: check_output("--write", args.write, args.write))
        world = context.world
        load = round(os.getloadavg()[0], 2)
        cores = len(os.sched_getaffinity(0))
        rows = measure(world, context.device, sizes, args.seconds)
    about = {
        "ranks": world.size,
        "ranks_per_host": world.local_size,
        "hosts": world.size // world.local_size,
        "cores": cores,
        "oversubscribed": context.device.type == "cpu" and world.local_size > cores,  # ranks also wait for a core
        "load": load,  # of the machine when the measurement begins
        "device": context.device.type,
        "spec": spec.name,
        "gradient_bytes": num_bytes,
    }
    return about | {"rows": rows, "fits": fits_of(rows)} if launch.rank == 0 else None


def setting_text(values: Values) -> str:
    """Describe the machine and the reasons to doubt the numbers."""
    text = (
        f"{values['ranks']} ranks, {values['ranks_per_host']} a host, with {values['cores']} cores there; "
        f"tensors on the {values['device']}; gradients of {values['spec']}: {values['gradient_bytes']:,} bytes"
    )
    if values["oversubscribed"]:
        text += "\nMore ranks than cores: the times include waiting for a core, which no network would show."
    if values["load"] > 0.5:
        text += f"\nOther work ran (load {values['load']}): the times are upper bounds."
    return text


def measure(world: World, device: torch.device, sizes: Sequence[int], seconds: float) -> list[Values]:
    """Time every size by every library, about `seconds` in all; return the same rows on every rank.

    A row has median, least and most seconds of the repeats' slowest ranks, and the bus bandwidth in bytes a second.
    Tensors are fp32, the world's on `device`, MPI's on the CPU.
    """
    libraries = (world.backend, "mpi4py") if isinstance(world, HorovodWorld) else (world.backend,)
    share = seconds / (len(libraries) * len(sizes))
    rows = []
    for library, num_bytes in itertools.product(libraries, sizes):
        once = _operation(world, device, library, num_bytes)
        estimate = [slowest(world, once) for _ in range(_WARM_UP)][-1]
        times = [slowest(world, once) for _ in range(max(_FEWEST, min(_MOST, int(share / estimate))))]
        rows.append(row_of(world.size, library, num_bytes, times))
    return rows


def row_of(ranks: int, library: str, num_bytes: int, times: Sequence[float]) -> Values:
    row = {"library": library, "num_bytes": num_bytes, "repeats": len(times), "median_s": statistics.median(times)}
    bandwidth = bus_bandwidth(ranks, num_bytes, statistics.median(times))
    return row | {"low_s": min(times), "high_s": max(times), "bus_bandwidth": bandwidth}


def slowest(world: World, once: Callable[[], object]) -> float:
    """Return the seconds of `once` on the slowest rank, on every rank. All begin together."""
    world.barrier()
    start = time.perf_counter()
    once()
    return world.broadcast(max(world.gather(time.perf_counter() - start) or [0.0]))


def _operation(world: World, device: torch.device, library: str, num_bytes: int) -> Callable[[], None]:
    if library == "mpi4py" and isinstance(world, HorovodWorld):
        return partial(world.sum_by_mpi, torch.zeros(num_bytes // 4))
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> None:
        world.start_mean(tensor, f"bench.{num_bytes}")()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return once


def fits_of(rows: Sequence[Values]) -> dict[str, dict[str, float] | None]:
    """Fit latency and bandwidth of each library; None where noise keeps the times from growing with the size."""
    fits: dict[str, dict[str, float] | None] = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        try:
            fits[library] = asdict(fit_alpha_beta([row["num_bytes"] for row in own], [row["median_s"] for row in own]))
        except NoFit:
            fits[library] = None
    return fits


def write_machine(path: str, values: Values) -> None:
    """Write the file of the machine with the measured network and no rates of computing.

    Where gradients go over Horovod, a hop has MPI's latency (Horovod's where that is less, because it includes MPI's)
    and Horovod's bandwidth, which includes its copies. The overhead is what else Horovod adds to a message
    (negotiation), without the half cycle that a gradient waits on average: `overlap` simulates cycles. torch's latency
    is all a hop's. Raises NoFit where a fit is missing.
    """
    ranks = values["ranks"]
    per_host = values["ranks_per_host"]
    fits = values["fits"]
    carrier = next(iter(fits.values()))
    mpi = fits.get("mpi4py")
    if carrier is None or ("mpi4py" in fits and mpi is None):
        right = "measure longer (--seconds), with larger messages (--max-bytes), or while nothing else runs"
        raise NoFit(f"{path}: no machine can be written, as the times do not grow with the message size; {right}")
    latency_s = min(carrier["latency_s"], math.inf if mpi is None else mpi["latency_s"])
    source = f"bench allreduce, {ranks} ranks, {per_host} a host"
    link = link_of(AlphaBeta(latency_s, carrier["bytes_per_second"], 0.0), ranks, source)
    on_cpu = values["device"] == "cpu"
    # A rank needs two cores, one to compute on and one for MPI to wait on; else its backward pass shares one.
    network = Network(
        intra=link,
        inter=link if values["hosts"] > 1 else None,  # the slowest link decides: nothing is known of those within
        algorithm="ring",
        blocking=on_cpu,
        core_share=0.5 if on_cpu and values["cores"] < 2 * per_host else 0.0,
    )
    if mpi is None:
        network = network.model_copy(update={"cycle_s": 1e-9})  # torch sends at once
    else:
        overhead_s = max(0.0, carrier["latency_s"] - latency_s - network.cycle_s / 2)
        network = network.model_copy(update={"overhead_s": overhead_s})
    about = setting_text(values).replace("\n", " ")
    machine = Machine(name=Path(path).stem, about=about, gpus_per_node=per_host, network=network)
    write_text(path, _MACHINE_HEADER + to_yaml(machine.model_dump(mode="json", exclude_defaults=True)))


def as_text(values: Values) -> str:
    rows = [("size", "by", "median ms", "least", "most", "repeats", "bus GB/s")]
    for row in values["rows"]:
        median, low, high = (f"{1e3 * row[name]:.3f}" for name in ("median_s", "low_s", "high_s"))
        bandwidth = f"{row['bus_bandwidth'] / 1e9:.3f}"
        num_bytes = row["num_bytes"]  # powers of 1024, as messages are sized
        size, unit = (2**20, "MB") if num_bytes >= 2**20 else (2**10, "KB") if num_bytes >= 2**10 else (1, "B")
        what = (f"{num_bytes / size:.4g} {unit}", row["library"])
        rows.append((*what, median, low, high, str(row["repeats"]), bandwidth))
    lines = [setting_text(values), str(TextTable(rows, left=0))]
    for library, fit in values["fits"].items():
        text = "no latency and bandwidth: the times do not grow with the size"
        if fit is not None:
            text = f"{1e3 * fit['latency_s']:.3f} ms + size / {fit['bytes_per_second'] / 1e9:.3f} GB/s"
            text += f" (furthest point {100 * fit['worst_error']:.0f} % off)"
        lines.append(f"{library}: {text}")
    return "\n".join(lines)
