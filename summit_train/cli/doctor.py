"""`summit-train doctor`: what works on this machine and how to fix what does not."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from summit_train.cluster.doctor import Check, examine
from summit_train.core.result import Result, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will be written [runs]")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each check [120]")


def run(args: argparse.Namespace) -> Result:
    """Show each check when it is done, as the last ones take seconds. The status is 1 if one failed."""
    checks: list[Check] = []
    for check in examine(args.run_dir, args.timeout):
        checks.append(check)
        fix = f"\n{'':<33} -> {check.mend}" if check.mend else ""
        show(Result([f"{check.status:<5} {check.name:<27} {check.found}{fix}"]), as_json=args.json)
    is_healthy = all(check.status != "fail" for check in checks)
    values = {"ok": is_healthy, "checks": [dataclasses.asdict(check) for check in checks]}
    return Result(values=values, status=0 if is_healthy else 1)
