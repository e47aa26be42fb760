"""How the runs of a sweep are started: handed to a scheduler, or here, one after another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from summit_train.cluster.estimate import Estimate, check_ranks, estimate
from summit_train.cluster.job import Job, JobError
from summit_train.cluster.site import Site, SiteError
from summit_train.cluster.submit import chain, check_scheduler, record, submit, write_job
from summit_train.commands.plan import count_clips
from summit_train.commands.staging import folders_to_stage
from summit_train.files import locked, write_text
from summit_train.plan import Plan, PlanError, make_plan
from summit_train.report.sweep import JobState, SweepRow, read_rows, table, to_start
from summit_train.report.sweep_figure import write_sweep
from summit_train.report.tables import duration, mean_std
from summit_train.source import to_yaml
from summit_train.spec import Spec, dump_spec
from summit_train.sweep import Sweep, sweep_texts

STOPPED, INTERRUPTED = 85, 130
_STOPS = (STOPPED, 128 + signal.SIGTERM, INTERRUPTED)  # of a run that somebody asked to stop


@dataclass(frozen=True)
class PlannedRun:
    """A run with its numbers; nodes and cost are None where no site was named."""

    name: str
    spec: Spec
    nodes: int | None
    plan: Plan
    cost: Estimate | None

    def values(self) -> dict[str, Any]:
        """The numbers as one JSON object."""
        site = {} if self.cost is None else {"site": self.cost.values()}
        return {"nodes": self.nodes, **self.plan.values(), **site}


def plan_runs(sweep: Sweep, site: Site | None, clips: int | None, walltime: int | None) -> list[PlannedRun]:
    """The plan of every run on the site's nodes; without a site, one rank a virtual GPU.

    Raises a ValueError that begins with the run's name where it does not fit the site or its clips.
    """
    counted: dict[str, int] = {}
    planned = []
    for run in sweep.runs:
        train = run.spec.data.train
        try:
            if train not in counted:
                counted[train] = count_clips(clips, run.spec)
            planned.append(_plan(run.name, run.spec, run.nodes, site, counted[train], walltime))
        except (PlanError, SiteError, JobError) as error:
            raise PlanError(f"{run.name}: {error}") from error
    return planned


def _plan(
    name: str, spec: Spec, nodes: int | None, site: Site | None, num_clips: int, walltime: int | None
) -> PlannedRun:
    if site is None:
        return PlannedRun(name, spec, nodes, make_plan(spec, spec.scale.gpus or 1, num_clips), None)
    if site.scheduler == "local":
        plan = make_plan(spec, _ranks_here(site, spec), num_clips)
        return PlannedRun(name, spec, 1, plan, None)
    if nodes is None:
        raise PlanError("the sweep does not say on how many nodes it runs; give nodes: N, of all runs or of this one")
    plan = make_plan(spec, check_ranks(site, spec, nodes), num_clips)
    return PlannedRun(name, spec, nodes, plan, estimate(site, spec, plan, nodes, walltime))


def _ranks_here(site: Site, spec: Spec) -> int:
    """The site's ranks, or the most below that every virtual GPU can be shared out to."""
    gpus = spec.scale.gpus
    return site.ranks if gpus is None else max(n for n in range(1, site.ranks + 1) if gpus % n == 0)


def submit_runs(sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState]) -> int:
    """Hand what is missing or failed to the scheduler: one array where the node counts are equal, else a job a run."""
    check_scheduler(site)
    with locked(sweep.folder / "submit.lock"):
        runs = _to_start(sweep, planned, jobs)
        if not runs:
            return 0
        write_text(sweep.folder / "site.yaml", to_yaml(site.model_dump(mode="json")))
        if len({run.nodes for run in runs}) == 1 and len(runs) > 1:
            _submit_array(sweep, site, runs)
        else:
            _submit_each(sweep, site, runs)
    print(f"summit-train sweep {sweep.folder} --status    shows them, and writes table and figure")
    return 0


def _submit_array(sweep: Sweep, site: Site, runs: Sequence[PlannedRun]) -> None:
    job = _job(sweep, site, runs)
    script = write_job(site, job, [run.spec for run in runs], folder=sweep.folder.absolute() / "job")
    job_id = submit(site, script)
    record(site, job, script, job_id)
    cap = f", {sweep.at_once} at once" if sweep.at_once else ""
    print(f"{sweep.name}: job array {job_id} of {len(runs)} runs{cap}; the script is {script}")


