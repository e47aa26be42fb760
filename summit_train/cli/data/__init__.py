"""`summit-train data WHAT`: make, import, index and check data sets."""

from __future__ import annotations

import argparse
import errno

from summit_train.cli.data import manifests, packs
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (add_part_arguments, run_part, help_text) in (manifests.PARTS | packs.PARTS).items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_part_arguments(command)
        command.set_defaults(run_part=run_part)


def run(args: argparse.Namespace) -> Result:
    """Run the chosen part. Raises UserError for what cannot be done, RunFailed for a disk that is full or broken."""
    try:
        result: Result = args.run_part(args)
        return result
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise RunFailed(message) from error
        raise UserError(message) from error
