"""Start the runs of a sweep: hand them to a scheduler, or run them here one after another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from summit_train.cluster.job import Job
from summit_train.cluster.site import Site
from summit_train.cluster.submit import chain, check_scheduler, folders_to_stage, write_job
from summit_train.files import locked, write_text
from summit_train.source import to_yaml
from summit_train.spec import dump_spec
from summit_train.sweep.figure import write_sweep
from summit_train.sweep.grid import Sweep, sweep_texts
from summit_train.sweep.planning import PlannedRun
from summit_train.sweep.status import JobState, read_rows, table, to_start
from summit_train.text import duration, mean_std

Say = Callable[[str], None]

_STOPPED, _INTERRUPTED = 85, 130
_STOP_STATUSES = (_STOPPED, 128 + signal.SIGTERM, _INTERRUPTED)


def submit_runs(
    sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState], say: Say
) -> None:
    """Submit the missing and failed runs: one job array if all have the same node count, else a job for each run."""
    check_scheduler(site)
    with locked(sweep.folder / "submit.lock"):
        runs = _runs_to_start(sweep, planned, jobs, say)
        if not runs:
            return
        write_text(sweep.folder / "site.yaml", to_yaml(site.model_dump(mode="json")))
        _submit(sweep, site, [runs] if len({run.nodes for run in runs}) == 1 else [[run] for run in runs], say)
    say(f"summit-train sweep {sweep.folder} --status    shows them, and writes table and figure")


def run_here(sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState], say: Say) -> int:
    """Run the missing and failed runs one after another; return 0, 1 if any failed, 85 or 130 if asked to stop."""
    runs = _runs_to_start(sweep, planned, jobs, say)
    began, num_failed = time.monotonic(), 0
    for i, run in enumerate(runs, 1):
        say(f"[{i}/{len(runs)}] {run.name}: {run.plan.total_steps:,} steps, {run.plan.ranks} ranks")
        start = time.monotonic()
        status, signals = _run_command(_command(site, run))
        row = next(row for row in write_sweep(sweep, jobs) if row.name == run.name)
        if signals or status in _STOP_STATUSES:
            say(f"{sweep.name}: stopped at {run.name}; started again, the sweep goes on there")
            return _INTERRUPTED if signal.SIGINT in signals or status == _INTERRUPTED else _STOPPED
        num_failed += status != 0
        outcome = f"failed with exit status {status}" if status else f"top-1 {mean_std(row.top1, row.top1_std)}"
        now = time.monotonic()
        left = f"; about {duration((now - began) / i * (len(runs) - i))} left" if i < len(runs) else ""
        say(f"[{i}/{len(runs)}] {run.name}: {outcome} in {duration(now - start)}{left}")
    say(table(write_sweep(sweep, jobs)))
    say(f"{sweep.name}: {num_failed} of {len(runs)} failed; table and figure are in {sweep.folder}")
    return 1 if num_failed else 0


def _runs_to_start(
    sweep: Sweep, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState], say: Say
) -> list[PlannedRun]:
    """Return the failed and missing runs, name the others, and write the sweep into its folder."""
    rows = read_rows(sweep, jobs)
    names = set(to_start(rows))
    others = [f"{row.name} ({row.state})" for row in rows if row.name not in names]
    if others:
        say(f"{sweep.name}: not started again: {', '.join(others)}")
    for name, text in sweep_texts(sweep).items():
        write_text(sweep.folder / name, text)
    return [run for run in planned if run.name in names]


def _submit(sweep: Sweep, site: Site, groups: Sequence[Sequence[PlannedRun]], say: Say) -> None:
    """Submit a job array, a job or a chain of jobs for each group. With a cap, group i waits for group i - at_once."""
    last: list[str] = []
    for i, runs in enumerate(groups):
        job = _job(sweep, site, runs)
        folder = sweep.folder.absolute() / "job" if job.is_array else None
        script = write_job(site, job, [run.spec for run in runs], folder)
        after = last[i - sweep.at_once] if sweep.at_once and i >= sweep.at_once else None
        cost = runs[0].cost
        ids = chain(site, job, script, cost.jobs if cost and not job.is_array else 1, after)
        last.append(ids[-1])
        cap = f", {sweep.at_once} at once" if sweep.at_once else ""
        what = (
            f"job array {ids[0]} of {len(runs)} runs{cap}"
            if job.is_array
            else f"job {' '.join(ids)} on {job.nodes} nodes"
        )
        say(f"{job.name}: {what}; the script is {script}")


def _job(sweep: Sweep, site: Site, runs: Sequence[PlannedRun]) -> Job:
    return Job(
        name=runs[0].name if len(runs) == 1 else sweep.name,
        runs=tuple(run.spec.run_path.absolute() for run in runs),
        nodes=runs[0].nodes or 1,
        walltime_minutes=max((run.cost.walltime_minutes for run in runs if run.cost), default=60),
        at_once=sweep.at_once,
        stage=folders_to_stage(site, [run.spec for run in runs]),
        sweep=sweep.folder.absolute(),
    )


def _command(site: Site, run: PlannedRun) -> list[str]:
    """Return the command of a run here: the site's script, or the program alone where one rank needs no MPI."""
    spec_file = run.spec.run_path.absolute() / "job/spec.yaml"
    if run.plan.ranks == 1:
        write_text(spec_file, dump_spec(run.spec))
        return [sys.executable, "-m", "summit_train", "train", str(spec_file)]
    job = Job(run.name, (spec_file.parents[1],), 1, site.default_walltime)
    sized = site.model_copy(update={"ranks_per_node": run.plan.ranks})
    return ["bash", str(write_job(sized, job, [run.spec]))]


def _run_command(command: Sequence[str]) -> tuple[int, set[int]]:
    """Run a command to its end and pass SIGTERM and SIGUSR2 on to it; return its exit status and the signals received.

    The terminal sends SIGINT to the command itself. The handler only keeps this process alive.
    """
    received: set[int] = set()

    def on_signal(number: int, _: FrameType | None) -> None:
        received.add(number)
        if number != signal.SIGINT:
            process.terminate()

    with subprocess.Popen(command) as process:
        previous = {
            number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
        }
        try:
            return process.wait(), received
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