def _submit_each(sweep: Sweep, site: Site, runs: Sequence[PlannedRun]) -> None:
    """A job, or a chain of them, a run. With a cap, run i waits for run i - at_once to end."""
    last: list[str] = []
    for i, run in enumerate(runs):
        job = _job(sweep, site, [run])
        script = write_job(site, job, [run.spec])
        after = last[i - sweep.at_once] if sweep.at_once and i >= sweep.at_once else None
        ids = chain(site, job, script, run.cost.jobs if run.cost else 1, after)
        last.append(ids[-1])
        print(f"{run.name}: job {' '.join(ids)} on {run.nodes} nodes; the script is {script}")


def _job(sweep: Sweep, site: Site, runs: Sequence[PlannedRun]) -> Job:
    minutes = [run.cost.walltime_minutes for run in runs if run.cost]
    return Job(
        name=runs[0].name if len(runs) == 1 else sweep.name,
        runs=tuple(run.spec.run_path.absolute() for run in runs),
        nodes=runs[0].nodes or 1,
        walltime_minutes=max(minutes, default=60),
        workdir=Path.cwd(),
        python=sys.executable,
        at_once=sweep.at_once,
        stage=folders_to_stage(site, [run.spec for run in runs]),
        sweep=sweep.folder.absolute(),
    )


def _to_start(sweep: Sweep, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState]) -> list[PlannedRun]:
    """The runs that failed or are missing; says which others there are, and writes the sweep into its folder."""
    rows = read_rows(sweep, jobs)
    names = set(to_start(rows))
    others = [f"{row.name} ({row.state})" for row in rows if row.name not in names]
    if others:
        print(f"{sweep.name}: not started again: {', '.join(others)}")
    for name, text in sweep_texts(sweep).items():
        write_text(sweep.folder / name, text)
    return [run for run in planned if run.name in names]


def run_here(sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Mapping[str, JobState]) -> int:
    """Run what is missing or failed, one after another; 1 if any failed, 85 or 130 when asked to stop."""
    runs = _to_start(sweep, planned, jobs)
    began, failed = time.monotonic(), 0
    for i, run in enumerate(runs, 1):
        print(f"[{i}/{len(runs)}] {run.name}: {run.plan.total_steps:,} steps, {run.plan.ranks} ranks", flush=True)
        start = time.monotonic()
        status, asked = _attend(_words(site, run))
        row = next(row for row in write_sweep(sweep, jobs) if row.name == run.name)
        if asked or status in _STOPS:
            print(f"{sweep.name}: stopped at {run.name}; started again, the sweep goes on there")
            return INTERRUPTED if signal.SIGINT in asked or status == INTERRUPTED else STOPPED
        failed += status != 0
        now = time.monotonic()
        left = f"; about {duration((now - began) / i * (len(runs) - i))} left" if i < len(runs) else ""
        print(f"[{i}/{len(runs)}] {run.name}: {_outcome(row, status)} in {duration(now - start)}{left}", flush=True)
    print(table(write_sweep(sweep, jobs)))
    print(f"{sweep.name}: {failed} of {len(runs)} failed; table and figure are in {sweep.folder}")
    return 1 if failed else 0


def _outcome(row: SweepRow, status: int) -> str:
    return f"failed with exit status {status}" if status else f"top-1 {mean_std(row.top1, row.top1_std)}"


def _words(site: Site, run: PlannedRun) -> list[str]:
    """The command of a run here: the site's script, or the program alone where one rank needs no MPI."""
    spec_file = run.spec.run_path.absolute() / "job/spec.yaml"
    if run.plan.ranks == 1:
        write_text(spec_file, dump_spec(run.spec))
        return [sys.executable, "-m", "summit_train", "train", str(spec_file)]
    job = Job(run.name, (spec_file.parents[1],), 1, site.default_walltime, Path.cwd(), sys.executable)
    sized = site.model_copy(update={"ranks_per_node": run.plan.ranks})
    return ["bash", str(write_job(sized, job, [run.spec]))]


def _attend(words: Sequence[str]) -> tuple[int, set[int]]:
    """Run a command to its end and pass a wish to stop on to it; its exit status, and the signals that came.

    A terminal's Ctrl-C reaches the command without us, so here it only must not end us first.
    """
    asked: set[int] = set()

    def on_signal(number: int, _: FrameType | None) -> None:
        asked.add(number)
        if number != signal.SIGINT:
            process.terminate()

    with subprocess.Popen(words) as process:
        previous = {
            number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
        }
        try:
            return process.wait(), asked
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
