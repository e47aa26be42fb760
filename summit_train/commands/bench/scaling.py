"""`summit-train bench scaling SPEC --ranks 1,2`: weak scaling on this machine; it starts the ranks itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from summit_train.commands.bench.arguments import REPEATS, WARM_UP, add_output, as_spread, machine_text, share, table
from summit_train.commands.bench.figures import figure_file, save_scalability
from summit_train.commands.bench.measuring import read_subject
from summit_train.commands.start import this_launch
from summit_train.processes import Facts
from summit_train.scaling.measure import MeasureError, positive
from summit_train.scaling.weak import Starts, measurements, parse_ranks, scaling_rows

STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML); scale.clips_per_gpu clips a rank")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")
    add_scaling(parser)
    add_output(parser)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """The options of weak scaling."""
    parser.add_argument("--ranks", default="1,2", metavar="N,...", help="numbers of ranks [1,2]")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank [1]")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"rounds over all [{REPEATS}]")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of one start [{STEPS}]")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N", help=f"steps not counted [{WARM_UP}]")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ValueError for a wrong spec or option, RanksError where ranks fail."""
    out = figure_file(args.out)
    name, network = measure_scaling(args.spec, args.overrides, args)
    values = {"bench": "scaling", **about(args, [network]), "networks": [{"label": name, **network}]}
    if out is not None:
        save_scalability(out, values)
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def measure_scaling(spec: str, overrides: Sequence[str], args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The spec's name, and one row for each number of ranks with what the starts gave."""
    if this_launch().size > 1:
        raise MeasureError(f"{this_launch().size} ranks were started: this bench starts its ranks itself, alone")
    for option in ("repeats", "steps", "warm_up", "threads"):
        positive(getattr(args, option), f"--{option.replace('_', '-')}")
    ranks = parse_ranks(args.ranks)
    for count in ranks:  # mistakes are found here, where they can be said in a line, and before anything is measured
        subject = read_subject(spec, [*overrides, f"scale.gpus={count}"], count, synthetic=args.synthetic)
    words = [spec, *overrides, "--peak", "0", "--repeats", "1"]
    words += ["--steps", str(args.steps), "--warm-up", str(args.warm_up), *["--synthetic"] * args.synthetic]
    found: dict[int, list[Facts]] = {count: [] for count in ranks}
    for count, facts in measurements(Starts(tuple(words), args.threads), ranks, args.repeats):
        found[count].append(facts)
        speed = facts["specs"][0]["clips_per_second"]["median"]
        done = f"round {len(found[count])} of {args.repeats}, {count} ranks: {speed:.3f} clips/s"
        print(f"{subject.spec.name}: {done}", file=sys.stderr, flush=True)
    last = found[max(ranks)][-1]
    return subject.spec.name, {
        "spec": last["specs"][0] | {"repeats_s": None},
        "environment": last["environment"],
        "rows": scaling_rows(found),
    }


def about(args: argparse.Namespace, networks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Machine and settings of a measurement of one or several networks."""
    settings = {name: getattr(args, name) for name in ("repeats", "steps", "warm_up", "threads")}
    settings["clips_per_rank"] = networks[0]["spec"]["clips_per_gpu"]
    settings["clips"] = "random clips" if args.synthetic else f"clips of {networks[0]['spec']['clips']}"
    return {"environment": networks[0]["environment"], "settings": settings}


def as_text(values: dict[str, Any]) -> str:
    """The rows for people."""
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
    percent = {name: 100 * part for name, part in row["efficiency"].items()}
    return [
        str(row["ranks"]),
        as_spread(row["clips_per_second"]),
        as_spread(percent, ".1f"),
        as_spread(row["step_s"]),
        as_spread(row["exposed_allreduce_s"]),
        share(row["exposed_share"]["median"]),
        as_spread(row["compute_ratio"]),
    ]
