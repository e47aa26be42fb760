"""`summit-train bench step SPEC`: seconds of a training step by part, clips a second, utilisation, memory."""

from __future__ import annotations

import argparse
import json
from typing import Any

from summit_train.commands.bench.arguments import (
    add_peak,
    add_repeats,
    as_spread,
    check_peak,
    check_repeats,
    machine_text,
    share,
    table,
    with_unit,
)
from summit_train.commands.bench.measuring import measure_steps

_NAMES = {"data_wait": "data wait", "allreduce": "exposed allreduce"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, in both specs")
    parser.add_argument("--compare", metavar="SPEC2", help="measure both in turn and print SPEC over SPEC2")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    add_repeats(parser)
    add_peak(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a wrong spec or option."""
    check_repeats(args)
    check_peak(args)
    values = measure_steps([args.spec] if args.compare is None else [args.spec, args.compare], args)
    if values is not None:  # on rank 0
        print(json.dumps(values) if args.json else as_text(values))
    return 0


def as_text(values: dict[str, Any]) -> str:
    """What was measured, for people."""
    lines = [f"machine: {machine_text(values['environment'])}", *map(_spec_text, values["specs"]), ""]
    lines += [peak_text(peak) for peak in values["peaks"]]
    lines.append(f"peak memory: {with_unit(values['peak_memory_bytes'], 'B')}, {values['peak_memory_of']}")
    if values["ratios"] is not None:
        first, second = (spec["name"] for spec in values["specs"])
        rows = [(_NAMES.get(name, name), as_spread(ratio)) for name, ratio in values["ratios"].items()]
        pairs = values["settings"]["repeats"]
        lines.append(f"\nseconds of {first} over {second}, median (min .. max) of {pairs} pairs:\n{table(rows)}")
    return "\n".join(lines)


def _spec_text(values: dict[str, Any]) -> str:
    model = f"{values['arch']} {values['backbone']}, {values['frames']} x {values['crop']}^2, {values['precision']}"
    batch = f"{values['accumulation']} x {values['clips_per_gpu']} clips a step on each of {values['ranks']} ranks"
    clips = "RANDOM CLIPS, no loader" if values["synthetic"] else f"{values['clips']}, {values['workers']} workers"
    parts = [("step", as_spread(values["step_s"]) + " s", "")]
    for name, seconds in values["phases_s"].items():
        parts.append((f"  {_NAMES.get(name, name)}", as_spread(seconds) + " s", share(values["shares"][name])))
    return f"\n{values['name']}: {model}\n{batch}; {clips}\n{table(parts)}\n{table(_rates(values))}"


def _rates(values: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("clips/s", as_spread(values["clips_per_second"])),
        ("multiply-adds/s", as_spread(values["multiply_adds_per_second"], ".4g")),
    ]
    titles = {"mfu": "utilisation (MFU)", "forward_mfu": "  forward alone", "backward_mfu": "  backward alone"}
    for name, title in titles.items():
        if values[name] is not None:
            percent = {key: 100 * part for key, part in values[name].items()}
            rows.append((title, as_spread(percent, ".1f") + " %"))
    return [*rows, ("activations a rank", with_unit(values["activation_bytes"], "B"))]


def peak_text(peak: dict[str, Any]) -> str:
    """What the utilisation is measured against."""
    rate = f"peak of all ranks, {peak['precision']}: {with_unit(peak['multiply_adds_per_second'], 'multiply-adds/s')}"
    if peak["shape"] is None:
        return f"{rate}, given"
    shape = " x ".join(f"{side:,}" for side in peak["shape"])
    return f"{rate}, the best of {len(peak['tried'])} matrix products ({shape}), measured in this run"
