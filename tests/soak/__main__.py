"""A soak: runs of tiny steps under a fault injector must end in the bits of a run without faults, and leave nothing.

    python -m tests.soak                                  2,000 steps on 2 ranks, a fault a minute of ten kinds
    python -m tests.soak --steps 200 --every 5 --kinds kill,signal,NaN

Llama 3's rate of failures, one in 50,700 GPU-hours, is one in 33 hours on 1,536 GPUs. Here it is about one a minute:
after 20 s of training on average, at exponential times, and the restart. The kinds come in shuffled rounds, so each
comes as often as any other. A run that ends before all kinds have come is compared, and another one starts. Every start
goes on where the one before was ended, as a requeued job does. Faults and their places are drawn from the seed; how far
the run is when one comes is the machine's.

As root each soak has a /dev/shm of its own, so that what it leaves there is told from what others do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests import slurm
from tests.soak.soak import KINDS, STEPS_AN_EPOCH, UNASKED, Found, Soak


def table(found: Found) -> list[str]:
    """The faults by kind."""
    lines = ["kind           faults  statuses          named"]
    for kind in (*KINDS, UNASKED):
        faults = [fault for fault in found.faults if fault.kind == kind]
        if faults:
            statuses = sorted({"went on" if fault.status is None else str(fault.status) for fault in faults})
            named = [fault.named for fault in faults if fault.named is not None]
            counts = f"{sum(named)} of {len(named)}" if named else "-"
            lines.append(f"{kind:<13}  {len(faults):>6}  {', '.join(statuses):<16}  {counts}")
    return lines


def summary(found: Found, args: argparse.Namespace) -> list[str]:
    return [
        f"{found.runs} runs of {args.steps:,} steps on {args.ranks} ranks over {args.comm}, seed {args.seed}: "
        f"{len(found.faults)} faults, {found.starts} starts",
        f"goodput: {', '.join(f'{100 * goodput:.1f} %' for goodput in found.goodput)}",
        f"bit-equal to the run without faults: {'yes' if found.equal == found.runs else 'NO'} "
        f"({found.equal} of {found.runs})",
        f"left behind: {'nothing' if not found.left else '; '.join(found.left)}",
    ]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help=f"a multiple of {STEPS_AN_EPOCH}")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="mean seconds of training to a fault")
    parser.add_argument("--faults", type=int, default=sys.maxsize, metavar="N", help="at most so many")
    parser.add_argument("--stall-s", type=float, default=60.0, metavar="S", help="without progress the ranks end")
    parser.add_argument("--checkpoint-s", type=float, default=10.0, metavar="S", help="seconds between checkpoints")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--comm", default="horovod", choices=("horovod", "torch"))
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KIND,...", help=", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)  # /dev/shm is
    args = parser.parse_args(words)
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if "lost node" in args.kinds and args.ranks != 2:
        parser.error("a lost node needs --ranks 2: with more, sums over Horovod and in Slurm's steps differ in order")
    return args


def main() -> int:
    args = parse()
    if os.geteuid() == 0 and not args.private:
        own = 'mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", own, "sh", sys.executable, "-m", "tests.soak", *sys.argv[1:]]
        os.execvp(words[0], [*words, "--private"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak")))
        cluster = None
        if "lost node" in args.kinds:
            if (lacking := slurm.missing()) is not None:
                print(f"no lost nodes: {lacking}", file=sys.stderr)
            else:
                (folder / "slurm").mkdir()
                cluster = stack.enter_context(slurm.running_slurm(folder / "slurm", node_lost_after_s=15))
        found = Soak(args, folder, cluster).run()
    values = {"faults": [vars(fault) for fault in found.faults], "goodput": found.goodput, "left": found.left}
    values |= {"runs": found.runs, "equal": found.equal, "starts": found.starts}
    print(json.dumps(values) if args.json else "\n".join([*table(found), "", *summary(found, args)]))
    is_clean = not found.left and all(fault.kind != UNASKED for fault in found.faults)
    return 0 if found.equal == found.runs and is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
