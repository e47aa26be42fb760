"""`mpirun -np N summit-train bench allreduce SPEC`: what an allreduce costs over these ranks."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from summit_train.comm import World, WorldError
from summit_train.commands.simulate import FORMATS, aligned, figure_path
from summit_train.commands.start import choose_device, session, this_launch
from summit_train.files import write_text
from summit_train.network import count_network
from summit_train.report.scaling import Messages, draw_messages, size_text
from summit_train.scaling.allreduce import LIBRARIES, Sample, fit_library, measure, message_sizes
from summit_train.scaling.cost import gradient_element_bytes
from summit_train.scaling.machines import Machine
from summit_train.scaling.network import AlphaBeta, NoFit, bus_bandwidth, cores_are_shared, measured_network
from summit_train.source import to_yaml
from summit_train.spec import load_spec


@dataclass(frozen=True)
class Setting:
    """Where it was measured. `oversubscribed`: more ranks than cores, so ranks also wait for a core."""

    ranks: int
    ranks_per_host: int
    cores: int
    load: float
    device: str
    spec: str
    gradient_bytes: int

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host

    @property
    def oversubscribed(self) -> bool:
        return self.device == "cpu" and self.ranks_per_host > self.cores

    @property
    def shared_cores(self) -> bool:
        """A rank's backward pass and its waiting MPI have one core together, or less."""
        return self.device == "cpu" and cores_are_shared(self.ranks_per_host, self.cores)

    @property
    def busy(self) -> bool:
        """Other work ran when the measurement began."""
        return self.load > 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec: the size of its gradients is measured too")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="about how long (default 30)")
    parser.add_argument(
        "--max-bytes", type=int, default=64 * 2**20, metavar="N", help="largest message (default 64 MB)"
    )
    parser.add_argument("--write", metavar="FILE.yaml", help="write this machine for `simulate --site FILE.yaml`")
    parser.add_argument("--out", metavar="FILE", help=f"draw it: {', '.join(FORMATS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints. Raises ValueError for a wrong spec or option, or for one rank alone."""
    spec, launch = load_spec(args.spec, args.overrides), this_launch()
    out = None if args.out is None else figure_path(args.out)
    if not 0 < args.seconds < float("inf") or args.max_bytes < 4096:
        raise WorldError(f"--seconds {args.seconds:g}, --max-bytes {args.max_bytes}: above 0, and 4096 or more")
    if args.write is not None and Path(args.write).suffix not in (".yaml", ".yml"):
        raise WorldError(f"--write {args.write}: the name of a machine's file ends in .yaml")
    if launch.size == 1:
        raise WorldError("one rank has nobody to talk to: mpirun -np N summit-train bench allreduce SPEC, N 2 or more")
    num_bytes = gradient_element_bytes(spec) * count_network(spec).parameters
    with session(launch) as world:
        load = os.getloadavg()[0]
        device = choose_device(world)
        sizes = sorted({*message_sizes(args.max_bytes), num_bytes})
        samples = list(measure(world, device, sizes, args.seconds))
        setting = _setting(world, load, device.type, spec.name, num_bytes)
    if launch.rank == 0:
        report(args, setting, samples, out)
    return 0


def _setting(world: World, load: float, device: str, spec: str, num_bytes: int) -> Setting:
    cores = len(os.sched_getaffinity(0))
    return Setting(world.size, world.local_size, cores, round(load, 2), device, spec, num_bytes)


def report(args: argparse.Namespace, setting: Setting, samples: list[Sample], out: Path | None) -> None:
    """Show what was measured, then write the machine. Raises NoFit where one was asked for and none can be had."""
    fits = fits_of(samples)
    if out is not None:
        _draw(out, setting, samples, fits)
    if args.json:
        print(json.dumps(_values(setting, samples, fits)))
    else:
        _print(setting, samples, fits)
    # Last, as it can be refused: what was measured is shown all the same.
    if args.write is not None:
        write_text(args.write, machine_text(Path(args.write).stem, setting, fits))
    if not args.json:
        for path in (args.write, out):
            if path is not None:
                print(f"written: {path}")


def fits_of(samples: Sequence[Sample]) -> dict[str, AlphaBeta | None]:
    """Latency and bandwidth by library; None where the points are no line, as noise can make them."""
    fits: dict[str, AlphaBeta | None] = {}
    for library in LIBRARIES:
        try:
            fits[library] = fit_library(samples, library)
        except NoFit:
            fits[library] = None
    return fits


def _print(setting: Setting, samples: list[Sample], fits: dict[str, AlphaBeta | None]) -> None:
    print(about(setting))
    print(
        aligned(
            [
                ("size", "by", "median ms", "least", "most", "repeats", "bus GB/s"),
                *(_cells(setting, s) for s in samples),
            ]
        )
    )
    for library, fit in fits.items():
        print(f"{library}: {_fit_text(fit)}")


def _fit_text(fit: AlphaBeta | None) -> str:
    if fit is None:
        return "no latency and bandwidth: the times do not grow with the size"
    return (
        f"{1e3 * fit.latency_s:.3f} ms + size / {fit.bytes_per_second / 1e9:.3f} GB/s "
        f"(furthest point {100 * fit.worst_error:.0f} % off)"
    )


def about(setting: Setting) -> str:
    """The machine and what is to be known before believing the numbers."""
    text = (
        f"{setting.ranks} ranks, {setting.ranks_per_host} a host, with {setting.cores} cores there; "
        f"tensors on the {setting.device}; gradients of {setting.spec}: {setting.gradient_bytes:,} bytes"
    )
    if setting.oversubscribed:
        text += "\nMore ranks than cores: the times hold waiting for a core, which no network would show."
    if setting.busy:
        text += f"\nOther work ran (load {setting.load}): the times are upper bounds."
    return text


def machine_text(name: str, setting: Setting, fits: dict[str, AlphaBeta | None]) -> str:
    """A machine's file with the network as measured. Rates of computing are another measurement.

    Raises NoFit where a library's times are no line.
    """
    horovod, mpi = fits["horovod"], fits["mpi4py"]
    if horovod is None or mpi is None:
        raise NoFit(
            f"{name}: no machine can be written, as the times do not grow with the message size; measure longer "
            "(--seconds), with larger messages (--max-bytes), or while nothing else runs"
        )
    network = measured_network(
        horovod,
        mpi,
        ranks=setting.ranks,
        hosts=setting.hosts,
        blocking=setting.device == "cpu",
        shared_cores=setting.shared_cores,
        source=f"bench allreduce, {setting.ranks} ranks, {setting.ranks_per_host} a host",
    )
    description = about(setting).replace("\n", " ")
    machine = Machine(name=name, about=description, gpus_per_node=setting.ranks_per_host, network=network)
    header = (
        "# Written by `summit-train bench allreduce --write`. It has no rates of computing: give --clips-per-second\n"
        "# to `simulate`, or add compute.rates.\n"
    )
    return header + to_yaml(machine.model_dump(mode="json", exclude_defaults=True))


def _values(setting: Setting, samples: list[Sample], fits: dict[str, AlphaBeta | None]) -> dict[str, Any]:
    flags = {"hosts": setting.hosts, "oversubscribed": setting.oversubscribed, "busy": setting.busy}
    rows = [asdict(s) | {"bus_bandwidth": bus_bandwidth(setting.ranks, s.num_bytes, s.median_s)} for s in samples]
    machine = {"processor": platform.machine(), "platform": platform.platform()}
    lines = {name: None if fit is None else asdict(fit) for name, fit in fits.items()}
    return asdict(setting) | flags | machine | {"rows": rows, "fits": lines}


def _cells(setting: Setting, sample: Sample) -> list[str]:
    times = (f"{1e3 * seconds:.3f}" for seconds in (sample.median_s, sample.low_s, sample.high_s))
    bandwidth = bus_bandwidth(setting.ranks, sample.num_bytes, sample.median_s)
    return [size_text(sample.num_bytes), sample.library, *times, str(sample.repeats), f"{bandwidth / 1e9:.3f}"]


def _draw(out: Path, setting: Setting, samples: list[Sample], fits: dict[str, AlphaBeta | None]) -> None:
    curves = []
    for library, fit in fits.items():
        mine = [sample for sample in samples if sample.library == library]
        sizes = [s.num_bytes for s in mine]
        curves.append(
            Messages(
                library,
                sizes,
                [s.median_s for s in mine],
                [s.low_s for s in mine],
                [s.high_s for s in mine],
                None if fit is None else [fit.latency_s + size / fit.bytes_per_second for size in sizes],
                [bus_bandwidth(setting.ranks, s.num_bytes, s.median_s) for s in mine],
            )
        )
    caption = (
        about(setting) + "\nPoints: medians; bars: least and most of the repeats; lines: latency + size / bandwidth."
    )
    draw_messages(out, curves, caption, (f"gradients of {setting.spec}", setting.gradient_bytes))
