"""Measure what grows with what on this machine: the tables of docs/results.md.

    python -m tests.scale                          a start on 16, 64, 128 and 256 ranks
    python -m tests.scale accumulation 4,64        a rank that computes for this many virtual GPUs
    python -m tests.scale films 10,600,3600        clips of films of this many seconds
    python -m tests.scale lists 100000,1000000     `plan` with lists of this many rows
    python -m tests.scale imports 16               a start from an environment on a slow file system, and from a copy
    python -m tests.scale ranks 16,32 --json

ranks: all are forked from one process, and share torch's pages. Each trains three steps of one virtual GPU of one clip.
What is printed is of the first step: how long it took from the fork, what a rank then has open, and what has gone
through the sockets of rank 0. Seconds are those of ranks that share this machine's cores: compare them with the
processor seconds of a rank.

imports: each rank is a process of its own, and each of its calls for a file of the environment takes 1 ms longer. A
copy is made as job scripts do it, of a packed file.

accumulation: one clip of 32 x 32 pixels a virtual GPU, two loader workers, `ulimit -n 256`. films: spans of 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from summit_train.cluster.environment import environment_files, pack
from summit_train.core.files import file_sha256
from summit_train.core.text import counted
from summit_train.data.batches.order import Order
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.motion import FPS, MotionSet
from summit_train.data.video.encode import Encoding, open_writer
from summit_train.data.video.span import Span
from summit_train.spec import load_spec
from summit_train.training.step import TrainStep
from summit_train.training.vote import NO_REQUESTS, Requests, StepResult
from tests.slow_files import SlowFiles
from tests.worlds import ROOT, environment, forked, main_without_reports, start, succeed

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


def write_spec(folder: Path, gpus: int, **data: Any) -> str:
    """Write a spec for the lists in `folder`; return its path."""
    lists = {name: str(folder / f"{name}.csv") for name in ("train", "val")}
    scale = {"gpus": gpus, "clips_per_gpu": 1}
    spec = SPEC | {"run_dir": str(folder / "runs"), "scale": scale, "data": SPEC["data"] | lists | data}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return str(folder / "spec.yaml")


def make_set(folder: Path, videos: int, side: int) -> None:
    """Write a set of this many training videos of four frames."""
    sizes = ("--train", str(videos), "--val", "4", "--size", str(side), "--frames", "4")
    succeed(0, "data", "motion", str(folder), *sizes)


def used_by(*words: str) -> dict[str, float]:
    """Run `summit-train ...` in a process of its own; return its processor seconds and the peak of its memory."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = start(0, "-m", "summit_train", *words, output=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if status:
            sys.exit(f"{' '.join(words)}: status {process.returncode}\n{output.read()[-4000:]}")
    return {"processor, s": usage.ru_utime + usage.ru_stime, "peak, MB": round(usage.ru_maxrss * 1024 / 1e6)}


