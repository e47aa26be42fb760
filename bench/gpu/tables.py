"""The papers' tables and figures by the product's own commands: Table 1, Figures 3a and 3b, the TSM paper's 5 and 6.

    python bench/gpu/tables.py --out tables.json                       figures: tables_table1.png, ..., beside it
    python bench/gpu/tables.py --out tables.json --device cpu --small  a rehearsal

Each command is a process of its own. Its figure and its JSON lie beside --out; the JSON is in --out too, with the text
that a person would have read. Table 1 and Figure 3a are one measurement: `table1` makes it in fp32 as the paper did,
with TF32 in convolutions as torch allows by default, `fig3 a` in bf16. Figure 3b is a projection unless --train and
--root name videos: the wait is computed from the frames that a loader gives in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import Outcome, fact, run_part

# docs/performance.md: one core decodes 33.6 clips of 8 frames a second from H.264 with distant key frames.
FRAMES_PER_CORE = 33.6 * 8
MOST_S = 60.0  # of one command
SMALL = ("model.width=0.125", "data.crop=32", "data.short_side=[32,40]")


@dataclass(frozen=True)
class Command:
    """A call of the product. rows: how many rows its JSON has; published: how many of them the paper measured."""

    name: str
    words: tuple[str, ...]
    rows: int
    published: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the time, and what Figure 3b loads."""
    parser.add_argument("--seconds", type=float, default=90.0, help="no command begins later than this [90]")
    parser.add_argument("--train", type=Path, metavar="CSV", help="manifest of videos for Figure 3b, with --root")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the videos of --train")
    parser.add_argument("--frames-per-second", type=float, help="of the loader, for Figure 3b without videos")


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Run the commands, one after the other."""
    ends = time.monotonic() + args.seconds
    outcome.values |= {"commands": {}, "skipped": {}, "small": args.small}
    for command in commands(args):
        left_s = ends - time.monotonic()
        if left_s < 1:
            outcome.values["skipped"][command.name] = f"the {args.seconds:g} s were over"
            continue
        print(f"{command.name} ({left_s:.0f} s left)", file=sys.stderr, flush=True)
        result = called(command, args.out, device, MOST_S if not args.small else 10 * MOST_S)
        outcome.values["commands"][command.name] = result
        outcome.add(fact(f"{command.name} gives its rows", complete(result, command), result["error"]))


def commands(args: argparse.Namespace) -> list[Command]:
    """Return the calls, Table 1 first. Their options make them end in 90 s on an H100."""
    small = list(SMALL) if args.small else []
    turns = ["--repeats", "1", "--steps", "1", "--warm-up", "1"] if args.small else ["--repeats", "5", "--steps", "5"]
    sizes = ["--batch", "2"] if args.small else []
    peak = ["--peak", "1e12"] if args.small else []
    paper = 0 if args.small else 3  # a narrow network stands beside none
    passes = ["--warm-up", "30", "--repeats", "100", "--seconds", "1"]
    if args.small:
        passes = ["--warm-up", "1", "--repeats", "1", "--seconds", "1", "--batch", "2"]
    return [
        Command("table1", ("table1", *small, *turns, *sizes, *peak), 3, paper),
        Command("fig3a", ("fig3", "a", *small, "precision=bf16", *turns, *sizes, *peak), 3, paper),
        Command("latency6", ("latency", "--table", "6", *small, *passes), 6, 6),
        Command("fig3b", ("fig3", "b", *small, "precision=bf16", *turns, *sizes, *loading(args)), 3, 0),
        Command("latency5", ("latency", "--table", "5", *small, *passes), 6, 6),
    ]


def loading(args: argparse.Namespace) -> list[str]:
    """Return the words that say what Figure 3b loads."""
    if args.train is not None and args.root is not None:
        return [f"data.train={args.train}", f"data.val={args.train}", f"data.root={args.root}"]
    cores = len(os.sched_getaffinity(0))
    rate = args.frames_per_second or max(1, cores - 1) * FRAMES_PER_CORE  # one core is the training process's
    return ["--frames-per-second", f"{rate:.0f}"]


def called(command: Command, out: Path, device: torch.device, most_s: float) -> dict[str, Any]:
    """Run a command; return its words, seconds, text and JSON values. error: what went wrong, or empty."""
    figure = out.with_name(f"{out.stem}_{command.name}.png")
    line = [sys.executable, "-m", "summit_train", "bench", *command.words, "--out", str(figure)]
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result: dict[str, Any] = {"words": list(command.words), "figure": figure.name, "text": "", "values": None}
    started = time.monotonic()
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=most_s, check=False)
    except subprocess.TimeoutExpired:
        return result | {"seconds": most_s, "error": f"it did not end within {most_s:g} s"}
    values, said = figure.with_suffix(".json"), done.stderr.strip().splitlines()
    result |= {"seconds": time.monotonic() - started, "text": done.stdout}
    if done.returncode != 0:
        return result | {"error": f"exit status {done.returncode}: {' / '.join(said[-3:])}"}
    return result | {"values": json.loads(values.read_text(encoding="utf-8")), "error": ""}


def complete(result: dict[str, Any], command: Command) -> bool:
    """Return whether a command ended well, with all rows, the published ones beside, and figures above 0."""
    if result["values"] is None:
        return False
    rows: Sequence[dict[str, Any]] = result["values"]["rows"]
    rates = [row["clips_per_second"] for row in rows]
    measured = [rate["median"] if isinstance(rate, dict) else rate for rate in rates if rate is not None]
    published = sum(row.get("published") is not None for row in rows)
    return len(rows) == command.rows and published == command.published and bool(measured) and min(measured) > 0


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
