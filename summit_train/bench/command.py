"""`summit-train bench WHAT`: where the time goes on this machine, and the papers' measured tables and figures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from summit_train.bench import allreduce, figure3, find_lr, latency, loader, steps, weak
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


_STEP = (steps.add_arguments, steps.run, steps.as_text)
_LOADER = (loader.add_arguments, loader.run, loader.as_text)
_ALLREDUCE = (allreduce.add_arguments, allreduce.run, allreduce.as_text)
_LR = (find_lr.add_arguments, find_lr.run, find_lr.as_text, find_lr.draw)
_LATENCY = (latency.add_arguments, latency.run, latency.as_text, latency.draw)
_TABLE_1 = (figure3.add_table_1, figure3.run_table_1, figure3.table_1_text, figure3.draw_table_1)
_SCALING = (weak.run, weak.as_text, weak.draw)
_WAITS = (figure3.add_waits, figure3.run_waits, figure3.waits_text, figure3.draw_waits)
BENCHES = {
    "step": Bench("a training step by part, clips/s, utilisation, memory; one spec or two", *_STEP),
    "scaling": Bench("weak scaling here: percent of ideal, exposed allreduce", weak.add_arguments, *_SCALING),
    "loader": Bench("the loader: clips/s raw and packed; cores a rank needs", *_LOADER),
    "allreduce": Bench("an allreduce by size; a machine's file for simulate", *_ALLREDUCE),
    "lr": Bench("the loss against a growing LR; a base_lr for a small set", *_LR),
    "latency": Bench("latency and throughput of networks; tables of the TSM paper", *_LATENCY),
    "table1": Bench("the paper's Table 1: three networks, measured here", *_TABLE_1),
}
FIGURE_3 = {
    "a": Bench("computation: throughput and utilisation of a forward pass", *_TABLE_1),
    "b": Bench("data loading: the wait for data in a training step", *_WAITS),
    "c": Bench("networking: scalability against ranks", partial(weak.add_arguments, is_figure=True), *_SCALING),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    _add(commands, BENCHES, "")
    text = "the paper's Figure 3: a computation, b data loading, c networking"
    figure = commands.add_parser("fig3", help=text, description=text)
    _add(figure.add_subparsers(metavar="PANEL", required=True), FIGURE_3, "fig3")


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], benches: Mapping[str, Bench], of: str) -> None:
    for name, bench in benches.items():
        command = commands.add_parser(name, help=bench.help, description=bench.help)
        command.set_defaults(chosen=bench, bench=of + name)
        bench.add_arguments(command)
        if bench.draw is not None:
            command.add_argument("--out", metavar="FILE", help="draw it; the values go to FILE.json")
        command.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> Result:
    """Run the chosen bench. Raises UserError for an option that makes no sense."""
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
