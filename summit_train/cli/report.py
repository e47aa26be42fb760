"""`summit-train report`: a page of one run or of several, a page of all runs of a folder, files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import check_output
from summit_train.core.result import Result
from summit_train.core.text import counted
from summit_train.report.index import write_index
from summit_train.report.page import write_report
from summit_train.report.records import read_runs
from summit_train.report.sinks import SINKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="*", type=Path, metavar="RUN_DIR", help="run folder")
    page = "the page [report.html in the first RUN_DIR, or index.html in FOLDER]; with --to, a folder"
    parser.add_argument("--out", type=Path, metavar="PATH", help=page)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--index", type=Path, metavar="FOLDER", help="one page and one CSV of all runs below FOLDER")
    what.add_argument("--to", choices=SINKS, help="export the runs' curves and specs to another program, into --out")


def run(args: argparse.Namespace) -> Result:
    """Write what was asked for. Raises UserError for what is not a run or cannot be written."""
    if args.index and args.run_dir:
        raise UserError(f"--index must be used without RUN_DIR, got {args.run_dir[0]}")
    if not args.index and not args.run_dir:
        raise UserError("RUN_DIR is missing; give run folders, or --index FOLDER for all runs below a folder")
    if args.to and not args.out:
        raise UserError(f"--to {args.to} must be used with --out DIR, the folder to write to")
    if args.out:
        check_output("--out", args.out, args.out / "report.csv" if args.to else args.out)
    out = args.out or (args.index / "index.html" if args.index else args.run_dir[0] / "report.html")
    try:
        if args.index:
            return _index(args.index, out)
        if args.to:
            written = SINKS[args.to](read_runs(args.run_dir), out)
            return Result(written, values={"to": args.to, "written": written})
        page = str(write_report(args.run_dir, out))
        return Result([page], values={"page": page})
    except OSError as error:
        why = error.strerror or str(error)
        what = "DIR" if args.to else "FILE.html"
        raise UserError(f"{out}: cannot be written ({why}); try another place with --out {what}") from error


def _index(folder: Path, out: Path) -> Result:
    index = write_index(folder, out)
    values = index.values()
    csv = out.with_suffix(".csv")
    states = ", ".join(f"{count} {state}" for state, count in values["states"].items() if count)
    text = [f"{counted(len(index.rows), 'run')}: {states}", f"{out}, {csv}"]
    return Result(text, values=values | {"page": str(out), "csv": str(csv)})
