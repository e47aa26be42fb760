"""A run that is killed and started again ends with the bits of one that was not, under deterministic algorithms.

    python bench/gpu/resume.py --out resume.json
    python bench/gpu/resume.py --out resume.json --device cpu --small

`summit-train train configs/motion/tsm.yaml`, shrunk, on generated videos, in processes of its own with
torch.use_deterministic_algorithms(True, warn_only=True): an operator that has no deterministic form on the device is
named. One run is undisturbed; another dies of SIGKILL in the middle of an epoch and goes on from a checkpoint within
it. Weights, BN's statistics, the solver's state and the averages in the last checkpoint are equal to the bit. A third
run, without the switch, is compared too, and reported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch
from outcome import Outcome, fact, run_part
from runs import checkpoints, differing, ended, final_state, kill, on_videos, reaches, start, steps_of, words

PROGRAM = """
import sys, torch
if sys.argv[1] == "deterministic":
    torch.use_deterministic_algorithms(True, warn_only=True)
from summit_train.__main__ import main
sys.exit(main(["train", *sys.argv[2:]]))
"""
KILLED_AFTER, STEPS = 13, 60  # 10 steps an epoch
# So often that the run has a checkpoint within the epoch: after every step or two.
OVERRIDES = ("schedule.epochs=6", "checkpoint.every_minutes=0.0001")


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Make the videos and compare the runs."""
    outcome.values["skipped"] = {} if device.type == "cuda" else {"CUDA's operators": "the runs are on the CPU"}
    more = (*OVERRIDES, "model.width=0.125") if args.small else OVERRIDES
    on_videos(outcome, lambda folder: compare(folder, more, device, args.seconds, outcome))


def compare(folder: Path, more: tuple[str, ...], device: torch.device, seconds: float, outcome: Outcome) -> None:
    """Run the undisturbed run and the one to be killed side by side, then the rest of that one beside a free run."""
    whole, killed, free = (folder / "runs" / name for name in ("whole", "killed", "free"))
    log = {name: folder / f"{name}.log" for name in ("whole", "killed", "resumed", "free")}

    def begin(mode: str, run: str, name: str) -> subprocess.Popen[bytes]:
        return start(PROGRAM, [mode, *words(folder, run, *more)], device, log[name])

    begun = [begin("deterministic", name, name) for name in ("whole", "killed")]
    try:
        came = reaches(killed, KILLED_AFTER, begun[1], seconds / 2)
        kill(begun[1])
        saved = checkpoints(killed)
        in_the_middle = came and bool(saved) and saved[-1] % 10 != 0 and saved[-1] < STEPS
        note = f"checkpoints {saved}, steps to {max(steps_of(killed), default=0)}"
        outcome.add(fact("a run was killed in the middle of an epoch, with a checkpoint within", in_the_middle, note))
        begun += [begin("deterministic", "killed", "resumed"), begin("free", "free", "free")]
        for name, process in zip(log, begun, strict=True):
            if name == "killed":
                continue
            status = ended(process, seconds / 2)
            tail = log[name].read_text(errors="replace")[-600:] if status else ""
            outcome.add(fact(f"the {name} run ends with status 0", status == 0, tail))
    finally:
        for process in begun:
            kill(process)
    said = "".join(log[name].read_text(errors="replace") for name in ("whole", "resumed"))
    outcome.add(fact("the resumed run says that it goes on", "goes on from" in said))
    same(whole, killed, said, outcome)
    if steps_of(free)[-1:] == [STEPS]:
        differ = differing(final_state(whole), final_state(free))
        outcome.values["without_the_switch"] = {"differing": len(differ), "first": differ[:5]}


def same(whole: Path, killed: Path, said: str, outcome: Outcome) -> None:
    """Check that two runs came to their end with the same bits, and by deterministic operators."""
    operators = sorted(set(re.findall(r"(\S+) does not have a deterministic implementation", said)))
    outcome.values["without_a_deterministic_form"] = operators
    outcome.add(fact("every operator has a deterministic form", not operators, ", ".join(operators)))
    done = [checkpoints(run)[-1:] == [STEPS] for run in (whole, killed)]
    outcome.add(fact(f"both runs came to step {STEPS}", all(done)))
    if not all(done):
        return
    one, other = final_state(whole), final_state(killed)
    differ = differing(one, other)
    note = f"{len(one)} tensors and numbers; differing: {', '.join(differ[:5]) or 'none'}"
    outcome.add(fact("the killed and resumed run ends with the bits of the undisturbed one", not differ, note))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part's own arguments."""
    parser.add_argument("--seconds", type=float, default=90, help="most of them for the runs, about [90]")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
