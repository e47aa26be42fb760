"""`summit-train bench WHAT`: where the time goes on this machine, and the paper's measured table and figures."""

from __future__ import annotations

import argparse

from summit_train.commands.bench import allreduce, step

# WHAT -> (its module, what it does)
_PARTS = {
    "step": (step, "a training step by its parts, clips a second, utilisation, memory; one spec, or two in turn"),
    "allreduce": (allreduce, "what an allreduce costs over these ranks, by size; the machine's file for simulate"),
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
