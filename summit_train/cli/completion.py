"""`summit-train completion`: the script by which a shell completes commands, options and files; written by shtab."""

from __future__ import annotations

import argparse

from summit_train.core.errors import UserError
from summit_train.core.result import Result

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="source the script, or put it where the shell looks for such")


def run(args: argparse.Namespace) -> Result:
    try:
        import shtab
    except ImportError as error:
        raise UserError("completion needs shtab; try pip install 'summit_train[completion]'") from error
    _complete_files(args.parser, shtab.FILE)
    return Result(shtab.complete(args.parser, args.shell).split("\n"))


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Let every argument that is neither a number nor one of some choices be completed as a file."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.nargs != 0 and action.choices is None and action.type not in (int, float):
            action.complete = files  # type: ignore[attr-defined]  # shtab's own attribute
