"""What a part of bench/gpu.sh says when it ends: checks with their bounds, and figures, as one JSON file.

Each part is a program of its own: `python bench/gpu/PART.py --out PART.json [--device cuda] [--small]`. `--device cpu
--small` rehearses it on a machine without a GPU: the same code on tiny networks.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Check:
    """One thing that was checked: a value that must not exceed its bound, or a fact that must hold.

    A NaN never passes. `wanted`: a goal of speed, whose miss is reported and fails nothing.
    """

    name: str
    value: float
    bound: float
    at_least: bool = False
    wanted: bool = False
    note: str = ""

    @property
    def passes(self) -> bool:
        """Return whether the value keeps to its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """Return the check as a JSON object; JSON has no NaN or infinity, so null stands for them."""
        value = self.value if math.isfinite(self.value) else None
        return asdict(self) | {"value": value, "passes": self.passes}

    def as_text(self) -> str:
        """Return the check as one line for people."""
        sign = ">=" if self.at_least else "<="
        said = "ok" if self.passes else "MISSED" if self.wanted else "FAILED"
        return f"{said}: {self.name}: {self.value:.4g} (wanted {sign} {self.bound:.4g}){self.note and '; ' + self.note}"


def fact(name: str, holds: bool, note: str = "") -> Check:
    """Return the check of a fact: 1 where it holds, else 0, which fails."""
    return Check(name, float(holds), 1.0, at_least=True, note=note)


@dataclass
class Outcome:
    """The checks and values of one part. values: JSON objects by name, such as the rows of a table."""

    checks: list[Check] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, check: Check) -> None:
        """Take a check in, and tell it at once: a part that is stopped at its limit has said what it knew."""
        self.checks.append(check)
        print(check.as_text(), file=sys.stderr, flush=True)

    @property
    def passes(self) -> bool:
        """Return whether every check passes that is not only wanted."""
        return all(check.passes or check.wanted for check in self.checks)


def free(device: torch.device) -> None:
    """Return the memory of what is gone to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


Part = Callable[[argparse.Namespace, torch.device, Outcome], None]


def run_part(
    description: str | None, part: Part, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
) -> int:
    """Run one part as a program: read the arguments, run it, write --out; exit status 1 where a check fails.

    The file is also written where the part raises, with the checks that it came to.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny networks, few repeats: to rehearse the code")
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse_args()
    outcome = Outcome()
    try:
        part(args, torch.device("cuda:0" if args.device == "cuda" else "cpu"), outcome)
    finally:
        values = {"checks": [check.as_json() for check in outcome.checks], **outcome.values}
        args.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 0 if outcome.passes else 1
