"""What the exchange of gradients costs: ours, the one before it, and torch's DistributedDataParallel, in turn.

    OMP_NUM_THREADS=1 python bench/exchange.py --before OLD     two ranks of this machine, fp32 and bf16
    python bench/exchange.py --rounds 3 --json data.crop=64     keys of the spec to override; one JSON object

OLD is a worktree of commit b4c1848, the last one with hvd.DistributedOptimizer: one message a gradient, which Horovod
packs. Horovod reads its settings once, so each measurement has its own processes (exchange_rank.py): every round starts
the ranks of each exchange, which warm up and time some steps. All have the same weights, clips, loss and solver:

horovod, torch   our step; its exchange over Horovod, over torch.distributed (gloo)
before           our step as OLD has it
ddp              our step, with DistributedDataParallel in place of the exchange
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.core.comm import World
from summit_train.core.processes import answer, find_mpirun, mpi_environment, mpirun_command
from summit_train.core.result import TextTable
from summit_train.report.tables import machine_text
from summit_train.training.start import environment

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("horovod", "before", "torch", "ddp")
PAIRS = (("horovod", "before"), ("torch", "before"), ("torch", "ddp"), ("horovod", "ddp"), ("torch", "horovod"))
PARTS = {"step": ".3f", "waits": ".3f", "cpu": ".3f", "peak_bytes": ".4g"}  # as they are printed
RATIOS = ("step", "cpu", "peak_bytes")
Measured = dict[str, Any]


def main() -> int:
    args = arguments()
    # The environment is read after the ranks have left: torch's threads would take their cores.
    results = {precision: measure(precision, args) for precision in args.precision}
    here = environment(World(), torch.device("cpu"), [World().host])
    values = {"environment": here, "settings": vars(args), "results": results}
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the spec")
    parser.add_argument("--spec", default=str(ROOT / "configs" / "kinetics" / "tsm_r50_8f.yaml"))
    parser.add_argument("--batch", type=int, default=2, help="clips of a rank [2]")
    parser.add_argument("--size", type=int, default=112, help="side of a frame [112]")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--before", metavar="OLD", help="worktree of the exchange before; without it, that is left out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="exchanges to measure [all]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each exchange [9]")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a measurement [6]")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them [4]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def measure(precision: str, args: argparse.Namespace) -> Measured:
    """Measure every exchange once a round; return each one's measurements, their spreads, and the ratios of PAIRS.

    Ends unless all exchanges leave the same gradient: what is faster must not be other work.
    """
    kinds = [kind for kind in KINDS if kind in args.kinds and (kind != "before" or args.before is not None)]
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for kind, measured in in_turn({kind: partial(on_ranks, kind, precision, args) for kind in kinds}, args.rounds):
        found[kind].append(measured)
        values = ", ".join(f"{part} {measured[part]:{form}}" for part, form in PARTS.items())
        print(f"{precision} {kind}: {values}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    norms = {kind: rounds[0]["gradient_norm"] for kind, rounds in found.items()}
    if not all(math.isclose(norm, norms[kinds[0]], rel_tol=1e-3) for norm in norms.values()):
        sys.exit(f"the exchanges must leave the same gradient, got norms of {norms}")
    parts = {kind: {part: [one[part] for one in rounds] for part in PARTS} for kind, rounds in found.items()}
    return {
        "exchanges": {
            kind: {"messages": found[kind][0]["messages"], "bytes": found[kind][0]["bytes"]}
            | {part: spread(values) for part, values in parts[kind].items()}
            for kind in kinds
        },
        "ratios": {
            f"{a} / {b}": {part: spread(pair_ratios(parts[a][part], parts[b][part])) for part in RATIOS}
            for a, b in PAIRS
            if a in kinds and b in kinds
        },
        "rounds": found,
    }


def on_ranks(kind: str, precision: str, args: argparse.Namespace) -> Measured:
    """Start the ranks of one exchange; return what rank 0 prints."""
    mpirun = find_mpirun()
    if mpirun is None:
        sys.exit("mpirun must be installed; `make setup` installs it")
    own = {"SUMMIT_TRAIN_COMM": "torch" if kind in ("torch", "ddp") else "horovod"}
    own["PYTHONPATH"] = str(Path(args.before).resolve() if kind == "before" else ROOT)
    program = [sys.executable, str(ROOT / "bench" / "exchange_rank.py"), kind, args.spec]
    keys = ["scale.gpus=null", f"scale.clips_per_gpu={args.batch}", f"data.crop={args.size}", f"precision={precision}"]
    words = [*program, str(args.steps), str(args.warm_up), *keys, *args.overrides]
    return answer([*mpirun_command(mpirun, args.ranks), *words], 600, mpi_environment(os.environ) | own)


def as_text(values: dict[str, Any]) -> str:
    settings = values["settings"]
    clips = f"{settings['ranks']} ranks of {settings['batch']} clips, {settings['size']}^2"
    rounds = f"median (min .. max) of {settings['rounds']} rounds of {settings['steps']} steps"
    lines = [f"machine: {machine_text(values['environment'])}", f"{settings['spec']}: {clips}; {rounds}"]
    for precision, result in values["results"].items():
        rows = [("", "step, s", "of it waits, s", "of a core, s", "peak memory of a rank, B", "messages", "MB")]
        for kind, found in result["exchanges"].items():
            spreads = [spread_text(found[part], form) for part, form in PARTS.items()]
            rows.append((kind, *spreads, f"{found['messages']}", f"{found['bytes'] / 1e6:.1f}"))
        ratios = [("", "step", "of a core", "peak memory")]
        ratios += [(pair, *(spread_text(found[part]) for part in RATIOS)) for pair, found in result["ratios"].items()]
        lines.append(f"\n{precision}:\n{TextTable(rows, indent='  ')}\n\n{TextTable(ratios, indent='  ')}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
