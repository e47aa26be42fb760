"""Where the time of a run went, over all its jobs: from the start of the first job to the last record of training.

    goodput = time of the steps whose update is in the weights / all of that time

The final evaluation and the report come after it. A restart in the same job costs the time from the last record before
the failure to the start of the new processes, and their start-up. Other unrecorded time, such as that of a job between
its last record and the moment when it was killed, counts as lost between the jobs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from summit_train.core import run_log
from summit_train.core.text import duration, percent
from summit_train.report.records import RunRecord


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a run by what they were spent on; each second counts once.

    steps: whose update is in the weights, with their wait for data. lost_steps: done again by a later job, or skipped.
    checkpoints: while the steps waited. startup: from the start of a job, or of a restart in it, to the first step.
    restarts: from the last record before a failure until the same job started the ranks again. other: what remains.
    """

    steps: float
    lost_steps: float
    checkpoints: float
    validations: float
    startup: float
    restarts: float
    between_jobs: float
    other: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def goodput(self) -> float:
        return self.steps / self.total

    @property
    def goodput_in_jobs(self) -> float:
        """Return the goodput without the time between the jobs, in which the run has no processes."""
        return self.steps / (self.total - self.between_jobs)


def restarts(run_path: Path) -> list[str]:
    """Return why ranks were started again within jobs, oldest first, as RUN/job/restarts says."""
    path = run_path / "job/restarts"
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    return [why for line in lines if (why := line.partition(" ")[2])]


def time_spent(run: RunRecord) -> TimeSpent | None:
    """Add up the seconds by kind; None without a step, and for a log of a version that wrote no times."""
    log = [record for record in run.log.records if not isinstance(record, run_log.DoneRecord | run_log.LogLostRecord)]
    while log and isinstance(log[-1], run_log.StartRecord):  # such as that of a job that only evaluates
        log.pop()
    times = [time for record in log if (time := run_log.number(record.time)) is not None]
    if not run.log.steps or len(times) < len(log) or not isinstance(log[0], run_log.StartRecord):
        return None
    began = dict[int, float]()
    jobs = dict[int, str | None]()
    for i, record in enumerate(log):
        if isinstance(record, run_log.StartRecord):
            began[i] = times[i] - (record.startup_s or 0.0)
            if record.job is not None and record.job.isdecimal() and record.job not in jobs.values():
                began[i] = min(began[i], float(record.job))  # of the script: the ranks may have failed before a record
            jobs[i] = record.job
    startup = sum(times[i] - began[i] for i in began)
    in_jobs = 0.0
    between = 0.0
    for earlier, later in pairwise(began):
        gap = max(0.0, began[later] - times[later - 1])
        if jobs[later] is not None and jobs[later] == jobs[earlier]:
            in_jobs += gap
        else:
            between += gap
    all_steps = sum(run_log.number(record.step_s) or 0.0 for record in log if isinstance(record, run_log.StepRecord))
    steps = sum(run_log.number(step.step_s) or 0.0 for step in run.log.steps if not step.skipped)
    checkpoints = sum(
        run_log.number(record.seconds) or 0.0 for record in log if isinstance(record, run_log.CheckpointRecord)
    )
    validations = sum(record.seconds or 0.0 for record in log if isinstance(record, run_log.EvalRecord))
    known = all_steps + checkpoints + validations + startup + in_jobs + between
    other = max(0.0, times[-1] - began[0] - known)
    return TimeSpent(steps, all_steps - steps, checkpoints, validations, startup, in_jobs, between, other)


def goodput_values(run_path: Path) -> dict[str, Any]:
    """Return the goodput and the seconds by kind for eval.json; {} where they are not known."""
    spent = time_spent(RunRecord(run_path)) if (run_path / "metrics.jsonl").exists() else None
    if spent is None:
        return {}
    return {"goodput": spent.goodput, "goodput_in_jobs": spent.goodput_in_jobs, "time_s": asdict(spent)}


def goodput_rows(spent: TimeSpent) -> list[tuple[str, str, str]]:
    """Return (what, time, share of all) for the report."""
    names = {
        "steps": "steps that count",
        "lost_steps": "steps done again or skipped",
        "checkpoints": "waiting for checkpoints",
        "validations": "validations",
        "startup": "start-up",
        "restarts": "from failures to restarts in a job",
        "between_jobs": "between the jobs",
        "other": "other",
    }
    seconds_of = asdict(spent)
    return [(names[kind], duration(s), percent(100 * s / spent.total)) for kind, s in seconds_of.items()]
