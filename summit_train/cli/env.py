"""`summit-train env pack OUT`: this Python environment as one file that runs wherever it is unpacked."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.cluster.environment import environment_files, pack
from summit_train.core.files import check_output
from summit_train.core.progress import shown
from summit_train.core.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    what = "pack the interpreter, the packages and summit_train into one file, for a site's stage_environment"
    command = commands.add_parser("pack", help=what, description=what)
    command.add_argument("out", metavar="OUT", type=Path, help="the file, a tar")


def run(args: argparse.Namespace) -> Result:
    check_output("OUT", args.out, args.out)
    files = environment_files()
    with shown("MB packed", in_logs=True) as show:
        number = pack(files, args.out, lambda done, total: show(done >> 20, total >> 20))
    return Result([f"{args.out}: {number:,} files, {args.out.stat().st_size / 1e6:,.0f} MB"])
