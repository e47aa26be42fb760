"""`summit-train completion`: the script by which a shell completes commands, options and files; written by shtab."""

from __future__ import annotations

import argparse

from summit_train.core.errors import UserError
from summit_train.core.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


def run(args: argparse.Namespace) -> Result:
    try:
        import shtab
    except ImportError as error:
        raise UserError("completion needs shtab; try pip install 'summit_train[completion]'") from error
    parsers = [args.parser]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.nargs != 0 and action.choices is None and action.type not in (int, float):
                action.complete = shtab.FILE
    return Result(shtab.complete(args.parser, args.shell).splitlines())
