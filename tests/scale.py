"""Rehearse a start on many ranks: all are forked from one process of this machine, and share torch's pages.

    python -m tests.scale                        16, 64, 128 and 256 ranks
    python -m tests.scale --ranks 16,32 --json

Each rank trains three steps of one virtual GPU of one clip. What it prints is of the first step: how long it took from
the fork, what a rank then has open, and what has gone through the sockets of rank 0. Seconds are those of ranks that
share this machine's cores: compare them with the processor seconds of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from summit_train.core.text import counted
from summit_train.training.step import TrainStep
from tests.worlds import forked, main_without_reports, succeed

SPEC: dict[str, Any] = {
    "name": "scale",
    "model": {"arch": "tsn", "backbone": "resnet18", "width": 0.0625, "num_classes": 4},
    "data": {
        "train": "train.csv", "val": "val.csv", "num_frames": 2, "frame_stride": 1, "short_side": [16, 16], "crop": 16,
        "flip": False, "workers": 0,
    },
    "schedule": {"epochs": 1, "warmup_epochs": 0},
    "evaluate": {"every_epochs": 0, "clips": 1, "short_side": 16},
    "checkpoint": {"every_epochs": 1},
    "watch": {"stall_seconds": 3600},
}  # fmt: skip
STEPS = 3
_ACKED, _RECEIVED = 120, 128  # offsets in Linux' struct tcp_info, of 8 bytes each


def traffic(descriptor: int) -> int:
    """The bytes that a TCP socket of this process has sent and received; 0 for other files."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return 0
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return sum(struct.unpack_from("=Q", info, offset)[0] for offset in (_ACKED, _RECEIVED))


def held() -> dict[str, Any]:
    """What this process has open and in memory of its own, and what its sockets have carried."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    sockets = [int(path.name) for path in files if os.readlink(path).startswith("socket:")]
    own = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private_Dirty" in line)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "files": len(files),
        "sockets": len(sockets),
        "traffic": sum(map(traffic, sockets)),
        "own_mb": int(own.split()[1]) / 1024,
        "processor_s": usage.ru_utime + usage.ru_stime,
    }


def rehearse(ranks: int, folder: Path) -> dict[str, Any]:
    """Train on `ranks` forked ranks; return the medians over the ranks at their first step, and rank 0's own."""
    succeed(
        0, "data", "motion", str(folder), "--train", str(ranks * STEPS), "--val", "4", "--size", "16", "--frames", "4"
    )
    spec = folder / "spec.yaml"
    data = SPEC["data"] | {"train": str(folder / "train.csv"), "val": str(folder / "val.csv")}
    scale = {"gpus": ranks, "clips_per_gpu": 1}
    spec.write_text(yaml.safe_dump(SPEC | {"run_dir": str(folder / "runs"), "scale": scale, "data": data}))
    began, honest = time.monotonic(), TrainStep.__call__

    def call(self: TrainStep, *arguments: Any, **options: Any) -> Any:
        result = honest(self, *arguments, **options)
        path = folder / f"{os.environ['RANK']}.json"
        if not path.exists():
            path.write_text(json.dumps(held() | {"seconds": time.monotonic() - began}))
        return result

    def work() -> int:
        TrainStep.__call__ = call  # type: ignore[method-assign]
        return main_without_reports(["train", str(spec)])

    status, output = forked(ranks, work)
    if status:
        sys.exit(f"{counted(ranks, 'rank')}: status {status}\n{output[-4000:]}")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    first = {f"rank0_{name}": found[0][name] for name in ("files", "sockets", "traffic")}
    return {"ranks": ranks, "seconds": max(one["seconds"] for one in found), **first} | {
        name: median(one[name] for one in found) for name in ("processor_s", "files", "sockets", "traffic", "own_mb")
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64,128,256", metavar="N,...")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(words)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row := rehearse(ranks, Path(folder)))
        if not args.json:
            if len(rows) == 1:
                print("ranks  seconds to   processor s  files   sockets  own MB  sent and received, MB     rank 0's")
                print("       first step   a rank       a rank  a rank   a rank  a rank      rank 0        files")
            print(
                f"{ranks:>5}  {row['seconds']:>10.1f}   {row['processor_s']:>11.1f}  {row['files']:>6.0f}  "
                f"{row['sockets']:>7.0f}  {row['own_mb']:>6.0f}  {row['traffic'] / 1e6:>10.2f}  "
                f"{row['rank0_traffic'] / 1e6:>10.2f}    {row['rank0_files']:>7}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
