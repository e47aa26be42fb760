"""`train --trace FROM:TO`: what every rank did in some steps, on one clock, as a file that Perfetto opens.

The file is JSON in the Trace Event Format: a process for each rank, with a thread of phases and one for each message.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.files import replacing
from summit_train.core.result import TextTable
from summit_train.core.text import counted
from summit_train.training.metrics import RunLog
from summit_train.training.run import Run
from summit_train.training.timer import PHASES, Mark, StepTimer, idle_mark

WAIT = "allreduce"  # the phase in which a rank waits for slower ones
_MOST_STEPS = 100
_ROUNDS = 32  # messages to and from rank 0 that compare the clocks


def traced_steps(text: str | None, total_steps: int) -> range:
    """Return the steps of FROM:TO, both included, as metrics.jsonl counts them. Raises UserError."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= total_steps or last - first >= _MOST_STEPS:
        right = f"at most {_MOST_STEPS} of the steps 1 to {total_steps}"
        raise UserError(f"--trace must be FROM:TO, {right}, got {text!r}; try {max(1, total_steps - 4)}:{total_steps}")
    return range(first, last + 1)


def compare_clocks(world: World, now: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Return the offset from this rank's clock to rank 0's, and its largest error, in seconds. Collective.

    Rank 0 reads its clock T after every rank has sent and before any receives, so each rank reads its own before (S)
    and after (R): S + offset <= T <= R + offset. Every round narrows the interval; its middle is the offset.
    """
    low = -math.inf
    high = math.inf
    for _ in range(_ROUNDS):
        sent = now()
        world.gather(None)
        first = world.broadcast(now())
        low = max(low, first - now())
        high = min(high, first - sent)
    return (0.0, 0.0) if world.rank == 0 else ((low + high) / 2, (high - low) / 2)


class Slice(NamedTuple):
    """A phase of a rank from `start` to `end`, in seconds of rank 0's clock. thread: "phases", or a message's name."""

    thread: str
    name: str
    step: int
    start: float
    end: float
    num_bytes: int | None = None


@dataclass(frozen=True)
class RankTrace:
    """The slices of one rank. offset: added to its clock; error: of the offset; both in seconds."""

    who: str
    offset: float
    error: float
    slices: list[Slice]
    virtual_gpus: int = 1


def slices_of(step: StepTimer, now: Mark, offset: float) -> Iterator[Slice]:
    """Yield a step, its phases and messages, and the wait for each message; longer slices before those within them."""

    def clock(mark: Mark) -> float:
        return mark.host_time(now) + offset

    number = step.number
    laps = [(phase, clock(mark)) for phase, mark in step.laps]
    yield Slice("phases", f"step {number}", number, laps[0][1], laps[-1][1])
    yield from (Slice("phases", phase, number, start, end) for (_, start), (phase, end) in pairwise(laps))
    waits_since = next((start for (_, start), (phase, _) in pairwise(laps) if phase == WAIT), math.inf)
    for message, mark in step.arrived.items():
        sent, num_bytes = step.sent[message]
        start = clock(sent)
        end = clock(mark)
        yield Slice(message, message, number, start, end, num_bytes)
        yield Slice(message, "wait", number, min(end, max(start, waits_since)), end)
        waits_since = end


@dataclass(frozen=True)
class SlowestRank:
    """The slowest rank in a phase. Seconds are means over the steps that have the phase; `median_s` is over the ranks.

    In the exchange it is the rank that waits least: the others wait for it.
    """

    phase: str
    median_s: float
    rank: int
    seconds: float
    times_slowest: int
    steps: int


def slowest_ranks(ranks: Sequence[RankTrace]) -> list[SlowestRank]:
    """Return the slowest rank of each phase that was recorded, in a step's order."""
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * len(ranks)))
    for rank, trace in enumerate(ranks):
        for part in trace.slices:
            if part.thread == "phases":
                seconds[part.name][part.step][rank] += part.end - part.start
    rows = []
    for phase in (*PHASES, "checkpoint"):
        if phase not in seconds:
            continue
        steps = list(seconds[phase].values())
        means = [fmean(of_rank) for of_rank in zip(*steps, strict=True)]
        slowest = min if phase == WAIT else max
        rank = means.index(slowest(means))
        times = sum(step[rank] == slowest(step) for step in steps)
        rows.append(SlowestRank(phase, median(means), rank, means[rank], times, len(steps)))
    return rows


