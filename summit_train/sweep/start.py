"""Plan the runs of a sweep, then hand them to a scheduler, or run them here one after another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from summit_train.cluster.estimate import Estimate, check_ranks, estimate, save_often
from summit_train.cluster.job import Job, render
from summit_train.cluster.site import Site, walltime_text
from summit_train.cluster.submit import chain, output_rows, staged_environment, staged_folders, write_job
from summit_train.core.errors import UserError
from summit_train.core.files import locked, write_text
from summit_train.core.result import TextTable, say
from summit_train.core.text import NONE, counted, duration, mean_std, show
from summit_train.plan import Plan
from summit_train.spec import Spec
from summit_train.spec.source import to_yaml
from summit_train.sweep.figure import write_sweep, written
from summit_train.sweep.grid import Sweep, sweep_texts
from summit_train.sweep.status import STARTED, read_rows, tables, to_start

Jobs = Mapping[str, tuple[str, str]]  # run -> (id, state) of its last job

_STOPPED = 85
_INTERRUPTED = 130
_STOP_STATUSES = (_STOPPED, 128 + signal.SIGTERM, _INTERRUPTED)


@dataclass(frozen=True)
class PlannedRun:
    """A run with its numbers. nodes and cost are None without a site."""

    name: str
    spec: Spec
    nodes: int | None
    plan: Plan
    cost: Estimate | None


SweepJobs = Sequence[tuple[Job, Sequence[PlannedRun]]]


def plan_runs(
    sweep: Sweep, site: Site | None, plan_run: Callable[[Spec, int], tuple[Plan, int | None]], walltime: int | None
) -> list[PlannedRun]:
    """Return the plan of every run on the site's nodes; without a site, with one rank for each virtual GPU.

    plan_run: (spec, ranks) -> plan and number of validation videos (None where unknown). walltime: minutes of a job, by
    default what the run needs. Raises UserError, with the run's name, where it does not fit site, clips or files.
    """
    planned = []
    for run in sweep.runs:
        spec = run.spec
        nodes = run.nodes
        cost = None
        gpus = run.spec.scale.gpus
        try:
            if site is None:
                plan, _ = plan_run(spec, gpus or 1)
            elif site.is_here:
                # The fewest ranks whose step takes no longer than on all of the site's.
                accumulation = -(-(gpus or site.ranks) // site.ranks)
                ranks = -(-(gpus or site.ranks) // accumulation)
                plan, _ = plan_run(spec, ranks)
                nodes = 1
            elif nodes is None:
                raise UserError("the number of nodes is missing; add nodes: N to the sweep or to this run")
            else:
                plan, videos = plan_run(spec, check_ranks(site, spec, nodes))
                spec, _ = save_often(site, spec, plan)
                cost = estimate(site, plan, walltime, videos=videos)
        except UserError as error:
            raise UserError(*(f"{run.name}: {line}" for line in error.args)) from error
        planned.append(PlannedRun(run.name, spec, nodes, plan, cost))
    return planned


def planned_table(planned: Sequence[PlannedRun]) -> TextTable:
    rows = []
    for run in planned:
        plan = run.plan
        cost = run.cost
        jobs = f"{cost.jobs} x " if cost and cost.jobs > 1 else ""
        row = {
            "run": run.name,
            "nodes": show(run.nodes),
            "ranks": show(plan.ranks),
            "virtual GPUs": show(plan.virtual_gpus),
            "accumulation": show(plan.accumulation),
            "batch": show(plan.global_batch),
            "frames": show(plan.frames_per_batch),
            "steps": show(plan.total_steps),
            "peak LR": show(plan.peak_lr),
            "time": NONE if cost is None or cost.hours is None else duration(cost.hours * 3600),
            "node-hours": NONE if cost is None or cost.node_hours is None else f"{cost.node_hours:,.1f}",
            "walltime": NONE if cost is None else jobs + walltime_text(cost.walltime_minutes),
        }
        rows.append(row)
    return TextTable.of_records(rows)


def planned_values(sweep: Sweep, site: Site | None, planned: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the plans as one JSON object.

    node_hours: of training all runs; None where one of them is unknown. most_node_hours: their upper limit; None
    where no scheduler runs them.
    """
    runs = [
        {"name": run.name, "run": str(run.spec.run_path), "nodes": run.nodes}
        | run.plan.values()
        | ({"site": run.cost.values()} if run.cost else {})
        for run in planned
    ]
    known = [run.cost.node_hours for run in planned if run.cost and run.cost.node_hours is not None]
    total = sum(known) if len(known) == len(planned) else None
    most = None if site is None or site.is_here else most_node_hours(sweep_jobs(sweep, site, planned))
    hours = {"node_hours": total, "most_node_hours": most}
    return {"sweep": sweep.name, "at_once": sweep.at_once, **hours, "runs": runs}


