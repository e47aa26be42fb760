"""How a script of this folder starts and ends: as a command of `summit-train` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from summit_train.__main__ import parse_arguments
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError, exit_status
from summit_train.core.files import check_output, figure_path
from summit_train.core.result import Result, show
from summit_train.core.session import report_failure


def checked_figure(text: str | None) -> Path | None:
    """Return the path of --out, if it is given. Raises UserError where no figure can be written there."""
    if text is None:
        return None
    path = figure_path(text)
    check_output("--out", path, path)
    return path


def run_script(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Result], argv: Sequence[str] | None = None
) -> int:
    """Parse, run and print, as JSON with --json. Return the exit status; a mistake or a failure is one line."""
    args = parse_arguments(parser, list(sys.argv[1:] if argv is None else argv))
    try:
        result = run(args)
    except (UserError, RunFailed) as error:
        report_failure(error, this_launch())
        return exit_status(error)
    show(result, as_json=args.json)
    return result.status
