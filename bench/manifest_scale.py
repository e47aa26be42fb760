"""A manifest of ten million clips: how long it takes to open, what it costs each process, how long an epoch's order
takes. Run: python bench/manifest_scale.py [--rows N] [--processes P] [--folder DIR]

Memory is what the kernel counts (/proc/PID/smaps_rollup), after the imports and again after the work: Rss with all
mapped pages, Pss with shared ones divided by their users, Private what this process alone holds. Each process works as
one of 6,144 ranks does, and more: it looks up 200,000 clips at random and makes two epochs' orders.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.data.batches.order import Order
from summit_train.data.manifest import Manifest, read_manifest

VIRTUAL_GPUS, CLIPS_PER_GPU = 6144, 8


def main() -> None:
    """Write the manifest, read it in a fresh process and again in others, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = Path(folder) / "train.csv"
        write_seconds = _timed(lambda: _write(source, args.rows))[0]
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            first = pool.apply(_first, (source,))
        with context.Pool(args.processes, maxtasksperchild=1) as pool:
            later = pool.map(_later, [(source, seed) for seed in range(args.processes)], chunksize=1)
        written = {"csv_bytes": source.stat().st_size, "csv_write_s": round(write_seconds, 1)}
        processes = {"first_process": first, "later_processes": later}
        print(json.dumps({"rows": args.rows} | written | processes, indent=1))


def _write(path: Path, rows: int) -> None:
    with open(path, "w") as file:
        file.write("path,label,num_frames,reversed\n")
        for start in range(0, rows, 100_000):
            file.writelines(
                f"class_{i % 400:03}/{i:011x}_000{i % 300:03}_000{i % 300 + 10:03}.mp4,{i % 400},{250 + i % 51},0\n"
                for i in range(start, min(rows, start + 100_000))
            )


def _first(source: Path) -> dict[str, Any]:
    before, processor = _memory(), time.process_time()
    seconds, manifest = _timed(lambda: read_manifest(source))
    cpu = round(time.process_time() - processor, 2)
    return {"read_s": seconds, "read_cpu_s": cpu, "clips": len(manifest), "memory_mb": _grown(before)}


def _later(task: tuple[Path, int]) -> dict[str, Any]:
    source, seed = task
    before = _memory()
    read_s, manifest = _timed(lambda: read_manifest(source))
    seconds = {
        "read_s": read_s,
        "fingerprint_s": _timed(manifest.fingerprint)[0],
        "check_labels_s": _timed(lambda: manifest.check_labels(400))[0],
        "lookups_200000_s": _timed(lambda: _look_up(manifest, seed))[0],
    }
    order_s, order_cpu_s = _epochs(manifest, rank=seed)
    order = {"order_s": order_s, "order_cpu_s": order_cpu_s}
    return seconds | order | {"pickled_bytes": len(pickle.dumps(manifest)), "memory_mb": _grown(before)}


def _look_up(manifest: Manifest, seed: int) -> None:
    for clip in np.random.default_rng(seed).integers(0, len(manifest), 200_000).tolist():
        assert manifest.path(clip).endswith(".mp4")
        assert manifest.label(clip) < 400
        assert manifest.num_frames(clip) is not None
        assert not manifest.is_reversed(clip)


def _epochs(manifest: Manifest, rank: int) -> tuple[list[float], list[float]]:
    """Return wall and CPU seconds until the first micro-batch of each of two epochs."""
    steps = len(manifest) // (VIRTUAL_GPUS * CLIPS_PER_GPU)
    order = Order(len(manifest), 0, VIRTUAL_GPUS, CLIPS_PER_GPU, steps)
    keys = order.micro_batches(rank, VIRTUAL_GPUS, range(2 * steps))
    clock, processor = [], []
    for _ in range(2):
        cpu = time.process_time()
        seconds, _ = _timed(lambda: next(keys))
        clock.append(seconds)
        processor.append(round(time.process_time() - cpu, 3))
        for _ in range(steps - 1):
            next(keys)
    return clock, processor


def _timed(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return round(time.perf_counter() - began, 4), result


def _memory() -> dict[str, float]:
    kilobytes: dict[str, float] = {"Rss": 0, "Pss": 0, "Private": 0}
    for line in Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()[1:]:
        name, number, *_ = line.replace(":", " ").split()
        for wanted in kilobytes:
            if name in (wanted, f"{wanted}_Clean", f"{wanted}_Dirty"):
                kilobytes[wanted] += int(number)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return kilobytes | {"Peak": int(peak.split()[1])}


def _grown(before: dict[str, float]) -> dict[str, float]:
    now = _memory()
    grown = {name.lower(): round((now[name] - before[name]) / 1024, 1) for name in ("Rss", "Pss", "Private")}
    return grown | {"peak": round((now["Peak"] - before["Rss"]) / 1024, 1)}


if __name__ == "__main__":
    main()