def sweep_jobs(sweep: Sweep, site: Site, runs: Sequence[PlannedRun]) -> SweepJobs:
    """Return the jobs of the runs: one array if the scheduler has arrays and all have one node count."""
    as_one = site.batch.has_arrays and len({run.nodes for run in runs}) == 1
    environment = staged_environment(site, sweep.folder.parent)
    jobs = []
    for group in [runs] if as_one else [[run] for run in runs]:
        specs = [run.spec for run in group]
        costs = [run.cost for run in group if run.cost]
        job = Job(
            name=group[0].name if len(group) == 1 else sweep.name,
            runs=tuple(spec.run_path.absolute() for spec in specs),
            nodes=group[0].nodes or 1,
            walltime_minutes=max(cost.walltime_minutes for cost in costs),
            at_once=sweep.at_once,
            # The runs of an array requeue themselves in place of a chain.
            max_requeues=max(cost.max_requeues + (cost.jobs - 1 if len(group) > 1 else 0) for cost in costs),
            stage=staged_folders(site, specs),
            environment=environment,
            sweep=sweep.folder.absolute(),
        )
        jobs.append((job, group))
    return jobs


def most_node_hours(jobs: SweepJobs) -> float:
    """Return the upper limit of what the jobs take, with every requeue that they may make."""
    total = 0.0
    for job, runs in jobs:
        for cost in (run.cost for run in runs if run.cost):
            chained = 1 if job.is_array else cost.jobs
            own = replace(cost, jobs=chained, max_requeues=job.max_requeues, walltime_minutes=job.walltime_minutes)
            total += own.most_node_hours
    return total


def _job_table(site: Site, jobs: SweepJobs) -> TextTable:
    most = f"at most {most_node_hours(jobs):,.1f} with all requeues"
    return TextTable([("node-hours", most), *output_rows(site, *(job for job, _ in jobs))], left=2, indent="  ")


def planned_jobs(sweep: Sweep, site: Site, planned: Sequence[PlannedRun]) -> list[str | TextTable]:
    """List the cost limit of the jobs, the files of their output, and the first script, or why there is none."""
    jobs = sweep_jobs(sweep, site, planned)
    first = "the script" if len(jobs) == 1 else f"the script of the first of {len(jobs)} jobs"
    try:
        script = [f"{first}:", "", *render(site, jobs[0][0]).removesuffix("\n").split("\n")]
    except UserError as error:  # the plan needs no account
        script = [f"no script: {error}"]
    return [_job_table(site, jobs), *script]


