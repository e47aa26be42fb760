"""Does the loader feed this GPU? Clips/s of raw H.264, packed bytes and packed JPEG against those of the step.

The videos are made here: H.264 of 256 x 256 pixels, of the length of the clips that the network wants. `summit-train
bench loader --measure` times this machine's cores and the step of TSM, ResNet-50, and works out the cores that a rank
needs. Then the step is timed with each set's loader, on all cores but one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from outcome import Check, Outcome, run_part

from summit_train.core.processes import answer

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "configs" / "kinetics" / "tsm_r50_8f.yaml"
_TIMEOUT_S = 60.0


def feed(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Make the sets, measure the loader and the fed step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = overrides(folder, args.small)
        make_sets(folder, args.small)
        loader = measured("loader", [str(SPEC), *words, *options(args.small)])
        outcome.values["loader"] = loader
        cores = len(os.sched_getaffinity(0))
        for kind in loader["kinds"]:
            needed = kind["verdict"]["cores_per_rank"]
            name = f"cores that a rank needs, {kind['kind']}"
            outcome.add(Check(name, needed, cores, wanted=True, note=f"{cores} are here"))
        outcome.values["fed"] = [row for kind in ("raw", "bytes", "jpeg") for row in fed_step(folder, kind, args.small)]
        report_waits(outcome)


def overrides(folder: Path, small: bool) -> list[str]:
    """Return the spec's words: the real network, or a tiny one to rehearse."""
    words = [f"data.train={folder}/videos/train.csv", f"data.val={folder}/videos/val.csv", "model.num_classes=4"]
    words += ["scale.gpus=1", "data.root=null", "precision=bf16"]
    tiny = ["model.width=0.125", "data.crop=32", "data.short_side=[40,48]", "scale.clips_per_gpu=2"]
    return words + (tiny if small else ["scale.clips_per_gpu=16"])


def make_sets(folder: Path, small: bool) -> None:
    """Write the videos, and pack them as bytes and as JPEG."""
    size, frames, train = (48, 64, 8) if small else (256, 64, 64)
    counts = ["--train", str(train), "--val", "4", "--size", str(size), "--frames", str(frames)]
    command("data", "motion", str(folder / "videos"), *counts)
    for kind in ("bytes", "jpeg"):
        manifest = str(folder / "videos" / "train.csv")
        command("data", "pack", manifest, str(folder / kind), "--root", str(folder / "videos"), "--kind", kind)


def command(*words: str) -> None:
    """Run a command of the product to its end."""
    subprocess.run([sys.executable, "-m", "summit_train", *words], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


def measured(what: str, words: list[str]) -> dict[str, Any]:
    """Run `summit-train bench WHAT --json`; return its object."""
    return answer([sys.executable, "-m", "summit_train", "bench", what, *words, "--json"], _TIMEOUT_S)


def options(small: bool) -> list[str]:
    """Return how long the loader is measured."""
    return ["--measure", *(["--clips", "2", "--repeats", "1", "--workers", "1"] if small else ["--repeats", "2"])]


def fed_step(folder: Path, kind: str, small: bool) -> list[dict[str, Any]]:
    """Measure the step with the loader of one set, with all cores but one; return a row."""
    workers = 1 if small else max(1, len(os.sched_getaffinity(0)) - 1)
    words = [*overrides(folder, small), f"data.workers={workers}"]
    if kind != "raw":
        words.append(f"data.train={folder}/{kind}")
    turns = ["--warm-up", "1", "--steps", "1", "--repeats", "1"] if small else ["--warm-up", "3", "--steps", "5"]
    step = measured("step", [str(SPEC), *words, *turns, "--peak", "0"])["specs"][0]
    rate, wait = step["clips_per_second"], step["shares"]["data_wait"]
    return [{"kind": kind, "workers": workers, "clips_per_second": rate, "data_wait_share": wait}]


def report_waits(outcome: Outcome) -> None:
    """Say for each set whether the GPU waits: at most a fiftieth of the step is wanted."""
    for row in outcome.values["fed"]:
        name = f"share of a step that waits for data, {row['kind']}"
        outcome.add(Check(name, row["data_wait_share"], 0.02, wanted=True, note=f"{row['workers']} workers"))


if __name__ == "__main__":
    sys.exit(run_part(__doc__, feed))
