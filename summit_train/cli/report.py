"""`summit-train report`: one HTML page of one run or of several compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.result import Result
from summit_train.report.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="run folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="the page (default: report.html in the first RUN_DIR)"
    )


def run(args: argparse.Namespace) -> Result:
    """Write the page. Raises UserError for what is not a run or cannot be written."""
    out = args.out or args.run_dir[0] / "report.html"
    try:
        return Result([str(write_report(args.run_dir, out))])
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{out}: cannot be written ({why}); try another place with --out FILE.html") from error
