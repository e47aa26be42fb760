"""Allreduces timed over the ranks of a world: by what carries its gradients and, beside Horovod, by MPI alone."""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from summit_train.core.comm import World
from summit_train.core.comm.horovod_world import HorovodWorld
from summit_train.scaling.machines import Machine, Network
from summit_train.scaling.network import AlphaBeta, NoFit, bus_bandwidth, fit_alpha_beta, link_of

Fits = Mapping[str, AlphaBeta | None]
_WARM_UP, _FEWEST, _MOST = 2, 5, 40  # repeats of one size


@dataclass(frozen=True)
class Sample:
    """Seconds of one message size by one library: median, least and most of the repeats' slowest ranks."""

    library: str
    num_bytes: int
    repeats: int
    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Setting:
    """Where allreduces are measured. `load`: of the machine when the measurement begins."""

    ranks: int
    ranks_per_host: int
    cores: int
    load: float
    device: str
    spec: str
    gradient_bytes: int

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return self.ranks // self.ranks_per_host

    @property
    def oversubscribed(self) -> bool:
        """Return whether there are more ranks than cores, so that ranks also wait for a core."""
        return self.device == "cpu" and self.ranks_per_host > self.cores

    @property
    def busy(self) -> bool:
        """Return whether other work ran when the measurement began."""
        return self.load > 0.5

    def __str__(self) -> str:
        """Describe the machine and the reasons to doubt the numbers."""
        text = (
            f"{self.ranks} ranks, {self.ranks_per_host} a host, with {self.cores} cores there; "
            f"tensors on the {self.device}; gradients of {self.spec}: {self.gradient_bytes:,} bytes"
        )
        if self.oversubscribed:
            text += "\nMore ranks than cores: the times hold waiting for a core, which no network would show."
        if self.busy:
            text += f"\nOther work ran (load {self.load}): the times are upper bounds."
        return text


def setting_of(world: World, device: torch.device, spec: str, gradient_bytes: int) -> Setting:
    """Return the setting of a measurement that begins now."""
    cores, load = len(os.sched_getaffinity(0)), round(os.getloadavg()[0], 2)
    return Setting(world.size, world.local_size, cores, load, device.type, spec, gradient_bytes)


def message_sizes(largest: int, *more: int) -> list[int]:
    """Return 4 B, the powers of 4 from 256 B up to `largest` bytes, `largest`, and `more`."""
    return sorted({4, largest // 4 * 4, *more, *(4**i for i in range(4, 20) if 4**i < largest)})


def measure(world: World, device: torch.device, sizes: Sequence[int], seconds: float) -> Iterator[Sample]:
    """Time every size by every library, about `seconds` in all; yield the same samples on every rank.

    Collective: all ranks must take all samples. Tensors are fp32, the world's on `device`, MPI's on the CPU.
    """
    libraries = (world.backend, "mpi4py") if isinstance(world, HorovodWorld) else (world.backend,)
    share = seconds / (len(libraries) * len(sizes))
    for library, num_bytes in itertools.product(libraries, sizes):
        once = _operation(world, device, library, num_bytes)
        estimate = [slowest(world, once) for _ in range(_WARM_UP)][-1]
        repeats = max(_FEWEST, min(_MOST, int(share / estimate)))
        times = [slowest(world, once) for _ in range(repeats)]
        yield Sample(library, num_bytes, repeats, statistics.median(times), min(times), max(times))


def fits_of(samples: Sequence[Sample]) -> dict[str, AlphaBeta | None]:
    """Fit latency and bandwidth of each library; None where noise keeps the times from growing with the size."""
    fits: dict[str, AlphaBeta | None] = {}
    for library in dict.fromkeys(sample.library for sample in samples):
        mine = [sample for sample in samples if sample.library == library]
        try:
            fits[library] = fit_alpha_beta([s.num_bytes for s in mine], [s.median_s for s in mine])
        except NoFit:
            fits[library] = None
    return fits


def machine_of(name: str, setting: Setting, fits: Fits) -> Machine:
    """Return the machine with the measured network and no rates of computing. Raises NoFit where a fit is missing.

    Where gradients go over Horovod, a hop has MPI's latency (Horovod's where that is less, because it includes MPI's)
    and Horovod's bandwidth, which includes its copies. The overhead is what else Horovod adds to a message
    (negotiation), without the half cycle that a gradient waits on average: `overlap` simulates cycles. torch's latency
    is all a hop's.
    """
    carrier, mpi = next(iter(fits.values())), fits.get("mpi4py")
    if carrier is None or ("mpi4py" in fits and mpi is None):
        raise NoFit(
            f"{name}: no machine can be written, as the times do not grow with the message size; measure longer "
            "(--seconds), with larger messages (--max-bytes), or while nothing else runs"
        )
    latency_s = min(carrier.latency_s, mpi.latency_s if mpi is not None else math.inf)
    source = f"bench allreduce, {setting.ranks} ranks, {setting.ranks_per_host} a host"
    link = link_of(AlphaBeta(latency_s, carrier.bytes_per_second, 0.0), setting.ranks, source)
    on_cpu = setting.device == "cpu"
    # A rank wants two cores, one to compute on and one for MPI to wait on; else its backward pass shares one.
    shares_core = on_cpu and setting.cores < 2 * setting.ranks_per_host
    network = Network(
        intra=link,
        inter=link if setting.hosts > 1 else None,  # the slowest link decides, so nothing is known of those within
        algorithm="ring",
        blocking=on_cpu,
        core_share=0.5 if shares_core else 0.0,
    )
    if mpi is None:
        network = network.model_copy(update={"cycle_s": 1e-9})  # torch sends at once
    else:
        overhead_s = max(0.0, carrier.latency_s - latency_s - network.cycle_s / 2)
        network = network.model_copy(update={"overhead_s": overhead_s})
    about = str(setting).replace("\n", " ")
    return Machine(name=name, about=about, gpus_per_node=setting.ranks_per_host, network=network)


def allreduce_values(setting: Setting, samples: Sequence[Sample], fits: Fits) -> dict[str, Any]:
    """Return a measurement as a JSON object, with the bus bandwidth of each sample in bytes a second."""
    flags = {"hosts": setting.hosts, "oversubscribed": setting.oversubscribed, "busy": setting.busy}
    machine = {"processor": platform.machine(), "platform": platform.platform()}
    rows = [asdict(s) | {"bus_bandwidth": bus_bandwidth(setting.ranks, s.num_bytes, s.median_s)} for s in samples]
    lines = {name: None if fit is None else asdict(fit) for name, fit in fits.items()}
    return asdict(setting) | flags | machine | {"rows": rows, "fits": lines}


def slowest(world: World, once: Callable[[], object]) -> float:
    """Return the seconds of `once` on the slowest rank, on every rank. All begin together."""
    world.barrier()
    start = time.perf_counter()
    once()
    ranks = world.gather(time.perf_counter() - start)
    return world.broadcast(max(ranks or [0.0]))


def _operation(world: World, device: torch.device, library: str, num_bytes: int) -> Callable[[], None]:
    if library == "mpi4py" and isinstance(world, HorovodWorld):
        return partial(world.sum_by_mpi, torch.zeros(num_bytes // 4))
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> None:
        world.start_mean(tensor, f"bench.{num_bytes}")()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return once
