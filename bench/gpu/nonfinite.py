"""A run whose loss becomes NaN ends by itself: exit status 1, and a message that names rank, step and clips.

    python bench/gpu/nonfinite.py --out nonfinite.json
    python bench/gpu/nonfinite.py --out nonfinite.json --device cpu --small

`summit-train train configs/motion/tsm.yaml`, shrunk, on generated videos; the network's logits are NaN from the third
step on. The third step is skipped, the fourth ends the run (watch.nonfinite_steps is 2).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch
from outcome import Check, Outcome, fact, run_part
from runs import ended, on_videos, start, steps_of, words

# Four virtual GPUs: the ninth pass is the first of the third step. The plan counts on the meta device.
PROGRAM = """
import sys
from summit_train.__main__ import main
from summit_train.models import VideoNetwork
honest, calls = VideoNetwork.forward, 0
def forward(self, clips):
    global calls
    calls += not clips.is_meta
    logits = honest(self, clips)
    return logits * float("nan") if calls > 8 else logits
if sys.argv[1] == "nan":
    VideoNetwork.forward = forward
sys.exit(main(["train", *sys.argv[2:]]))
"""


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Make the videos and run."""
    outcome.values["skipped"] = {}
    on_videos(outcome, lambda folder: check(folder, "nan", device, args.seconds, outcome))


def check(folder: Path, mode: str, device: torch.device, seconds: float, outcome: Outcome) -> None:
    """Run until it ends, and read what it said. mode: "nan", or another word for an honest run."""
    began, log = time.monotonic(), folder / "nan.log"
    more = ("schedule.epochs=2", "model.width=0.125")
    status = ended(start(PROGRAM, [mode, *words(folder, "nan", *more)], device, log), seconds)
    took = time.monotonic() - began
    said = log.read_text(encoding="utf-8", errors="replace")
    outcome.values |= {"seconds": took, "status": status, "said": said[-2000:]}
    outcome.add(Check("the run ends in time, seconds", took, seconds))
    outcome.add(fact("its exit status is 1", status == 1, f"status {status}"))
    message = next((line for line in said.splitlines() if "steps in a row" in line), "")
    outcome.add(fact("a message says that steps in a row were not finite", bool(message), said[-300:]))
    outcome.add(fact("it names the rank", re.search(r"rank 0 on \S+:", message) is not None))
    outcome.add(fact("it names the steps", "step 3," in message and "step 4," in message))
    outcome.add(fact("it names the clips", message.count("videos/train_") == 16))
    outcome.add(fact("no step follows", max(steps_of(folder / "runs" / "nan"), default=0) <= 4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part's own arguments."""
    parser.add_argument("--seconds", type=float, default=60, help="most of them for the run [60]")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