def rehearse_accumulation(gpus: int, folder: Path) -> dict[str, Any]:
    """Train `gpus` virtual GPUs on one rank and on two: memory, the wait for data, and how the losses differ."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    steps = max(2, 128 // gpus)
    make_set(folder, gpus * steps, 32)
    spec = write_spec(folder, gpus, short_side=[32, 32], crop=32, workers=2)
    used = used_by("train", spec, "name=one")
    used_by("train", spec, "name=two", "--ranks", "2")
    one, two = (
        [step for step in map(json.loads, (folder / f"runs/{name}/metrics.jsonl").open()) if "step_s" in step]
        for name in ("one", "two")
    )
    waits, seconds = ([step[key] for step in one] for key in ("data_wait_s", "step_s"))
    losses = [abs(step["loss"] / other["loss"] - 1) for step, other in zip(one, two, strict=True)]
    return {
        "`scale.gpus` on one rank": gpus,
        "steps": steps,
        "peak, MB": used["peak, MB"],
        "step, s": median(seconds),
        "of it wait for data": f"{sum(waits) / sum(seconds):.0%}",
        "first loss against that of two ranks": losses[0],
        "last": losses[-1],
    }


def rehearse_film(seconds: int, folder: Path, side: int = 240, span: int = 10, clips: int = 9) -> dict[str, Any]:
    """Read training clips of spans of a film: processor seconds of the first, which indexes it, and of the others."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    frames, _ = MotionSet(size=side, num_frames=4 * FPS).video("train", 0)
    film, length = folder / "film.mp4", seconds * FPS
    with open_writer(film, (side, side), FPS, Encoding(quality=20, key_every=250)) as write:
        for number in range(length):
            write(frames[number % len(frames)], number)
    starts = [(length - span * FPS) * number // clips for number in range(clips)]
    of_all = {"num_frames": length, "sha256": file_sha256(film)}
    write_manifest(folder / "train.csv", [
        ManifestRow(film.name, label % 4, **of_all, span=Span(begin, begin + span * FPS))  # type: ignore[arg-type]
        for label, begin in enumerate(starts)
    ])  # fmt: skip
    data = Dataset.open(load_spec(write_spec(folder, 1, num_frames=8, frame_stride=16)), "train")
    times = [time.process_time()]
    with data.training_batches(Order(clips, 0, 1, 1, clips), 0, 1, range(clips)) as batches:
        for _ in batches:
            times.append(time.process_time())
    first, *others = (end - begin for begin, end in pairwise(times))
    rate = film.stat().st_size * 8 / seconds / 1e6
    return {"film, s": seconds, "Mbit/s": rate, "a clip, processor s": median(others), "first": first}


def rehearse_list(rows: int, folder: Path) -> dict[str, Any]:
    """Plan a run with a training list of `rows` rows."""
    make_set(folder, 4, 16)
    with (folder / "train.csv").open("w") as file:
        file.write("path,label\n")
        file.writelines(f"videos/a_video_with_a_longer_name_{row:08d}.mp4,{row % 4}\n" for row in range(rows))
    return {"rows": rows} | used_by("plan", write_spec(folder, 4))


def rehearse_imports(ranks: int, folder: Path) -> dict[str, Any]:
    """Start ranks from an environment whose file calls each take 1 ms, and from a copy: seconds to the first step."""
    make_set(folder, ranks * STEPS, 16)
    write_spec(folder, ranks)
    began = time.monotonic()
    pack(environment_files(), folder / "environment.tar", lambda done, total: None)
    packed = time.monotonic()
    copy = folder / "copy"
    copy.mkdir()
    subprocess.run(["tar", "-xf", "../environment.tar"], cwd=copy, check=True)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=copy, check=True)
    (copy / "pyvenv.cfg").write_text((copy / "pyvenv.cfg").read_text().replace("@HERE@", str(copy)))
    row = {"ranks": ranks, "packing, s": packed - began, "copying, s": time.monotonic() - packed}
    clean = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    starts = {
        "shared": (sys.executable, {"PYTHONPATH": str(ROOT)}),
        "copy": (copy / "bin/python", {"PYTHONSAFEPATH": "1"}),
    }
    for name, (python, own) in starts.items():
        slow = SlowFiles(folder, {sys.prefix, sys.base_prefix, str(ROOT)}, delay_us=1000)
        words = ["-m", "summit_train", "train", "spec.yaml", f"name={name}", "--ranks", str(ranks)]
        environ = clean | own | slow.environ | {"SUMMIT_TRAIN_COMM": "torch"}
        began, log = time.time(), folder / f"runs/{name}/metrics.jsonl"
        with subprocess.Popen([python, *words], cwd=folder, env=environ, stdout=subprocess.DEVNULL) as process:
            while '"kind": "step"' not in (text := log.read_text() if log.exists() else "") and process.poll() is None:
                time.sleep(0.1)
            calls = slow.calls
            process.send_signal(signal.SIGUSR2)  # the rest would take as long again
        step = json.loads(text.splitlines()[1])  # after the record of the start
        row |= {f"{name}: first step, s": step["time"] - began, f"{name}: calls of a rank": calls // ranks}
    return row


def rehearse_ranks(ranks: int, folder: Path) -> dict[str, Any]:
    """Train on `ranks` forked ranks; return the medians over the ranks at their first step, and rank 0's own."""
    make_set(folder, ranks * STEPS, 16)
    spec = write_spec(folder, ranks)
    began, honest = time.monotonic(), TrainStep.update

    def update(self: TrainStep, requests: Requests = NO_REQUESTS) -> StepResult:
        result = honest(self, requests)
        path = folder / f"{os.environ['RANK']}.json"
        if not path.exists():
            path.write_text(json.dumps(held() | {"seconds": time.monotonic() - began}))
        return result

    def work() -> int:
        TrainStep.update = update  # type: ignore[method-assign]
        return main_without_reports(["train", spec])

    status, output = forked(ranks, work)
    if status:
        sys.exit(f"{counted(ranks, 'rank')}: status {status}\n{output[-4000:]}")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    files, traffic = ([one[name] for one in found] for name in ("files", "traffic"))
    return {
        "ranks": ranks,
        "seconds to the first step": max(one["seconds"] for one in found),
        "processor, s": median(one["processor_s"] for one in found),
        "open files": round(median(files)),
        "of rank 0": files[0],
        "sent and received, MB": median(traffic) / 1e6,
        "by rank 0": traffic[0] / 1e6,
    }


WHAT = {
    "ranks": (rehearse_ranks, "16,64,128,256"),
    "imports": (rehearse_imports, "16"),
    "accumulation": (rehearse_accumulation, "4,64,512"),
    "films": (rehearse_film, "10,600"),
    "lists": (rehearse_list, "100000,1000000"),
}


def row_text(row: Mapping[str, Any]) -> str:
    texts = {float: "{:.2g}", int: "{:,}", str: "{}"}
    return f"| {' | '.join(texts[type(value)].format(value) for value in row.values())} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=WHAT, default="ranks")
    parser.add_argument("sizes", nargs="?", metavar="N,...")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(words)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measure, sizes = WHAT[args.what]
    rows: list[dict[str, Any]] = []
    for size in map(int, (args.sizes or sizes).split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row := measure(size, Path(folder)))
        if not args.json:
            if len(rows) == 1:
                print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
            print(row_text(row), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