def submit_runs(sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Jobs) -> None:
    site.check_scheduler()
    with locked(sweep.folder / "submit.lock"):
        starting = _runs_to_start(sweep, planned, jobs)
        if not starting:
            return
        write_text(sweep.folder / "site.yaml", to_yaml(site.model_dump(mode="json")))
        last: list[str] = []
        to_submit = sweep_jobs(sweep, site, starting)
        for i, (job, runs) in enumerate(to_submit):
            cost = runs[0].cost
            folder = sweep.folder.absolute() / "job" if job.is_array else None
            script = write_job(site, job, render(site, job), [run.spec for run in runs], folder)
            # Jobs that are not an array keep the cap by waiting: job i for job i - at_once.
            after = last[i - sweep.at_once] if sweep.at_once and i >= sweep.at_once else None
            ids = chain(site, job, script, cost.jobs if cost and not job.is_array else 1, after)
            last.append(ids[-1])
            cap = f", {sweep.at_once} at once" if sweep.at_once else ""
            nodes = counted(job.nodes, "node")
            array = f"job array {ids[0]} of {len(runs)} runs{cap}"
            alone = f"job {' '.join(ids)} on {nodes}"
            say(f"{job.name}: {array if job.is_array else alone}; the script is {script}")
    say(_job_table(site, to_submit))
    say(f"summit-train sweep {sweep.folder} --status    shows their state and writes the table")


def run_here(sweep: Sweep, site: Site, planned: Sequence[PlannedRun], jobs: Jobs) -> int:
    """Run the missing and failed runs one after another; return 0, 1 if any failed, 85 or 130 if asked to stop."""
    runs = _runs_to_start(sweep, planned, jobs)
    began = time.monotonic()
    num_failed = 0
    for i, run in enumerate(runs, 1):
        say(f"[{i}/{len(runs)}] {run.name}: {counted(run.plan.total_steps, 'step')}, {counted(run.plan.ranks, 'rank')}")
        start = time.monotonic()
        job = Job(run.name, (run.spec.run_path.absolute(),), 1, site.default_walltime)
        site_of_run = site.model_copy(update={"ranks_per_node": run.plan.ranks})
        script = write_job(site_of_run, job, render(site_of_run, job), [run.spec])
        alone = [sys.executable, "-m", "summit_train", "train", str(script.with_name("spec.yaml"))]
        write_text(script.with_name(STARTED), "")
        # One rank needs no MPI, and so not the script.
        status, signals = _run_command(alone if run.plan.ranks == 1 else ["bash", str(script)])
        row = next(row for row in write_sweep(sweep, jobs) if row["name"] == run.name)
        if signals or status in _STOP_STATUSES:
            say(f"{sweep.name}: stopped at {run.name}; start the sweep again to continue there")
            return _INTERRUPTED if signal.SIGINT in signals or status == _INTERRUPTED else _STOPPED
        num_failed += status != 0
        main = sweep.measures.main
        measured = f"{main.name} {mean_std(row[main.key], row[f'{main.key}_std'])}"
        outcome = f"failed with exit status {status}" if status else measured
        now = time.monotonic()
        left = f"; about {duration((now - began) / i * (len(runs) - i))} left" if i < len(runs) else ""
        say(f"[{i}/{len(runs)}] {run.name}: {outcome} in {duration(now - start)}{left}")
    say(*tables(sweep, write_sweep(sweep, jobs)).split("\n"))
    say(f"{sweep.name}: {num_failed} of {len(runs)} failed; in {sweep.folder}: {written(sweep)}")
    return 1 if num_failed else 0


def _runs_to_start(sweep: Sweep, planned: Sequence[PlannedRun], jobs: Jobs) -> list[PlannedRun]:
    """Return the failed and missing runs, name the others, and write the sweep into its folder."""
    rows = read_rows(sweep, jobs)
    names = set(to_start(rows))
    others = [f"{row['name']} ({row['state']})" for row in rows if row["name"] not in names]
    if others:
        say(f"{sweep.name}: not started again: {', '.join(others)}")
    for name, text in sweep_texts(sweep).items():
        write_text(sweep.folder / name, text)
    return [run for run in planned if run.name in names]


def _run_command(command: Sequence[str]) -> tuple[int, set[int]]:
    """Run a command to its end and pass SIGTERM and SIGUSR2 on to it; return its exit status and the signals received.

    The terminal sends SIGINT to the command itself. The handler only keeps this process alive.
    """
    received: set[int] = set()

    def on_signal(number: int, _: FrameType | None) -> None:
        received.add(number)
        if number != signal.SIGINT:
            process.terminate()

    numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
    with subprocess.Popen(command) as process:
        previous = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            return process.wait(), received
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