def slowest_text(ranks: Sequence[RankTrace], slowest: Sequence[SlowestRank]) -> list[str]:
    """Return the table of the slowest rank by phase and, of several ranks, for which one the others wait, and why."""
    rows = [("phase", "slowest rank", "its time", "median", "slowest in")]
    for row in slowest:
        who = ranks[row.rank].who + (", which waits least" if row.phase == WAIT and len(ranks) > 1 else "")
        often = f"{row.times_slowest} of {counted(row.steps, 'step')}"
        rows.append((row.phase, who, f"{1000 * row.seconds:.1f} ms", f"{1000 * row.median_s:.1f} ms", often))
    lines = [str(TextTable(rows, left=2, indent="  "))]
    for last in (row for row in slowest if row.phase == WAIT and len(ranks) > 1):
        work = [row for row in slowest if row.phase != WAIT and row.rank == last.rank]
        why = max(work, key=lambda row: (row.seconds - row.median_s) * row.steps, default=None)
        most = f", most by its {why.phase}: {1000 * (why.seconds - why.median_s):.1f} ms over the median" if why else ""
        often = f"the last in {last.times_slowest} of {counted(last.steps, 'step')}"
        late_ms = 1000 * (last.median_s - last.seconds)
        shares = [rank.virtual_gpus for rank in ranks]
        if min(shares) < (share := shares[last.rank]):
            most += f"; it has {counted(share, 'virtual GPU')}, others have {min(shares)}"
        lines.append(f"the others wait {late_ms:.1f} ms a step for {ranks[last.rank].who}, {often}{most}")
    return lines


def write_trace(path: Path, ranks: Sequence[RankTrace], facts: dict[str, Any]) -> None:
    """Write the ranks' slices as trace events, in whole microseconds since the first. facts: about the whole trace.

    A process has the number rank + 1, as 0 is the kernel's to Perfetto; so has its thread of phases, the main one.
    """
    threads = list(dict.fromkeys(["phases", *(part.thread for trace in ranks for part in trace.slices)]))
    origin = min(part.start for trace in ranks for part in trace.slices)

    def events() -> Iterator[dict[str, Any]]:
        for pid, trace in enumerate(ranks, 1):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": trace.who}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
            tids = {name: pid + number * len(ranks) for number, name in enumerate(threads)}
            for name, tid in tids.items():
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for part in trace.slices:
                start, end = (round(1e6 * (second - origin)) for second in (part.start, part.end))
                args = {"step": part.step} | ({} if part.num_bytes is None else {"bytes": part.num_bytes})
                event = {"ph": "X", "pid": pid, "tid": tids[part.thread], "name": part.name}
                yield event | {"ts": start, "dur": end - start, "args": args}

    with replacing(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n'.encode())
        for number, event in enumerate(events()):
            file.write(b",\n" * (number > 0) + json.dumps(event).encode())
        file.write(b"\n]}\n")


class Trace:
    """Records the given steps and writes them to RUN/trace/."""

    def __init__(self, steps: range, run: Run, log: RunLog | None) -> None:
        self._steps = steps
        self._run = run
        self._log = log
        self._timers = list[StepTimer]()
        if log is not None and steps[-1] <= run.start_step:
            log.say(f"trace: steps {steps[0]} to {steps[-1]} were done before this start; nothing is traced")

    def add(self, timer: StepTimer) -> None:
        """Keep the timer of a step, if it is traced."""
        if timer.number in self._steps:
            self._timers.append(timer)

    def end_step(self, step: int) -> None:
        """Write the file after the last traced step, which a growing batch may have left out. Collective."""
        if step >= self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Write what is recorded, if anything, and show the slowest ranks. Collective."""
        world = self._run.world
        steps = self._timers
        self._timers = []
        if not steps:
            return
        self._run.watchdog.at("writing the trace", waits=world.rank > 0)
        now = idle_mark(self._run.device)
        offset, error = compare_clocks(world)
        slices: list[Any] = [tuple(part) for step in steps for part in slices_of(step, now, offset)]
        virtual_gpus = len(self._run.plan.virtual_gpus_of(world.rank))
        gathered = world.gather((world.who, offset, error, slices, virtual_gpus)) or []
        ranks = [
            RankTrace(who, offset, error, [Slice(*row) for row in rows], virtual_gpus)
            for who, offset, error, rows, virtual_gpus in gathered
        ]
        first = steps[0].number
        last = steps[-1].number
        path = self._run.spec.run_path / "trace" / f"steps_{first}-{last}.json"
        slowest = slowest_ranks(ranks)
        facts = {
            "steps": [first, last],
            "clock_offset_s": [trace.offset for trace in ranks],
            "clock_error_s": [trace.error for trace in ranks],
            "slowest": [asdict(row) for row in slowest],
        }
        if self._log is not None:  # rank 0's: a full disk costs the trace and not the run
            error_ms = 1000 * max(trace.error for trace in ranks)
            try:
                write_trace(path, ranks, facts)
                self._log.say(f"trace: {path}, for ui.perfetto.dev; clocks agree to {error_ms:.3f} ms")
            except OSError as error:
                self._log.say(f"trace: {path} could not be written: {error.strerror}")
            for line in slowest_text(ranks, slowest):
                self._log.say(line)
