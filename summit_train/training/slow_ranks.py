"""Name a rank that is slower than the others while the run continues.

A step is as fast as its slowest rank, and all steps look alike to the others: they wait. So every hundredth step the
ranks compare the seconds in which each waits for no other rank:

    (data wait + forward + backward + other) / micro-batches + update / updates

A rank is slow where that is over 1.3 times the median of the ranks in three consecutive windows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import NamedTuple

import torch

from summit_train.core.comm.launch import node_name
from summit_train.core.errors import UserError
from summit_train.core.run_folder import EXCLUDE_SLOW, name_bad_nodes, spares
from summit_train.core.run_log import RankTimesRecord, SlowRankRecord
from summit_train.training.metrics import RunLog
from summit_train.training.run import Run
from summit_train.training.timer import StepTimer

WINDOW = 100  # steps
FACTOR = 1.3
WINDOWS = 3  # consecutive ones
FEWEST_RANKS = 3  # of fewer the median says nothing


class RankTimes(NamedTuple):
    """The seconds of a rank for each micro-batch, without its waits for other ranks."""

    compute: float
    data_wait: float


def rank_times(timer: StepTimer, micro_batches: int) -> RankTimes:
    """Return the rank's seconds in a step that the device has finished, whatever its number of micro-batches.

    A step has one update, or one of each learner. Work after it, such as a checkpoint, does not count.
    """
    seconds = timer.seconds()
    updates = max(1, sum(phase == "update" for phase, _ in timer.laps))
    passes = seconds["forward"] + seconds["backward"] + seconds["other"]
    return RankTimes(passes / micro_batches + seconds["update"] / updates, seconds["data_wait"] / micro_batches)


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow in WINDOWS windows. part: of its seconds, the kind that exceeds the median the most."""

    rank: int
    part: str
    seconds: float
    median_s: float

    def text(self, who: str, ranks: int, step: int) -> str:
        """Return the line for people, after `step`."""
        part = self.part.replace("_", " ")
        since = max(1, step - WINDOW * WINDOWS + 1)
        own = f"in the last {WINDOW} it took {1000 * self.seconds:.3g} ms of its own for each micro-batch"
        much = f"{self.seconds / self.median_s:.2f} times the median of {ranks} ranks"
        return f"{who} is slow in steps {since:,} to {step:,}, mostly in its {part}: {own}, {much}"


class SlowRankDetector:
    """Decides which ranks are slow: in WINDOWS consecutive windows, each rank once."""

    def __init__(self) -> None:
        self._consecutive: dict[int, int] = {}  # slow windows up to the last one, by rank
        self._reported = set[int]()

    def add(self, window: Sequence[RankTimes]) -> list[SlowRank]:
        """Take in the ranks' seconds in a window; return the ranks to report now."""
        totals = [sum(times) for times in window]
        median_s = median(totals)
        typical = list(map(median, zip(*window, strict=True)))
        slow = [rank for rank, seconds in enumerate(totals) if seconds > FACTOR * median_s]
        self._consecutive = {rank: self._consecutive.get(rank, 0) + 1 for rank in slow}
        new = [rank for rank in slow if self._consecutive[rank] >= WINDOWS and rank not in self._reported]
        self._reported.update(new)
        reports = []
        for rank in new:
            excess = [seconds - usual for seconds, usual in zip(window[rank], typical, strict=True)]
            part = RankTimes._fields[excess.index(max(excess))]
            reports.append(SlowRank(rank, part, totals[rank], median_s))
        return reports


class SlowRanks:
    """Compares the ranks after each step whose number is a multiple of WINDOW.

    The sum over the ranks begins when the last step of a window is read, and is read with the next step: no step waits
    for it. All ranks have the same table then, and report the same ranks. Fewer than three ranks are not compared.
    """

    def __init__(self, run: Run, log: RunLog | None) -> None:
        self._run = run
        self._log = log
        self._detector = SlowRankDetector()
        self._steps = list[RankTimes]()
        self._spares = spares(run.spec.run_path).replaceable if log and EXCLUDE_SLOW in os.environ else 0
        self._pending: tuple[int, torch.Tensor, Callable[[], None]] | None = None

    def end_step(self, timer: StepTimer, micro_batches: int) -> None:
        """Take in a step that the device has finished. Collective at the last step of a window and the one after."""
        world = self._run.world
        if world.size < FEWEST_RANKS:
            return
        self.finish()
        self._steps.append(rank_times(timer, micro_batches))
        step = timer.number
        if step % WINDOW:
            return
        table = torch.zeros(world.size, len(RankTimes._fields), dtype=torch.float64)
        table[world.rank] = torch.tensor(list(map(fmean, zip(*self._steps, strict=True))), dtype=table.dtype)
        self._steps.clear()
        self._pending = step, table, world.start_total(table, "slow_ranks")

    def finish(self) -> None:
        """Read the table of the last window, if it was not yet, and name the ranks that are slow. Collective."""
        if self._pending is None:
            return
        step, table, wait = self._pending
        self._pending = None
        wait()
        slow = self._detector.add([RankTimes(*row) for row in table.tolist()])
        if (log := self._log) is not None:
            compute_s, data_wait_s = (tuple(float(f"{s:.3g}") for s in row) for row in table.T.tolist())
            log.write(RankTimesRecord(step=step, compute_s=compute_s, data_wait_s=data_wait_s))
        if slow:
            self._report(step, slow)

    def _report(self, step: int, slow: Sequence[SlowRank]) -> None:
        world = self._run.world
        log = self._log
        ranks = world.gather((world.who, node_name(os.environ, world.host))) or []
        if log is None:
            return
        for report in slow:
            who, node = ranks[report.rank]
            log.write(SlowRankRecord(step=step, host=node, **asdict(report)))
            text = report.text(who, world.size, step)
            log.warn(step, text)
            if self._spares > 0:
                try:
                    if name_bad_nodes(self._run.spec.run_path, {node: text}):
                        self._spares -= 1
                        log.say(f"{node} is in job/bad_nodes: the next start leaves it out")
                except UserError as error:  # a full disk ends no run here
                    log.say(str(error))
