"""What an epoch sends, and how long that takes: synchronous training against model averaging, on a slow cable.

    python bench/veth_epochs.py                       100 Mbit/s, a few minutes, as root, on an idle machine
    python bench/veth_epochs.py --rate 50 --json      another rate in Mbit/s

Two ranks in two network namespaces (bench/veth.py) train the demo's TSM with two virtual GPUs. Bytes are counted at the
cable: those of a long run less those of one of a single epoch, so that start and end cancel out. Seconds of
communication are those of an epoch on the slow cable beyond those of the same epoch on the unlimited one; the first
epoch of each run is left out. Where namespaces are not allowed it says why and ends with status 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from veth import limit, namespaces, on_both, why_not

from summit_train.core.text import text_table
from summit_train.data.motion import MotionSet, write_motion_set

METHODS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "averaging, period 4": ("parallel.method=averaging", "parallel.period=4"),
    "averaging, period epoch": ("parallel.method=averaging", "parallel.period=epoch"),
}
CLIPS = 256
SPEC = ("configs/motion/tsm.yaml", "scale.gpus=2", "schedule.warmup_epochs=0", "data.workers=0")
Names = tuple[str, str]


def main() -> int:
    """Make the videos and the namespaces, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, metavar="MBIT", help="of the cable, Mbit/s [100]")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="of a long run [3]")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    if args.rate < 1 or args.epochs < 2:
        parser.error("a rate of 1 Mbit/s and 2 epochs are the least")
    if (why := why_not()) is not None:
        print(json.dumps({"skipped": why}) if args.json else f"skipped: {why}")
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, namespaces() as names:
        list(write_motion_set(folder, CLIPS, 16, MotionSet()))
        rows = [measured(names, method, args, Path(folder)) for method in METHODS]
    if args.json:
        print(json.dumps({"rate_mbit": args.rate, "clips": CLIPS, "load": load, "rows": rows}))
    else:
        print(f"two ranks, one thread each, {CLIPS} clips an epoch, {args.rate} Mbit/s; load before: {load:.2f}")
        print(text_table([as_cells(row) for row in rows]))
    return 0


def measured(names: Names, method: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one method thrice: long on the slow cable, long and short on the unlimited one."""
    slow, slow_bytes = trained(names, method, args.rate, args.epochs, folder)
    fast, _ = trained(names, method, 0, args.epochs, folder)
    _, once_bytes = trained(names, method, 0, 1, folder)
    return {
        "method": method,
        "bytes_per_epoch": (slow_bytes - once_bytes) / (args.epochs - 1),
        "epoch_s": fmean(slow),
        "unlimited_epoch_s": fmean(fast),
        "communication_s": fmean(slow) - fmean(fast),
    }


def trained(names: Names, method: str, mbit: int, epochs: int, folder: Path) -> tuple[list[float], int]:
    """Train; return the seconds of each epoch, without the first of several, and the bytes that both ends sent."""
    limit(names, mbit)
    before = sent(names)
    run = f"{method.replace(', ', '_').replace(' ', '_')}_{mbit}_{epochs}"
    print(f"{run} ...", file=sys.stderr, flush=True)
    words = [*SPEC, *METHODS[method], f"name={run}", f"run_dir={folder}", f"schedule.epochs={epochs}"]
    words += [f"data.{which}={folder}/{which}.csv" for which in ("train", "val")]
    on_both(names, ["-m", "summit_train", "train", *words, f"evaluate.every_epochs={epochs}"])
    return seconds_of_epochs(folder / run)[epochs > 1 :], sent(names) - before


def seconds_of_epochs(run: Path) -> list[float]:
    """Return the seconds of each epoch's steps, averages of the networks included, from the run's metrics."""
    seconds: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            seconds[record["epoch"]] = seconds.get(record["epoch"], 0.0) + record["step_s"]
    return [seconds[epoch] for epoch in sorted(seconds)]


def sent(names: Names) -> int:
    """Return the bytes that both ends of the cable have sent so far."""
    command = "cat /sys/class/net/veth0/statistics/tx_bytes"
    return sum(int(subprocess.check_output(["ip", "netns", "exec", name, *command.split()])) for name in names)


def as_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return one row of the table."""
    return {
        "method": row["method"],
        "MB sent an epoch, both ranks": f"{row['bytes_per_epoch'] / 1e6:.2f}",
        "epoch s": f"{row['epoch_s']:.2f}",
        "unlimited": f"{row['unlimited_epoch_s']:.2f}",
        "communication s": f"{row['communication_s']:.2f}",
    }


if __name__ == "__main__":
    sys.exit(main())
