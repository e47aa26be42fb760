"""Compare training with mmaction2 1.2 in one run: whole steps of TSM ResNet-50, data included.

    python bench/mmaction2.py PYTHON VIDEO [VIDEO ...]                      raw and packed, fp32 and bf16, 1 and 2 ranks
    python bench/mmaction2.py PYTHON VIDEO --kinds packed --precisions bf16 part of it; --json for JSON

PYTHON: the interpreter of an environment with mmaction2. Make one, with Python 3.11:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 'setuptools<81' wheel importlib_metadata
    peer/bin/pip install decord opencv-python-headless einops scipy mmengine 'numpy<2.3'
    peer/bin/pip install --no-build-isolation mmcv-lite==2.1.0
    peer/bin/pip install --no-deps mmaction2==1.2.0

Each VIDEO is a data set: its file, listed as often as the steps need clips. Both sides have the same clips, crop size,
threads and loader workers, and train from random weights: 8 frames of a window of 64, scaled, a random crop, a random
flip, SGD with momentum. Packed sets are every frame as a JPEG: here in a shard, there in a folder. mmaction2 runs as
shipped, and with channels-last weights, one line that its users can add. Each measurement is a new training; its value
is the median step after the first ones. The sides alternate; ratios are of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.machine import num_cpus
from summit_train.core.processes import answer
from summit_train.core.result import TextTable
from summit_train.data.video.decode import every_frame
from summit_train.data.video.encode import jpeg, scaled
from summit_train.data.video.source import NO_HURRY, Budget, Encoded

PEER = Path(__file__).with_name("mmaction2_peer.py")
SIDES = ("here", "mmaction2", "mmaction2, channels last")
WARM_UP = 4  # steps
PATIENCE_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("python", metavar="PYTHON", help="interpreter of the environment with mmaction2")
    add("videos", metavar="VIDEO", nargs="+", type=Path)
    add("--kinds", nargs="+", choices=("raw", "packed"), default=["raw", "packed"])
    add("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="[1 2]")
    add("--clips", type=int, default=4, metavar="N", help="clips per rank [%(default)s]")
    add("--crop", type=int, default=112, metavar="N", help="side of the crop in pixels [%(default)s]")
    add("--steps", type=int, default=12, metavar="N", help=f"with the most ranks; {WARM_UP} do not count [%(default)s]")
    add("--repeats", type=int, default=3, metavar="N", help="trainings of each side [%(default)s]")
    add("--json", action="store_true")
    args = parser.parse_args()
    for name, least in {"steps": WARM_UP + 2, "clips": 1, "crop": 32, "repeats": 1}.items():
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if min(args.ranks) < 1:
        raise UserError(f"--ranks must be at least 1, got {min(args.ranks)}")
    if missing := [video for video in args.videos if not video.is_file()]:
        raise UserError(f"{missing[0]}: no such file")
    answer([args.python, "-c", "import mmaction; print({})"], PATIENCE_S, None)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, video in enumerate(args.videos):
            for kind in args.kinds:
                lists = prepared(Path(folder, f"{number}_{kind}"), video.resolve(), kind, args)
                for precision in args.precisions:
                    for ranks in args.ranks:
                        rows.append({"video": video.name, "kind": kind, "precision": precision, "ranks": ranks})
                        rows[-1] |= measure(lists, precision, ranks, args)
                        print(as_text(rows[-1:]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}) if args.json else as_text(rows))
    return 0


def prepared(folder: Path, video: Path, kind: str, args: argparse.Namespace) -> dict[str, str]:
    """Write the lists, long enough for the most ranks (with fewer, training takes more steps), and the packed sets."""
    folder.mkdir()
    clips = args.steps * args.clips * max(args.ranks)
    source, frames, sets = video, "", {"train": str(folder / "indexed.csv"), "data.root": "/"}
    if kind == "packed":
        source = folder / "pictures"
        source.mkdir()
        side = args.crop * 320 // 224
        for number, frame in enumerate(every_frame(Encoded(str(video)), Budget(str(video), NO_HURRY)), start=1):
            (picture,) = scaled(frame.to_ndarray(format="rgb24")[None], side)
            (source / f"img_{number:05}.jpg").write_bytes(jpeg(picture, 90))
        frames, sets = f" {number}", {"train": str(folder / "set"), "data.root": "null"}
    for name, count in (("train", clips), ("val", 1)):
        lines = [f"{source},{place % 400}\n" for place in range(count)]
        (folder / f"{name}.csv").write_text("".join(["path,label\n", *lines]))
    (folder / "list.txt").write_text("".join(f"{source}{frames} {place % 400}\n" for place in range(clips)))
    made = [["index", folder / "train.csv", "--root", "/", "--out", folder / "indexed.csv"]]
    made += [["pack", folder / "indexed.csv", folder / "set", "--kind", "jpeg", "--root", "/"]] if frames else []
    for words in made:
        command = [sys.executable, "-m", "summit_train", "data", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {**sets, "val": str(folder / "val.csv"), "files": str(folder / "list.txt"), "kind": kind}


def measure(lists: dict[str, str], precision: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step on each side, and theirs over ours."""
    share = max(1, num_cpus() // ranks)  # cores of a rank: its threads and its loader workers
    job = {"precision": precision, "ranks": ranks, "clips": args.clips, "crop": args.crop, "workers": share}
    turns: dict[str, Callable[[], float]] = {"here": partial(here, lists, job)}
    for side in SIDES[1:]:
        turns[side] = partial(there, args.python, lists, job | {"channels_last": "channels last" in side})
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for side, one in in_turn(turns, args.repeats):
        seconds[side].append(one)
    ratios = {side: spread(pair_ratios(seconds[side], seconds["here"])) for side in SIDES[1:]}
    return {"step_s": {side: spread(values) for side, values in seconds.items()}, "ratios": ratios}


def here(lists: dict[str, str], job: dict[str, Any]) -> float:
    """Train, and return the median step's seconds."""
    crop = job["crop"]
    keys = {
        "name": "run", "model.pretrained": "null", "precision": job["precision"], "data.train": lists["train"],
        "data.val": lists["val"], "data.root": lists["data.root"], "data.crop": crop, "data.workers": job["workers"],
        "data.short_side": [crop * 256 // 224, crop * 320 // 224], "scale.gpus": job["ranks"],
        "scale.clips_per_gpu": job["clips"], "schedule.epochs": 1, "schedule.warmup_epochs": 0.5,
        "evaluate.every_epochs": 0, "evaluate.clips": 1, "evaluate.last_checkpoints": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{key}={value}" for key, value in {**keys, "run_dir": folder}.items()]
        words += ["--ranks", str(job["ranks"])] if job["ranks"] > 1 else []
        command = [sys.executable, "-m", "summit_train", "train", "shipped:kinetics/tsm_r50_8f", *words]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", env=threads(job), timeout=PATIENCE_S
        )
        if done.returncode:
            raise RunFailed(f"training failed here: {done.stderr[-2000:]}")
        records = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return statistics.median([record["step_s"] for record in records if record["kind"] == "step"][WARM_UP:])


def there(python: str, lists: dict[str, str], job: dict[str, Any]) -> float:
    """Train with mmaction2, and return the median step's seconds."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={job['ranks']}"] if job["ranks"] > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        job = job | {"files": lists["files"], "is_pictures": lists["kind"] == "packed", "work_dir": folder}
        found = answer([python, *start, str(PEER), json.dumps(job)], PATIENCE_S, threads(job))
    return statistics.median(found["seconds"][WARM_UP - 1 :])


def threads(job: dict[str, Any]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(job["workers"])}


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    heads = [f"{side}, s per step" for side in SIDES] + [f"{side} / here" for side in SIDES[1:]]
    table = [("video", "set", "precision", "ranks", *heads)]
    for row in rows:
        steps = [spread_text(row["step_s"][side]) for side in SIDES]
        ratios = [spread_text(row["ratios"][side], ".2f") for side in SIDES[1:]]
        table.append((row["video"], row["kind"], row["precision"], str(row["ranks"]), *steps, *ratios))
    return str(TextTable(table, left=3))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(str(error))
