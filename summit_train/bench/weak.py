"""Weak scaling on this machine: the same clips a rank on more and more ranks. Each start is a `bench step`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from summit_train.bench.measure import MeasureError, in_turn, pair_ratios, spread
from summit_train.core.errors import RunFailed
from summit_train.core.processes import Facts, ProbeError, answer, find_mpirun, mpi_environment, mpirun_command

Values = dict[str, Any]
_TIMEOUT = 1800.0  # seconds for the ranks of one measurement


class RanksError(RunFailed):
    """Ranks were started and measured nothing."""


def measure_ranks(words: Sequence[str], threads: int, ranks: int) -> Facts:
    """Return what `bench step` with these arguments measures on `ranks` ranks. Raises RanksError where they fail.

    One rank is a process without MPI and Horovod, as a user starts it.
    """
    step = [sys.executable, "-m", "summit_train", "bench", "step", *words, f"scale.gpus={ranks}"]
    launcher = [] if ranks == 1 else mpirun_command(_mpirun(), ranks)
    environment = mpi_environment(os.environ) | {"OMP_NUM_THREADS": str(threads)}
    try:
        return answer([*launcher, *step, "--json"], _TIMEOUT, environment)
    except ProbeError as error:
        raise RanksError(f"bench step on {ranks} ranks: {error}") from error


def weak_scaling(
    measure: Callable[[int], Facts], ranks: Sequence[int], repeats: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure every number of ranks once a round; return spec, environment and rows as JSON values."""
    found: dict[int, list[Values]] = {count: [] for count in ranks}
    last: dict[int, Facts] = {}
    for count, facts in in_turn({count: partial(measure, count) for count in ranks}, repeats):
        (spec,), last[count] = facts["specs"], facts
        found[count].append(spec)
        speed = spec["clips_per_second"]["median"]
        tell(f"round {len(found[count])} of {repeats}, {count} ranks: {speed:.3f} clips/s")
    most = last[max(ranks)]
    spec = most["specs"][0] | {"repeats_s": None}
    return {"spec": spec, "environment": most["environment"], "rows": scaling_rows(found)}


def parse_ranks(text: str) -> list[int]:
    """Read '1,2,4' as sorted numbers. Raises MeasureError for anything else, and where there is no mpirun."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise MeasureError(f"--ranks {text}: numbers above 0 with commas are wanted, such as 1,2,4")
    ranks = sorted({int(word) for word in words})
    if len(ranks) < 2:
        raise MeasureError(f"--ranks {text}: two numbers at least are wanted, the first is what the others are held to")
    _mpirun()
    return ranks


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
            "clips_per_second": spread(speeds[ranks]),
            "efficiency": spread(pair_ratios(speeds[ranks], ideal[ranks])),
            "step_s": spread([spec["step_s"]["median"] for spec in specs]),
            "exposed_allreduce_s": spread([spec["phases_s"]["allreduce"]["median"] for spec in specs]),
            "exposed_share": spread([spec["shares"]["allreduce"] for spec in specs]),
            "compute_ratio": spread(pair_ratios(compute[ranks], compute[fewest])),
        }
        for ranks, specs in sorted(found.items())
    ]


def _mpirun() -> str:
    mpirun = find_mpirun()
    if mpirun is None:
        raise MeasureError("no mpirun to start ranks with: load your cluster's MPI module, or run `make setup`")
    return mpirun
