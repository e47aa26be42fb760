"""`summit-train bench step SPEC`: seconds of a training step by part, clips a second, utilisation, memory."""

from __future__ import annotations

import argparse
import json
from typing import Any

from summit_train.commands.bench.arguments import add_repeats, as_spread, machine_text, share, with_unit
from summit_train.report.tables import aligned
from summit_train.scaling.measure import MeasureError, positive

_NAMES = {"data_wait": "data wait", "allreduce": "exposed allreduce"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, in both specs")
    parser.add_argument("--compare", metavar="SPEC2", help="measure both in turn and print SPEC over SPEC2")
    parser.add_argument("--synthetic", action="store_true", help="random clips instead of those of data.train")
    add_repeats(parser)
    parser.add_argument("--peak", type=float, metavar="X", help="multiply-adds/s of a rank at best; 0: no utilisation")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a wrong spec or option."""
    for option in ("repeats", "steps", "warm_up"):
        positive(getattr(args, option), f"--{option.replace('_', '-')}")
    if args.peak is not None and not 0 <= args.peak < float("inf"):
        raise MeasureError(f"--peak {args.peak:g}: multiply-adds a second, or 0 for no utilisation")
    # Here and not above: the help must not wait for torch.
    from summit_train.commands.bench.measuring import measure_steps

    values = measure_steps(args)
    if values is not None:  # on rank 0
        print(json.dumps(values) if args.json else as_text(values))
    return 0


def as_text(values: dict[str, Any]) -> str:
    """What was measured, for people."""
    lines = [f"machine: {machine_text(values['environment'])}", *map(_spec_text, values["specs"])]
    if values["peak"] is not None:
        lines.append(_peak_text(values["peak"]))
    lines.append(f"peak memory: {with_unit(values['peak_memory_bytes'], 'B')}, {values['peak_memory_of']}")
    if values["ratios"] is not None:
        first, second = (spec["name"] for spec in values["specs"])
        pairs = values["settings"]["repeats"]
        rows = [(_NAMES.get(name, name), as_spread(ratio, ".3f")) for name, ratio in values["ratios"].items()]
        lines.append(f"{first} over {second}, median (min .. max) of {pairs} pairs of seconds:\n{_indented(rows)}")
    return "\n".join(lines)


def _spec_text(values: dict[str, Any]) -> str:
    model, clip = f"{values['arch']} {values['backbone']}", f"{values['frames']} x {values['crop']}^2"
    batch = f"{values['accumulation']} x {values['clips_per_gpu']} clips a rank and step on {values['ranks']} ranks"
    clips = "RANDOM CLIPS" if values["synthetic"] else f"clips of {values['clips']}"
    rows = [("step", as_spread(values["step_s"]) + " s", "100.0 %")]
    for name, seconds in values["phases_s"].items():
        rows.append((f"  {_NAMES.get(name, name)}", as_spread(seconds) + " s", share(values["shares"][name])))
    rates = [
        ("clips/s", as_spread(values["clips_per_second"])),
        ("multiply-adds/s", as_spread(values["multiply_adds_per_second"], ".4g")),
    ]
    for name in ("mfu", "forward_mfu", "backward_mfu"):
        if values[name] is not None:
            percents = {key: 100 * part for key, part in values[name].items()}
            title = {"mfu": "utilisation (MFU)", "forward_mfu": "  forward", "backward_mfu": "  backward"}[name]
            rates.append((title, as_spread(percents, ".1f") + " %"))
    rates.append(("activations", with_unit(values["activation_bytes"], "B") + " a rank, kept for the backward pass"))
    head = f"\n{values['name']}: {model}, {clip}, {values['precision']}; {batch}; {clips}"
    return f"{head}\nseconds, median (min .. max):\n{_indented(rows)}\n{_indented(rates)}"


def _peak_text(peak: dict[str, Any]) -> str:
    rate = with_unit(peak["multiply_adds_per_second"], "multiply-adds/s")
    if peak["shape"] is None:
        return f"peak of all ranks: {rate} (given)"
    shape = " x ".join(f"{side:,}" for side in peak["shape"])
    tried = f"the best of {peak['tried']} matrix products, {shape} in {peak['precision']}"
    return f"peak of all ranks: {rate}; {tried}, {peak['threads']} threads a rank"


def _indented(rows: list[Any]) -> str:
    return "\n".join("  " + line for line in aligned(rows, "<" + ">" * (len(rows[0]) - 1)).splitlines())
