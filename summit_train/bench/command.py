"""`summit-train bench WHAT`: where the time goes on this machine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from summit_train.bench import allreduce, find_lr, loader, steps, weak
from summit_train.bench.measure import Values
from summit_train.core.errors import UserError
from summit_train.core.files import check_output, figure_path, write_json
from summit_train.core.result import Result, show


@dataclass(frozen=True)
class Bench:
    """One bench. measure: returns None on ranks that have nothing to print."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Values | None]
    as_text: Callable[[Values], str]
    draw: Callable[[Path, Values], None] | None = None


BENCHES = {
    "step": Bench(
        "a training step by part, clips/s, utilisation, memory; one spec or two",
        steps.add_arguments,
        steps.run,
        steps.as_text,
    ),
    "scaling": Bench(
        "weak scaling here: percent of ideal, exposed allreduce", weak.add_arguments, weak.run, weak.as_text
    ),
    "loader": Bench(
        "the loader: clips/s raw and packed; cores a rank needs", loader.add_arguments, loader.run, loader.as_text
    ),
    "allreduce": Bench(
        "an allreduce by size; a machine's file for simulate", allreduce.add_arguments, allreduce.run, allreduce.as_text
    ),
    "lr": Bench(
        "the loss against a growing LR; a base_lr for a small set",
        find_lr.add_arguments,
        find_lr.run,
        find_lr.as_text,
        find_lr.draw,
    ),
}
# Former benches, with the script that measures the same.
MOVED = {"latency": "papers/latency.py", "table1": "papers/figure3.py table1", "fig3": "papers/figure3.py a|b|c"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, bench in BENCHES.items():
        add_bench(commands.add_parser(name, help=bench.help, description=bench.help), name, bench)
    for name in MOVED:
        # Without a prefix every word is positional, and none is refused before `run` says where the bench went.
        moved = commands.add_parser(name, add_help=False, prefix_chars="\0")
        moved.add_argument("words", nargs="*")
        moved.set_defaults(chosen=None, bench=name)


def add_bench(parser: argparse.ArgumentParser, name: str, bench: Bench) -> None:
    """Give a parser the options of a bench, for `run`."""
    parser.set_defaults(chosen=bench, bench=name)
    bench.add_arguments(parser)
    if bench.draw is not None:
        parser.add_argument("--out", metavar="FILE", help="draw it; the values go to FILE.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> Result:
    """Run the chosen bench. Raises UserError for an option that makes no sense."""
    if args.chosen is None:
        raise UserError(f"bench {args.bench} was removed; run `python {MOVED[args.bench]}` in a checkout")
    for name, value in vars(args).items():
        if type(value) in (int, float) and not 0 < value < math.inf and (name, value) != ("peak", 0):
            raise UserError(f"--{name.replace('_', '-')} must be above 0 and finite, got {value:g}")
    out = None if getattr(args, "out", None) is None else figure_path(args.out)
    for file in () if out is None else (out, out.with_suffix(".json")):
        check_output("--out", args.out, file)
    values = args.chosen.measure(args)
    return Result() if values is None else finish(args, args.chosen, {"bench": args.bench} | values, out)


def finish(args: argparse.Namespace, bench: Bench, values: Values, out: Path | None) -> Result:
    """Draw if asked to, with the values in FILE.json; write the machine of `allreduce`."""
    if bench.draw is not None and out is not None:
        bench.draw(out, values)
        write_json(out.with_suffix(".json"), values)
    result = Result(bench.as_text(values).split("\n"), values=values)
    if getattr(args, "write", None) is None:
        return result
    show(result, as_json=args.json)  # the file may be refused: what was measured is shown all the same
    allreduce.write_machine(args.write, values)
    return Result([f"written: {args.write}"])
