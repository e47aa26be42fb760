"""`summit-train bench step SPEC`: seconds of a training step by part, clips a second, utilisation, memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from summit_train.bench.benches import measure_peaks, measure_steps
from summit_train.bench.commands import arguments
from summit_train.bench.commands.arguments import Values
from summit_train.bench.measure import Turns, spread_text
from summit_train.bench.steps import Experiment
from summit_train.core.comm.launch import this_launch
from summit_train.core.text import share, table, with_unit
from summit_train.core.watch import Watchdog
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec

_NAMES = {"data_wait": "data wait", "allreduce": "exposed allreduce"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_spec(parser, "spec keys to override, in both specs")
    parser.add_argument("--compare", metavar="SPEC2", help="measure both in turn and print SPEC over SPEC2")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    arguments.add_turns(parser)
    arguments.add_peak(parser)
    arguments.add_output(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises UserError for a wrong spec or option."""
    return arguments.show(args, _measure, as_text)


def _measure(args: argparse.Namespace) -> Values | None:
    turns, ranks = arguments.turns_of(args), this_launch().size
    paths = [args.spec] if args.compare is None else [args.spec, args.compare]
    specs = [load_spec(path, args.overrides) for path in paths]
    return measure([arguments.experiment_of(spec, ranks, synthetic=args.synthetic) for spec in specs], turns, args.peak)


def measure(experiments: Sequence[Experiment], turns: Turns, peak: float | None) -> Values | None:
    """Measure training steps on the ranks of this launch. Return the values on rank 0, None elsewhere."""
    with arguments.open_place() as place:
        peaks = measure_peaks([experiment.spec for experiment in experiments], peak, place)
        with Watchdog(place.world, experiments[0].spec.watch.stall_seconds) as watchdog:
            return measure_steps(experiments, turns, peaks, place, watchdog)


def as_text(values: Values) -> str:
    """Return what was measured, for people."""
    lines = [f"machine: {machine_text(values['environment'])}", *map(_spec_text, values["specs"]), ""]
    lines += [peak_text(peak) for peak in values["peaks"]]
    lines.append(f"peak memory: {with_unit(values['peak_memory_bytes'], 'B')}, {values['peak_memory_of']}")
    if values["ratios"] is not None:
        first, second = (spec["name"] for spec in values["specs"])
        rows = [(_NAMES.get(name, name), spread_text(ratio)) for name, ratio in values["ratios"].items()]
        pairs = values["settings"]["repeats"]
        lines.append(f"\nseconds of {first} over {second}, median (min .. max) of {pairs} pairs:\n{table(rows)}")
    return "\n".join(lines)


def _spec_text(values: Values) -> str:
    name = " ".join(filter(None, (values["arch"], values["backbone"])))
    model = f"{name}, {values['frames']} x {values['crop']}^2, {values['precision']}"
    batch = f"{values['accumulation']} x {values['clips_per_gpu']} clips a step on each of {values['ranks']} ranks"
    clips = "RANDOM CLIPS, no loader" if values["synthetic"] else f"{values['clips']}, {values['workers']} workers"
    parts = [("step", spread_text(values["step_s"]) + " s", "")]
    for name, seconds in values["phases_s"].items():
        parts.append((f"  {_NAMES.get(name, name)}", spread_text(seconds) + " s", share(values["shares"][name])))
    return f"\n{values['name']}: {model}\n{batch}; {clips}\n{table(parts)}\n{table(_rates(values))}"


def _rates(values: Values) -> list[tuple[str, str]]:
    rows = [
        ("clips/s", spread_text(values["clips_per_second"])),
        ("multiply-adds/s", spread_text(values["multiply_adds_per_second"], ".4g")),
    ]
    titles = {"mfu": "utilisation (MFU)", "forward_mfu": "  forward alone", "backward_mfu": "  backward alone"}
    for name, title in titles.items():
        if values[name] is not None:
            rows.append((title, spread_text(values[name], ".1f", 100) + " %"))
    return [*rows, ("activations a rank", with_unit(values["activation_bytes"], "B"))]


def peak_text(peak: dict[str, Any]) -> str:
    """Return what the utilisation is measured against."""
    rate = f"peak of all ranks, {peak['precision']}: {with_unit(peak['multiply_adds_per_second'], 'multiply-adds/s')}"
    if peak["shape"] is None:
        return f"{rate}, given"
    shape = " x ".join(f"{side:,}" for side in peak["shape"])
    return f"{rate}, the best of {len(peak['tried'])} matrix products ({shape}), measured in this run"
