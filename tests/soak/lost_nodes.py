"""Lose a node of a real Slurm again and again in the middle of one job, with a spare node, and say what that cost.

    python -m tests.soak.lost_nodes --kills 10 --every 30

All processes of the node end at once; when the run trains again, the node comes back. The weights must be the bits of a
run without faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import yaml

from summit_train.report.goodput import goodput_rows, time_spent
from summit_train.report.records import RunRecord
from tests.cluster.test_slurm import BY_TORCH, SITE, set_words
from tests.runs import assert_bit_equal, final_state, records
from tests.slurm import Slurm, running_slurm
from tests.soak.soak import write_data

STEPS_AN_EPOCH = 40


def submit(cluster: Slurm, folder: Path, name: str, epochs: int, keys: list[str]) -> Path:
    """Submit a run to two nodes; its folder."""
    data = {split: str(folder / f"data/{split}.csv") for split in ("train", "val")}
    spec = {
        "name": name,
        "model": {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 4},
        "data": data | {"num_frames": 4, "frame_stride": 1, "short_side": [32, 40], "crop": 32, "workers": 1},
        "scale": {"gpus": 2, "clips_per_gpu": 2},
        "optimizer": {"base_lr": 0.005},
        "schedule": {"epochs": epochs, "warmup_epochs": 1},
        "evaluate": {"every_epochs": 0, "clips": 1, "short_side": 32, "last_checkpoints": 1},
        "checkpoint": {"every_minutes": 0.05, "keep": 2},
        "run_dir": str(folder / "runs"),
    }
    path, site = folder / f"{name}.yaml", folder / "site.yaml"
    path.write_text(yaml.safe_dump(spec))
    site.write_text(SITE)
    words = ["submit", str(path), "--site", str(site), "--nodes", "2", "--walltime", "1:00", "--max-requeues", "99"]
    status, said = cluster.program(*words, *set_words([*BY_TORCH, *keys]))
    if status:
        raise SystemExit(said)
    return folder / "runs" / name


def _last_step(run: Path) -> float:
    return max((step["time"] for step in records(run, "step")), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--every", type=float, default=30.0, metavar="S", help="seconds of training before a kill")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help=f"of {STEPS_AN_EPOCH} steps")
    parser.add_argument("--given-up-s", type=int, default=300, metavar="S", help="Slurm's SlurmdTimeout")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="site keys")
    args = parser.parse_args()
    keys = args.set or ["spare_nodes=1", f"restarts={args.kills}"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lost")))
        write_data(folder / "data", 4 * STEPS_AN_EPOCH)
        (folder / "slurm").mkdir()
        cluster = stack.enter_context(running_slurm(folder / "slurm", node_lost_after_s=args.given_up_s))
        run, lost = submit(cluster, folder, "run", args.epochs, keys), list[float]()
        while len(lost) < args.kills and not (run / "job/done").exists():
            starts = records(run, "start") if (run / "metrics.jsonl").exists() else []
            if len(starts) != len(lost) + 1 or _last_step(run) < starts[-1]["time"]:
                time.sleep(0.5)
                continue
            if lost:
                print(f"{time.time() - lost[-1]:.1f} s from a loss to the next step", flush=True)
                cluster.bring_back()
            time.sleep(args.every)
            nodes = cluster.run("squeue", "-h", "-t", "R", "-o", "%N").strip()
            in_use = (run / "job/hosts").read_text().split() if (run / "job/hosts").exists() else None
            victim = (in_use or cluster.run("scontrol", "show", "hostnames", nodes).split())[-1]
            lost.append(time.time())
            cluster.lose(victim)
        cluster.wait_until((run / "job/done").exists, "the end of the run", 1200)
        calm = submit(cluster, folder, "calm", args.epochs, [])
        cluster.wait_until((calm / "job/done").exists, "the end of the run without faults", 1200)
        assert_bit_equal(final_state(calm), final_state(run))
        spent = time_spent(RunRecord(run))
        assert spent is not None
        jobs = len(list((run / "job").glob("*.out")))
        print(f"{len(lost)} lost nodes, {jobs} jobs, bits of a run without faults; goodput {100 * spent.goodput:.1f} %")
        for what, seconds, share in goodput_rows(spent):
            print(f"{what:<34} {seconds:>12} {share:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
