"""`summit-train doctor`: what works on this machine and how to mend what does not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from summit_train.doctor import Check, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will be written [runs]")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each check [120]")


def run(args: argparse.Namespace) -> int:
    """Print the checks; return 0 when all that is needed works (warnings are allowed), else 1."""
    checks: list[Check] = []
    for check in examine(args.run_dir, args.timeout):
        checks.append(check)
        if not args.json:
            print(as_text(check), flush=True)  # each when it is done: the last ones take seconds
    if args.json:
        print(json.dumps({"ok": healthy(checks), "checks": [dataclasses.asdict(check) for check in checks]}))
    return 0 if healthy(checks) else 1


def healthy(checks: Iterable[Check]) -> bool:
    """Return whether nothing that is needed failed."""
    return all(check.status != "fail" for check in checks)


def as_text(check: Check) -> str:
    """Return a check for people: status, name, what was found and, below it, how to mend it."""
    line = f"{check.status:<5} {check.name:<19} {check.found}"
    return f"{line}\n{'':<25} -> {check.mend}" if check.mend else line
