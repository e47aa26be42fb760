"""`summit-train bench scaling SPEC --ranks 1,2`: the same clips a rank on more and more ranks.

Each measurement starts ranks of this machine that run `bench step`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from summit_train.bench import measure
from summit_train.bench.measure import Values
from summit_train.bench.steps import experiment_of
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.processes import Facts, answer, find_mpirun, mpi_environment, mpirun_command
from summit_train.core.result import TextTable, tell
from summit_train.core.session import check_single
from summit_train.core.text import counted, share
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec

_TIMEOUT = 1800.0  # seconds for the ranks of one measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_spec(parser)
    add_scaling(parser)
    parser.add_argument("--out", help=argparse.SUPPRESS)  # removed


def add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="1,2", metavar="N,...", help="numbers of ranks [1,2]")
    parser.add_argument("--synthetic", action="store_true", help="random clips, no loader")
    measure.add_turns(parser, steps=5)


def run(args: argparse.Namespace) -> Values:
    if args.out is not None:
        raise UserError(
            "--out was removed; draw it by `python papers/figure3.py c --specs SPEC --out FILE` in a checkout"
        )
    check_single("bench scaling")
    return measure_scaling(args, [args.spec], args.overrides)


def measure_scaling(args: argparse.Namespace, paths: Sequence[str], overrides: Sequence[str]) -> Values:
    """Measure each spec on each number of ranks, with the options of `add_scaling`.

    Raises UserError for a wrong spec or option before anything is measured, RunFailed where ranks fail.
    """
    ranks = parse_ranks(args.ranks)
    if find_mpirun() is None:
        raise UserError("no mpirun to start ranks with; load an MPI module, or run `summit-train build-horovod`")
    for path, count in itertools.product(paths, ranks):
        experiment_of(load_spec(path, [*overrides, f"scale.gpus={count}"]), count, synthetic=args.synthetic)
    networks: list[Values] = []
    for path in paths:
        words = [path, *overrides, "--peak", "0", "--repeats", "1", "--steps", str(args.steps)]
        words += ["--warm-up", str(args.warm_up)]
        if args.synthetic:
            words.append("--synthetic")
        found: dict[int, list[Values]] = {count: [] for count in ranks}
        measurements = {count: partial(measure_ranks, words, count) for count in ranks}
        for count, facts in measure.in_turn(measurements, args.repeats):
            spec = facts["specs"][0]
            found[count].append(spec)
            speed = spec["clips_per_second"]["median"]
            tell(f"{spec['name']}: round {len(found[count])}, {count} ranks: {speed:.3f} clips/s")
        last = found[ranks[-1]][-1] | {"repeats_s": None}
        networks.append({"label": last["name"], "rows": scaling_rows(found), "spec": last})
    first = networks[0]["spec"]
    clips = "random clips" if args.synthetic else f"clips of {first['clips']}"
    settings = {"clips_per_rank": first["clips_per_gpu"], "clips": clips}
    settings |= asdict(measure.Turns(args.repeats, args.steps, args.warm_up))
    return {"environment": facts["environment"], "settings": settings, "networks": networks}


def parse_ranks(text: str) -> list[int]:
    """Read '1,2,4' as sorted numbers. Raises UserError for anything else."""
    words = text.split(",")
    ranks = sorted({int(word) for word in words if word.isdecimal() and int(word) > 0})
    if len(ranks) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--ranks must be two or more numbers above 0, got {text}; try 1,2,4")
    return ranks


def measure_ranks(words: Sequence[str], ranks: int) -> Facts:
    """Run `bench step` with these arguments on `ranks` ranks; return its JSON. Raises RunFailed where they fail.

    One rank is a process without MPI and Horovod, as a user starts it. A rank has one thread.
    """
    step = [sys.executable, "-m", "summit_train", "bench", "step", *words, f"scale.gpus={ranks}", "--json"]
    launcher = [] if ranks == 1 else mpirun_command(find_mpirun() or "mpirun", ranks)
    try:
        return answer([*launcher, *step], _TIMEOUT, mpi_environment(os.environ))
    except RunFailed as error:
        raise RunFailed(f"bench step on {counted(ranks, 'rank')}: {error}") from error


def scaling_rows(found: Mapping[int, Sequence[Values]]) -> list[Values]:
    """Return one row a number of ranks. found[n]: the spec as n ranks measured it in each round.

    efficiency: speed over the speed of the fewest ranks times the ratio of the ranks, round by round (the paper's
    "scalability", section 3 c). compute_ratio: forward and backward pass over those of the fewest ranks, which shows
    how ranks share cores and memory. exposed: ranks wait for the allreduce, or for each other.
    """
    fewest = min(found)
    speeds = {ranks: [spec["clips_per_second"]["median"] for spec in specs] for ranks, specs in found.items()}
    ideal = {ranks: [ranks / fewest * speed for speed in speeds[fewest]] for ranks in found}
    compute = {
        ranks: [sum(spec["phases_s"][phase]["median"] for phase in ("forward", "backward")) for spec in specs]
        for ranks, specs in found.items()
    }
    return [
        {
            "ranks": ranks,
            "clips_per_second": measure.spread(speeds[ranks]),
            "efficiency": measure.spread(measure.pair_ratios(speeds[ranks], ideal[ranks])),
            "step_s": measure.spread([spec["step_s"]["median"] for spec in specs]),
            "exposed_allreduce_s": measure.spread([spec["phases_s"]["allreduce"]["median"] for spec in specs]),
            "exposed_share": measure.spread([spec["shares"]["allreduce"] for spec in specs]),
            "compute_ratio": measure.spread(measure.pair_ratios(compute[ranks], compute[fewest])),
        }
        for ranks, specs in sorted(found.items())
    ]


def as_text(values: Values) -> str:
    settings = values["settings"]
    batch = f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}"
    lines = [f"machine: {machine_text(values['environment'])}", f"{batch}; median (min .. max) of the rounds"]
    head = ("ranks", "clips/s", "% of ideal", "step s", "exposed allreduce s", "of the step", "compute, times")
    for network in values["networks"]:
        cells = [
            (
                str(row["ranks"]),
                measure.spread_text(row["clips_per_second"]),
                measure.spread_text(row["efficiency"], ".1f", 100),
                measure.spread_text(row["step_s"]),
                measure.spread_text(row["exposed_allreduce_s"]),
                share(row["exposed_share"]["median"]),
                measure.spread_text(row["compute_ratio"]),
            )
            for row in network["rows"]
        ]
        lines.append(f"\n{network['label']}:\n{TextTable([head, *cells], indent='  ')}")
    lines.append(
        "\n% of ideal: speed over the first row's times the ranks. exposed allreduce: ranks wait for the sum, or for\n"
        "each other. compute: forward and backward pass over the first row's; above 1 ranks share memory or cores."
    )
    return "\n".join(lines)
