"""`mpirun -np N summit-train bench allreduce SPEC`: what an allreduce costs over these ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from summit_train.bench import allreduce
from summit_train.bench.allreduce import Sample, Setting
from summit_train.bench.commands.arguments import add_spec
from summit_train.bench.figures import draw_messages, size_text
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.core.files import FIGURE_FORMATS, figure_path, write_text
from summit_train.core.session import session
from summit_train.core.text import table
from summit_train.models.network import count_network
from summit_train.scaling.cost import gradient_element_bytes
from summit_train.spec import load_spec
from summit_train.spec.source import to_yaml
from summit_train.training.start import choose_device

_MACHINE_HEADER = (
    "# Written by `summit-train bench allreduce --write`. It has no rates of computing: give --clips-per-second\n"
    "# to `simulate`, or add compute.rates.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_spec(parser)
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="about how long (default 30)")
    parser.add_argument("--max-bytes", type=int, default=2**26, metavar="N", help="largest message (default 64 MB)")
    parser.add_argument("--write", metavar="FILE.yaml", help="write this machine for `simulate --site FILE.yaml`")
    parser.add_argument("--out", metavar="FILE", help=f"draw it: {', '.join(FIGURE_FORMATS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints. Raises UserError for a wrong spec or option, or for one rank alone."""
    spec, launch = load_spec(args.spec, args.overrides), this_launch()
    out = None if args.out is None else figure_path(args.out)
    if args.max_bytes < 4096:
        raise UserError(f"--max-bytes {args.max_bytes}: 4096 or more is wanted")
    if args.write is not None and Path(args.write).suffix not in (".yaml", ".yml"):
        raise UserError(f"--write {args.write}: the name of a machine's file ends in .yaml")
    if launch.size == 1:
        raise UserError("one rank has nobody to talk to: mpirun -np N summit-train bench allreduce SPEC, N 2 or more")
    num_bytes = gradient_element_bytes(spec) * count_network(spec).parameters
    with session(launch) as world:
        device = choose_device(world)
        setting = allreduce.setting_of(world, device, spec.name, num_bytes)
        sizes = allreduce.message_sizes(args.max_bytes, num_bytes)
        samples = list(allreduce.measure(world, device, sizes, args.seconds))
    if launch.rank == 0:
        report(args, setting, samples, out)
    return 0


def report(args: argparse.Namespace, setting: Setting, samples: list[Sample], out: Path | None) -> None:
    """Show what was measured, then write the machine. Raises NoFit where the times give no machine."""
    fits = allreduce.fits_of(samples)
    values = allreduce.allreduce_values(setting, samples, fits)
    if out is not None:
        points = "Points: medians; bars: least and most of the repeats; lines: latency + size / bandwidth."
        draw_messages(out, values, f"{setting}\n{points}")
    print(json.dumps(values) if args.json else as_text(setting, values))
    # Last, as it can be refused: what was measured is shown all the same.
    if args.write is not None:
        machine = allreduce.machine_of(Path(args.write).stem, setting, fits)
        write_text(args.write, _MACHINE_HEADER + to_yaml(machine.model_dump(mode="json", exclude_defaults=True)))
    for path in () if args.json else filter(None, (args.write, out)):
        print(f"written: {path}")


def as_text(setting: Setting, values: dict[str, Any]) -> str:
    """Return the samples and the fits for people."""
    head = ("size", "by", "median ms", "least", "most", "repeats", "bus GB/s")
    lines = [str(setting), table([head, *map(_cells, values["rows"])], "", left=0)]
    return "\n".join([*lines, *(f"{library}: {_fit_text(fit)}" for library, fit in values["fits"].items())])


def _cells(row: dict[str, Any]) -> list[str]:
    times = (f"{1e3 * row[name]:.3f}" for name in ("median_s", "low_s", "high_s"))
    bandwidth = f"{row['bus_bandwidth'] / 1e9:.3f}"
    return [size_text(row["num_bytes"]), row["library"], *times, str(row["repeats"]), bandwidth]


def _fit_text(fit: dict[str, float] | None) -> str:
    if fit is None:
        return "no latency and bandwidth: the times do not grow with the size"
    return (
        f"{1e3 * fit['latency_s']:.3f} ms + size / {fit['bytes_per_second'] / 1e9:.3f} GB/s "
        f"(furthest point {100 * fit['worst_error']:.0f} % off)"
    )
