"""Does a run that is killed again and again end in the bits of one that never was?

    python bench/storm.py                                 20 kills on 3 ranks, over Horovod
    python bench/storm.py --comm torch --nodes 2 --kills 10

A tiny TSM is trained once to its end. Then it is trained again, and a random rank is killed with SIGKILL at a random
moment of each start, until there were that many kills; a run that reaches its end before is compared and started over.
With --nodes 2 the ranks are in two network namespaces joined by a virtual cable (as root; see papers/veth.py).
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
import yaml

from summit_train.core.processes import find_mpirun, mpirun_command
from summit_train.data.motion import MotionSet, write_motion_set

sys.path.append(str(Path(__file__).resolve().parents[1] / "papers"))

import veth

RANK_NAMES = ("OMPI_COMM_WORLD_RANK=", "RANK=")
STEPS_AN_EPOCH, EPOCHS = 4, 12
PATIENCE_S = 600.0
Launcher = Sequence[Sequence[str]]  # a command line, or one for each rank


def main() -> int:
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
    cable = veth.namespaces() if args.nodes == 2 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, cable as names, launchers(args, names) as launcher:
        found = storm(args, Path(folder), launcher)
    ranks = f"{args.ranks} ranks, {args.nodes} nodes, over {args.comm}"
    ended = f"{found['equal']} of {found['runs']} runs ended bit-equal"
    print(json.dumps(found) if args.json else f"{found['kills']} kills on {ranks}: {ended}; at steps {found['steps']}")
    return 0 if found["equal"] == found["runs"] else 1


def storm(args: argparse.Namespace, folder: Path, launcher: Launcher) -> dict[str, object]:
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
    return {"ranks": args.ranks, "nodes": args.nodes, "comm": args.comm, "kills": len(steps), "steps": steps,
            "runs": runs, "equal": equal}  # fmt: skip


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


@contextmanager
def launchers(args: argparse.Namespace, names: tuple[str, str] | None) -> Iterator[Launcher]:
    """Yield the words that start the ranks: mpirun's, or a line for each rank where only torch joins them."""
    python = [sys.executable, "-m", "summit_train", "train"]
    first = args.ranks - args.ranks // 2  # ranks on the first node
    if names is None:
        mpirun = find_mpirun()
        assert mpirun is not None, "mpirun comes with make setup"
        yield [[*mpirun_command(mpirun, args.ranks), *python]]
    elif args.comm == "horovod":
        with veth.launcher(names, (first, args.ranks - first)) as mpirun_words:
            yield [[*mpirun_words, "-x", "SUMMIT_TRAIN_COMM", *python]]
    else:
        hosts = [names[rank >= first] for rank in range(args.ranks)]
        enter = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"')
        yield [
            ["ip", "netns", "exec", host, *enter, host, "env", f"RANK={rank}", *python]
            for rank, host in enumerate(hosts)
        ]


def run(launcher: Launcher, args: argparse.Namespace, spec: Path, chance: random.Random | None) -> int:
    """Start the ranks and wait for them; return 0 if all reached the end. chance: kill one at a random moment."""
    environment = veth.environment() | {"SUMMIT_TRAIN_COMM": args.comm}
    if len(launcher) > 1:
        port = str(random.SystemRandom().randrange(10_000, 30_000))
        environment |= {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": veth.HOSTS[0], "MASTER_PORT": port}
    starts = progress(spec)[0]
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen([*words, str(spec)], env=environment, stdout=output, stderr=output, start_new_session=True)
            for words in launcher
        ]
        killed = chance is not None and strike(chance, args.ranks, spec, starts, processes)
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
    chance: random.Random, ranks: int, spec: Path, starts: int, processes: Sequence[subprocess.Popen[bytes]]
) -> bool:
    """Kill a rank at a random moment after this start's first step; return whether it still ran."""
    victim, steps = chance.randrange(ranks), chance.randrange(STEPS_AN_EPOCH * 3)
    while all(process.poll() is None for process in processes):
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
    """Yield (process, rank) of the spec's ranks on this machine, in whatever namespace, without their workers."""
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
