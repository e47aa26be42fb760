"""`summit-train bench WHAT`: where the time goes on this machine, and the paper's measured table and figures."""

from __future__ import annotations

import argparse

from summit_train.commands.bench import allreduce, fig3, loader, scaling, step, table1

# WHAT -> (its module, what it does)
_PARTS = {
    "step": (step, "a training step by its parts, clips a second, utilisation, memory; one spec, or two in turn"),
    "scaling": (scaling, "weak scaling on this machine, ranks started by itself: percent of ideal, exposed allreduce"),
    "loader": (loader, "the data loader: clips/s raw and packed, where the time goes, cores that a GPU needs"),
    "allreduce": (allreduce, "what an allreduce costs over these ranks, by size; the machine's file for simulate"),
    "table1": (table1, "the paper's Table 1: three networks, their cost, throughput and utilisation here"),
    "fig3": (fig3, "the paper's Figure 3: a computation, b data loading, c networking"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (part, help_text) in _PARTS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        part.add_arguments(command)
        command.set_defaults(run_part=part.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen part."""
    return int(args.run_part(args))
