"""`summit-train bench table1`: the paper's Table 1 with this machine's throughput, the paper's values beside."""

from __future__ import annotations

import argparse
import json
from typing import Any

from summit_train.commands.bench.arguments import (
    add_output,
    add_peak,
    add_repeats,
    as_spread,
    check_peak,
    check_repeats,
    machine_text,
    table,
)
from summit_train.commands.bench.figures import figure_file, save_compute
from summit_train.commands.bench.networks import add_networks, measure_inference, read_networks
from summit_train.commands.bench.step import peak_text
from summit_train.report.tables import NONE

PAPERS_BATCH = 16  # section 3 a


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_networks(parser, PAPERS_BATCH, "clips of a forward pass")
    add_repeats(parser)
    add_peak(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a wrong spec or option."""
    values = measure(args, "table1")
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Check the options, measure, draw if asked to; the values."""
    check_repeats(args)
    check_peak(args)
    out = figure_file(args.out)
    subjects = read_networks(args)
    values: dict[str, Any] = {"bench": name} | measure_inference(subjects, args)
    if out is not None:
        save_compute(out, values)
    return values


def as_text(values: dict[str, Any]) -> str:
    """The table for people: here, and behind it the paper's value in brackets."""
    batch = values["settings"]["batch"]
    head = ("", "parameters", "multiply-adds", "input", "compute/IO", "clips/s", "utilisation", "times as fast")
    rows = [head, *map(_cells, values["rows"])]
    lines = [
        f"machine: {machine_text(values['environment'])}",
        f"forward pass of {batch} random clips; median of {values['settings']['repeats']} turns; in brackets the",
        "paper's Table 1 (one Tesla P100, 16 clips; its utilisation is in multiples of the slowest network's)\n",
        table(rows, ""),
        "\nspread (min .. max) of clips/s: "
        + "; ".join(f"{row['label']} {as_spread(row['clips_per_second'])}" for row in values["rows"]),
        *map(peak_text, values["peaks"]),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    paper = row["published"]
    use, times = row["utilisation"], row["relative_throughput"]["median"]
    relative = row["relative_utilisation"]["median"]
    percent = NONE if use is None else f"{100 * use['median']:.1f} %"
    return [
        row["label"],
        f"{row['parameters'] / 1e6:.1f} M" + _beside(paper, "parameters", 1e6, ".1f", " M"),
        f"{row['multiply_adds'] / 1e9:.1f} G" + _beside(paper, "multiply_adds", 1e9, ".0f", " G"),
        f"{row['frames']} x 3 x {row['crop']}^2",
        f"{row['compute_io'] / 1e3:.3g} k" + _beside(paper, "compute_io", 1e3, ".3g", " k"),
        f"{row['clips_per_second']['median']:.3g}" + _beside(paper, "clips_per_second", 1, ".1f", ""),
        f"{percent}, {relative:.2f} x" + _beside(paper, "utilisation", 1, ".1f", " x"),
        f"{times:.2f} x" + _times(paper),
    ]


def _beside(paper: dict[str, Any] | None, name: str, size: float, form: str, unit: str) -> str:
    return "" if paper is None else f" [{paper[name] / size:{form}}{unit}]"


def _times(paper: dict[str, Any] | None) -> str:
    return "" if paper is None else f" [{paper['relative_throughput']:.1f} x]"
