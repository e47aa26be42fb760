"""`summit-train doctor`: what works on this machine and how to fix what does not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from summit_train.cluster.doctor import Check, examine


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
            fix = f"\n{'':<33} -> {check.mend}" if check.mend else ""
            # Each when it is done: the last ones take seconds.
            print(f"{check.status:<5} {check.name:<27} {check.found}{fix}", flush=True)
    is_healthy = all(check.status != "fail" for check in checks)
    if args.json:
        print(json.dumps({"ok": is_healthy, "checks": [dataclasses.asdict(check) for check in checks]}))
    return 0 if is_healthy else 1
