"""`summit-train bench scaling SPEC --ranks 1,2`: weak scaling on this machine; it starts the ranks itself."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from summit_train.bench.commands import arguments
from summit_train.bench.commands.arguments import Values
from summit_train.bench.figures import draw_scalability
from summit_train.bench.measure import spread_text
from summit_train.bench.weak import measure_ranks, parse_ranks, weak_scaling
from summit_train.core.text import share, table
from summit_train.report.tables import machine_text
from summit_train.spec import Spec, load_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_spec(parser)
    add_scaling(parser)
    arguments.add_output(parser)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Add the options of weak scaling."""
    parser.add_argument("--ranks", default="1,2", metavar="N,...", help="numbers of ranks [1,2]")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank [1]")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    arguments.add_turns(parser, steps=5)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises UserError for a wrong spec or option, RanksError where ranks fail."""
    measure = partial(measure_networks, [args.spec], args.overrides, lambda spec: spec.name)
    return arguments.show(args, measure, as_text, draw_scalability)


def measure_networks(
    paths: Sequence[str], overrides: Sequence[str], label: Callable[[Spec], str], args: argparse.Namespace
) -> Values:
    """Measure each spec on each number of ranks. Mistakes are refused before anything is measured."""
    arguments.alone("this bench starts its ranks itself,")
    turns, ranks, specs, networks = arguments.turns_of(args), parse_ranks(args.ranks), {}, []
    for path, count in itertools.product(paths, ranks):
        specs[path] = load_spec(path, [*overrides, f"scale.gpus={count}"])
        arguments.experiment_of(specs[path], count, synthetic=args.synthetic)
    for path, spec in specs.items():
        words = [path, *overrides, "--peak", "0", "--repeats", "1", "--steps", str(turns.steps)]
        words += ["--warm-up", str(turns.warm_up), *["--synthetic"] * args.synthetic]
        tell = partial(print, f"{spec.name}:", file=sys.stderr, flush=True)
        found = weak_scaling(partial(measure_ranks, words, args.threads), ranks, turns.repeats, tell)
        networks.append({"label": label(spec), **found})
    first = networks[0]
    clips = "random clips" if args.synthetic else f"clips of {first['spec']['clips']}"
    settings = {"threads": args.threads, "clips_per_rank": first["spec"]["clips_per_gpu"], "clips": clips}
    about = {"bench": args.bench, "environment": first["environment"], "settings": asdict(turns) | settings}
    return about | {"networks": networks}


def as_text(values: Values) -> str:
    """Return the rows for people."""
    settings = values["settings"]
    batch = f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}"
    lines = [f"machine: {machine_text(values['environment'])}", f"{batch}; median (min .. max) of the rounds"]
    head = ("ranks", "clips/s", "% of ideal", "step s", "exposed allreduce s", "of the step", "compute, times")
    for network in values["networks"]:
        lines.append(f"\n{network['label']}:\n{table([head, *map(_cells, network['rows'])])}")
    lines.append(
        "\n% of ideal: speed over the first row's times the ranks. exposed allreduce: ranks wait for the sum, or for\n"
        "each other. compute: forward and backward pass over the first row's; above 1 ranks share memory or cores."
    )
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["ranks"]),
        spread_text(row["clips_per_second"]),
        spread_text(row["efficiency"], ".1f", 100),
        spread_text(row["step_s"]),
        spread_text(row["exposed_allreduce_s"]),
        share(row["exposed_share"]["median"]),
        spread_text(row["compute_ratio"]),
    ]
