"""Does a run that is killed again and again end in the bits of one that never was?

    python bench/storm.py                                 20 kills on 3 ranks, over Horovod
    python bench/storm.py --comm torch --nodes 2 --kills 10

A tiny TSM is trained once to its end. Then it is trained again, and a random rank is killed with SIGKILL at a random
moment of each start, until it was killed so often; a run that gets to its end first is compared and begun anew. With
--nodes 2 the ranks lie in two network namespaces that a virtual cable joins (as root; see bench/veth.py).
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
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import veth
import yaml

from summit_train.core.processes import find_mpirun, mpirun_command
from summit_train.data.motion import MotionSet, write_motion_set

RANK_NAMES = ("OMPI_COMM_WORLD_RANK=", "RANK=")
STEPS_AN_EPOCH, EPOCHS = 4, 12
PATIENCE_S = 600.0


def main() -> int:
    """Run the storm; the status is 1 if a run ends in other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, metavar="N")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--comm", default="horovod", choices=("horovod", "torch"))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    if args.nodes == 2 and (why := veth.why_not()) is not None:
        print(json.dumps({"skipped": why}) if args.json else f"skipped: {why}")
        return 0
    spaces = veth.namespaces() if args.nodes == 2 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, spaces as names:
        found = storm(args, Path(folder), names)
    words = (
        f"{found['kills']} kills in {found['runs']} runs on {args.ranks} ranks, {args.nodes} nodes, over {args.comm}"
    )
    ended = "all ended bit-equal" if found["equal"] == found["runs"] else f"only {found['equal']} ended bit-equal"
    print(json.dumps(found) if args.json else f"{words}: {ended}; killed at steps {found['steps']}")
    return 0 if found["equal"] == found["runs"] else 1


def storm(args: argparse.Namespace, folder: Path, names: tuple[str, str] | None) -> dict[str, object]:
    """Train, kill, go on; return what was seen."""
    videos = args.ranks * 2 * STEPS_AN_EPOCH
    for _ in write_motion_set(folder / "data", videos, 4, MotionSet(size=32, num_frames=8)):
        pass
    chance, steps, equal, runs = random.Random(args.seed), list[int](), 0, 0
    with launchers(args, names) as launcher:
        calm = folder / "runs" / "calm"
        if run(launcher, args, write_spec(folder, "calm", args.ranks), None) != 0:
            raise SystemExit("the run that nobody kills failed")
        while len(steps) < args.kills:
            spec, runs = write_spec(folder, "storm", args.ranks), runs + 1
            while run(launcher, args, spec, chance if len(steps) < args.kills else None) != 0:
                steps.append(last_step(folder / "runs" / "storm"))
                print(f"killed {len(steps)} of {args.kills}: at step {steps[-1]}", file=sys.stderr)
            equal += is_equal(calm, folder / "runs" / "storm")
            shutil.rmtree(folder / "runs" / "storm")
    return {"ranks": args.ranks, "nodes": args.nodes, "comm": args.comm, "kills": len(steps), "steps": steps,
            "runs": runs, "equal": equal}  # fmt: skip


def write_spec(folder: Path, name: str, ranks: int) -> Path:
    """Write the spec of a run; return its path."""
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


@contextmanager
def launchers(args: argparse.Namespace, names: tuple[str, str] | None) -> Iterator[list[list[str]]]:
    """Give the words that start the ranks: mpirun's, or a line for each rank where nothing but torch joins them."""
    python = [sys.executable, "-m", "summit_train", "train"]
    split = args.ranks - args.ranks // 2
    if names is None:
        mpirun = find_mpirun()
        assert mpirun is not None, "mpirun comes with make setup"
        yield [[*mpirun_command(mpirun, args.ranks), *python]]
    elif args.comm == "horovod":
        with veth.launcher(names, (split, args.ranks - split)) as mpirun_words:
            yield [[*mpirun_words, "-x", "SUMMIT_TRAIN_COMM", *python]]
    else:
        spaces = [names[0] if rank < split else names[1] for rank in range(args.ranks)]
        utility = 'hostname "$0"; exec "$@"'
        yield [
            [
                "ip",
                "netns",
                "exec",
                space,
                "unshare",
                "--uts",
                "sh",
                "-c",
                utility,
                space,
                "env",
                f"RANK={rank}",
                *python,
            ]
            for rank, space in enumerate(spaces)
        ]


def run(launcher: Sequence[Sequence[str]], args: argparse.Namespace, spec: Path, chance: random.Random | None) -> int:
    """Start the ranks and wait for them; return 0 where all got to the end. chance: kill one at a random moment."""
    environment = veth.environment() | {"SUMMIT_TRAIN_COMM": args.comm, "OMP_NUM_THREADS": "1"}
    if len(launcher) > 1:
        port = str(random.SystemRandom().randrange(10_000, 30_000))
        environment |= {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": veth.HOSTS[0], "MASTER_PORT": port}
    before = starts(spec)
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen([*words, str(spec)], env=environment, stdout=output, stderr=output, start_new_session=True)
            for words in launcher
        ]
        killed = chance is not None and strike(chance, args.ranks, spec, before, processes)
        try:
            statuses = [process.wait(PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        if any(statuses) and not killed:
            raise SystemExit(f"the ranks failed without being killed:\n{output.read()}")
    return max(map(abs, statuses))


def strike(
    chance: random.Random, ranks: int, spec: Path, before: int, processes: Sequence[subprocess.Popen[bytes]]
) -> bool:
    """Kill a rank at a random moment after this start's first step; return whether it was there to be killed."""
    victim, steps = chance.randrange(ranks), chance.randrange(STEPS_AN_EPOCH * 3)
    while all(process.poll() is None for process in processes):
        if starts(spec) > before and steps_since_start(spec) >= steps:
            time.sleep(chance.random() / 5)
            pids = [pid for pid, rank in ranks_of(spec) if rank == victim]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return bool(pids)
        time.sleep(0.01)
    return False


def ranks_of(spec: Path) -> Iterator[tuple[int, int]]:
    """Yield (process, rank) of the spec's ranks on this machine, in whatever namespace, without their workers."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            told = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        is_python = words[0] == sys.executable.encode() and words[1:3] == [b"-m", b"summit_train"]
        if not is_python or str(spec).encode() not in words:
            continue
        for name in RANK_NAMES:
            numbers = [int(word.removeprefix(name)) for word in told if word.startswith(name)]
            if numbers:
                yield int(process.name), numbers[0]
                break


def records(spec: Path) -> list[dict[str, object]]:
    """Return what the run has written down so far."""
    path = spec.parent / "runs" / spec.stem / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def starts(spec: Path) -> int:
    """Return how often the run has begun to train."""
    return sum(record["kind"] == "start" for record in records(spec))


def steps_since_start(spec: Path) -> int:
    """Return the steps that the run has written down since it was started last."""
    kinds = [record["kind"] for record in records(spec)]
    return kinds[::-1].index("start") - kinds[::-1][: kinds[::-1].index("start")].count("checkpoint")


def last_step(run_path: Path) -> int:
    """Return the last step that a run has written down."""
    spec = run_path.parent.parent / f"{run_path.name}.yaml"
    return max((int(str(record["step"])) for record in records(spec) if record["kind"] == "step"), default=0)


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
