"""`summit-train bench WHAT`: where the time goes on this machine, and the paper's measured table and figures."""

from __future__ import annotations

import argparse

from summit_train.bench.commands import allreduce, compare, latency, loader, scaling, step
from summit_train.bench.measure import check_above_0

# WHAT -> (its arguments, its function, what it does)
_PARTS = {
    "step": (step.add_arguments, step.run, "a training step by part, clips/s, utilisation, memory; one spec or two"),
    "scaling": (scaling.add_arguments, scaling.run, "weak scaling here: percent of ideal, exposed allreduce"),
    "loader": (loader.add_arguments, loader.run, "the loader: clips/s raw and packed, by stage; cores a rank needs"),
    "allreduce": (allreduce.add_arguments, allreduce.run, "an allreduce by size; a machine's file for simulate"),
    "latency": (latency.add_arguments, latency.run, "latency and throughput of networks; tables of the TSM paper"),
    "table1": (compare.add_table_1, compare.run_inference, "the paper's Table 1: three networks, measured here"),
    "fig3": (compare.add_fig3, None, "the paper's Figure 3: a computation, b data loading, c networking"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benches, each with its arguments."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (add, run_part, help_text) in _PARTS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.set_defaults(run_part=run_part, bench=name)
        add(command)


def run(args: argparse.Namespace) -> int:
    """Run the chosen bench. Raises MeasureError for an option that makes no sense."""
    numbers = {name: value for name, value in vars(args).items() if type(value) in (int, float)}
    check_above_0({name: value for name, value in numbers.items() if (name, value) != ("peak", 0)})
    return int(args.run_part(args))
