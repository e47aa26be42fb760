"""Weak scaling on this machine: the same clips a rank on more and more ranks. Each start is a `bench step`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from summit_train.errors import RunFailed
from summit_train.processes import Facts, ProbeError, answer, find_mpirun, mpi_environment, mpirun_command
from summit_train.scaling.measure import MeasureError, in_turn, pair_ratios, spread


class RanksError(RunFailed):
    """Ranks were started and measured nothing."""


@dataclass(frozen=True)
class Starts:
    """How each measurement starts: the arguments of `bench step`, threads a rank, and the limit in seconds."""

    words: tuple[str, ...]
    threads: int = 1
    timeout: float = 1800.0

    def measure(self, ranks: int) -> Facts:
        """Start `ranks` ranks and return what they measured. Raises RanksError where they fail.

        One rank is a process without MPI and Horovod, as a user starts it.
        """
        step = [sys.executable, "-m", "summit_train", "bench", "step", *self.words, f"scale.gpus={ranks}"]
        launcher = [] if ranks == 1 else mpirun_command(_mpirun(), ranks)
        environment = mpi_environment(os.environ) | {"OMP_NUM_THREADS": str(self.threads)}
        try:
            return answer([*launcher, *step, "--json"], self.timeout, environment)
        except ProbeError as error:
            raise RanksError(f"bench step on {ranks} ranks: {error}") from error


def weak_scaling(starts: Starts, ranks: Sequence[int], repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every number of ranks once a round; return spec, environment and rows as JSON values."""
    found: dict[int, list[Facts]] = {count: [] for count in ranks}
    for count, facts in in_turn({count: partial(starts.measure, count) for count in ranks}, repeats):
        found[count].append(facts)
        speed = _only(facts)["clips_per_second"]["median"]
        tell(f"round {len(found[count])} of {repeats}, {count} ranks: {speed:.3f} clips/s")
    last = found[max(ranks)][-1]
    spec = _only(last) | {"repeats_s": None}
    return {"spec": spec, "environment": last["environment"], "rows": scaling_rows(found)}


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


def scaling_rows(found: Mapping[int, Sequence[Facts]]) -> list[dict[str, Any]]:
    """Return one row a number of ranks. found[n]: what n ranks measured in each round.

    efficiency: speed over the speed of the fewest ranks times the ratio of the ranks, round by round (the paper's
    "scalability", section 3 c). compute_ratio: forward and backward pass over those of the fewest ranks, which shows
    how ranks share cores and memory. exposed: ranks wait for the allreduce, or for each other.
    """
    fewest = min(found)
    base = [_only(facts) for facts in found[fewest]]
    rows = []
    for ranks, rounds in sorted(found.items()):
        specs = [_only(facts) for facts in rounds]
        speeds, base_speeds = (_medians(some, "clips_per_second") for some in (specs, base))
        ideal = [ranks / fewest * speed for speed in base_speeds]
        exposed = [spec["phases_s"]["allreduce"]["median"] for spec in specs]
        rows.append(
            {
                "ranks": ranks,
                "clips_per_second": spread(speeds),
                "efficiency": spread(pair_ratios(speeds, ideal)),
                "step_s": spread(_medians(specs, "step_s")),
                "exposed_allreduce_s": spread(exposed),
                "exposed_share": spread([spec["shares"]["allreduce"] for spec in specs]),
                "compute_ratio": spread(pair_ratios(_compute(specs), _compute(base))),
            }
        )
    return rows


def _only(facts: Facts) -> dict[str, Any]:
    (spec,) = facts["specs"]
    return dict(spec)


def _medians(specs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [spec[name]["median"] for spec in specs]


def _compute(specs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [spec["phases_s"]["forward"]["median"] + spec["phases_s"]["backward"]["median"] for spec in specs]


def _mpirun() -> str:
    mpirun = find_mpirun()
    if mpirun is None:
        raise MeasureError("no mpirun to start ranks with: load your cluster's MPI module, or run `make setup`")
    return mpirun
