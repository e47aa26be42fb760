"""Does a run that is killed again and again end in the bits of one that never was?

    python bench/storm.py                                 20 kills on 3 ranks, over Horovod
    python bench/storm.py --comm torch --kills 10

A tiny TSM is trained once to its end. Then it is trained again, and a random rank is killed with SIGKILL at a random
moment of each start, until there were that many kills; a run that reaches its end before is compared and started over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import yaml

from summit_train.core.processes import find_mpirun, mpi_environment, mpirun_command, torchrun_command
from summit_train.data.motion import MotionSet, write_motion_set

ROOT = Path(__file__).resolve().parents[1]
RANK_NAMES = ("OMPI_COMM_WORLD_RANK=", "RANK=")
STEPS_AN_EPOCH, EPOCHS = 4, 12
PATIENCE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, metavar="N")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--comm", default="horovod", choices=("horovod", "torch"))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    mpirun = find_mpirun()
    if args.comm == "horovod" and mpirun is None:
        sys.exit("mpirun must be installed; `make setup` installs it")
    launcher = torchrun_command(args.ranks) if args.comm == "torch" else mpirun_command(mpirun or "", args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = storm(args, Path(folder), [*launcher, sys.executable, "-m", "summit_train", "train"])
    ranks = f"{args.ranks} ranks over {args.comm}"
    ended = f"{found['equal']} of {found['runs']} runs ended bit-equal"
    print(json.dumps(found) if args.json else f"{found['kills']} kills on {ranks}: {ended}; at steps {found['steps']}")
    return 0 if found["equal"] == found["runs"] else 1


def storm(args: argparse.Namespace, folder: Path, launcher: Sequence[str]) -> dict[str, object]:
    list(write_motion_set(folder / "data", args.ranks * 2 * STEPS_AN_EPOCH, 4, MotionSet(size=32, num_frames=8)))
    chance, steps, equal, runs = random.Random(args.seed), list[int](), 0, 0
    calm, spec = (write_spec(folder, name, args.ranks) for name in ("calm", "storm"))
    if run(launcher, args, calm, None) != 0:
        raise SystemExit("the run without kills failed")
    while len(steps) < args.kills:
        runs += 1
        while run(launcher, args, spec, chance if len(steps) < args.kills else None) != 0:
            steps.append(progress(spec)[2])
            print(f"killed {len(steps)} of {args.kills}: at step {steps[-1]}", file=sys.stderr)
        equal += is_equal(folder / "runs" / "calm", folder / "runs" / "storm")
        shutil.rmtree(folder / "runs" / "storm")
    about = {"ranks": args.ranks, "comm": args.comm}
    return about | {"kills": len(steps), "steps": steps, "runs": runs, "equal": equal}


def write_spec(folder: Path, name: str, ranks: int) -> Path:
    data = {"train": str(folder / "data/train.csv"), "val": str(folder / "data/val.csv"), "num_frames": 4}
    spec = {
        "name": name,
        "model": {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 4},
        "data": data | {"frame_stride": 1, "short_side": [32, 40], "crop": 32, "workers": 1},
        "scale": {"gpus": ranks, "clips_per_gpu": 2},
        "optimizer": {"base_lr": 0.005},
        "schedule": {"epochs": EPOCHS, "warmup_epochs": 1},
        "evaluate": {"every_epochs": 0, "clips": 1, "short_side": 32, "last_checkpoints": 1},
        "run_dir": str(folder / "runs"),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def run(launcher: Sequence[str], args: argparse.Namespace, spec: Path, chance: random.Random | None) -> int:
    """Start the ranks and wait for them; return 0 if all reached the end. chance: kill one at a random moment."""
    environment = mpi_environment(os.environ) | {"SUMMIT_TRAIN_COMM": args.comm, "PYTHONPATH": str(ROOT)}
    starts = progress(spec)[0]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*launcher, str(spec)], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        killed = chance is not None and strike(chance, args.ranks, spec, starts, process)
        try:
            status = process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        if status and not killed:
            raise SystemExit(f"the ranks failed without being killed:\n{output.read()}")
    return status


def strike(chance: random.Random, ranks: int, spec: Path, starts: int, process: subprocess.Popen[bytes]) -> bool:
    """Kill a rank at a random moment after this start's first step; return whether it still ran."""
    victim, steps = chance.randrange(ranks), chance.randrange(STEPS_AN_EPOCH * 3)
    while process.poll() is None:
        now, since, _ = progress(spec)
        if now > starts and since >= steps:
            time.sleep(chance.random() / 5)
            pids = [pid for pid, rank in ranks_of(spec) if rank == victim]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return bool(pids)
        time.sleep(0.01)
    return False


def ranks_of(spec: Path) -> Iterator[tuple[int, int]]:
    """Yield (process, rank) of the spec's ranks on this machine, without their workers."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        is_python = words[0] == sys.executable.encode() and words[1:3] == [b"-m", b"summit_train"]
        if is_python and str(spec).encode() in words:
            told = (v.removeprefix(name) for name in RANK_NAMES for v in variables if v.startswith(name))
            if (rank := next(told, None)) is not None:
                yield int(process.name), int(rank)


def progress(spec: Path) -> tuple[int, int, int]:
    """Return how often the run has begun to train, the steps since it last did, and the highest step."""
    path = spec.parent / "runs" / spec.stem / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    starts = [i for i, record in enumerate(records) if record["kind"] == "start"]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    since = sum(record["kind"] == "step" for record in records[starts[-1] if starts else 0 :])
    return len(starts), since, max(steps, default=0)


def is_equal(one: Path, other: Path) -> bool:
    """Return whether the last checkpoints of two runs have the same weights, statistics and momenta, to the bit."""
    states = []
    for run_path in (one, other):
        path = run_path / "checkpoints" / f"step_{STEPS_AN_EPOCH * EPOCHS:08d}.pt"
        state = torch.load(path, weights_only=True)
        momenta = [value for kept in state["optimizer"]["state"].values() for value in kept.values()]
        states.append([*state["model"].values(), *momenta])
    return len(states[0]) == len(states[1]) and all(map(torch.equal, *states))


if __name__ == "__main__":
    sys.exit(main())
