"""`summit-train model SPEC`: what the network of a spec costs (the paper's Tables 1 and 2)."""

from __future__ import annotations

import argparse

from summit_train.core.result import Result, TextTable
from summit_train.models.count import count_network, stream_elements
from summit_train.spec import load_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model.backbone=resnet18")


def run(args: argparse.Namespace) -> Result:
    spec = load_spec(args.spec, args.overrides)
    count = count_network(spec)
    cached = stream_elements(spec)
    frames, height, width = count.clip
    channels = count.input_bytes // (frames * height * width)
    rows = {
        "network": f"{spec.model.title}, {spec.model.num_classes} classes",
        "input": f"{frames} x {channels} x {height} x {width} ({count.input_bytes:,} bytes as uint8)",
        "parameters": f"{count.parameters:,}",
        "gradients": f"{count.gradient_bytes:,} bytes a step in fp32",
        "multiply-adds": f"{count.multiply_adds:,} ({count.multiply_adds / 1e9:.2f} G) a clip, forward",
        "compute/IO": f"{count.compute_io:,.0f} multiply-adds an input element",
        "T per stage": ", ".join(f"{stage} {length}" for stage, length in count.stages.items()),
    }
    if count.note:
        rows["network built"] = count.note
    if cached:
        size = f"{4 * cached:,} bytes ({4 * cached / 2**20:.2f} MiB) in fp32"
        rows["stream cache"] = f"{cached:,} elements, of the input of each shift: {size}"
    values = count.values() | ({} if cached is None else {"cache_elements": cached})
    return Result([TextTable(list(rows.items()), left=2)], values=values)
