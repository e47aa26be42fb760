"""`summit-train sweep`: many runs from one file: their plan, their start, what became of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from summit_train.cluster.site import Site, load_site, walltime_text
from summit_train.cluster.submit import SubmitError, job_states, submissions
from summit_train.commands.site_arguments import add_site_arguments
from summit_train.commands.sweep_start import PlannedRun, plan_runs, run_here, submit_runs
from summit_train.report.sweep import STATES, JobState, SweepRow, as_values, read_rows, table, text_table
from summit_train.report.sweep_figure import write_sweep
from summit_train.report.tables import NONE, duration, show
from summit_train.spec import SpecError
from summit_train.sweep import Sweep, load_sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("sweep", metavar="SWEEP", help="sweep (YAML), or the folder of one that was started")
    add_site_arguments(parser, required=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the runs and their plans; start nothing")
    what.add_argument("--local", action="store_true", help="run them here, one after another (--site local)")
    what.add_argument("--status", action="store_true", help="what became of the runs; writes table and figure")
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, where the manifest is not at hand")
    parser.add_argument("--json", action="store_true", help="with --dry-run or --status: one JSON object on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override in every run")


def run(args: argparse.Namespace) -> int:
    """Plan, start or look at the runs; 1 where a run that was started here failed."""
    if args.local and args.site is not None:
        raise SpecError(f"--local is --site local; leave one of --local and --site {args.site} out")
    if args.json and not (args.dry_run or args.status):
        raise SpecError("--json goes with --dry-run or --status")
    if (args.walltime is not None or args.set) and not (args.local or args.site):
        raise SpecError("--walltime and --set are of a site: name it with --site")
    sweep = load_sweep(args.sweep, args.overrides)
    name = "local" if args.local else args.site
    site = None if name is None else load_site(name, args.set)
    if args.status:
        return _status(sweep, site, as_json=args.json)
    if site is None and not args.dry_run:
        raise SpecError("what is to be done? --dry-run, --local, --site NAME or --status")
    planned = plan_runs(sweep, site, args.clips, args.walltime)
    if args.dry_run or site is None:
        return _dry_run(sweep, planned, as_json=args.json)
    jobs = _jobs(sweep, site)
    if site.scheduler == "local":
        return run_here(sweep, site, planned, jobs)
    return submit_runs(sweep, site, planned, jobs)


def _dry_run(sweep: Sweep, planned: Sequence[PlannedRun], *, as_json: bool) -> int:
    hours = [run.cost.node_hours if run.cost else None for run in planned]
    total = None if None in hours else sum(hour for hour in hours if hour is not None)
    if as_json:
        runs = [{"name": run.name, "run": str(run.spec.run_path), **run.values()} for run in planned]
        print(json.dumps({"sweep": sweep.name, "at_once": sweep.at_once, "node_hours": total, "runs": runs}))
        return 0
    header = (
        "run", "nodes", "ranks", "virtual GPUs", "accumulation", "batch", "frames", "steps", "peak LR", "time",
        "node-hours", "walltime",
    )  # fmt: skip
    print(f"{sweep.name}: {len(planned)} runs, to {sweep.folder}")
    print(text_table(header, [_cells(run) for run in planned]))
    if total is not None:
        print(f"{total:,.1f} node-hours of training in all")
    return 0


def _cells(run: PlannedRun) -> list[str]:
    plan, cost = run.plan, run.cost
    hours, node_hours = (cost.hours, cost.node_hours) if cost else (None, None)
    return [
        run.name,
        show(run.nodes),
        show(plan.ranks),
        show(plan.virtual_gpus),
        show(plan.accumulation),
        show(plan.global_batch),
        show(plan.frames_per_batch),
        show(plan.total_steps),
        show(plan.peak_lr),
        NONE if hours is None else duration(hours * 3600),
        NONE if node_hours is None else f"{node_hours:,.1f}",
        (f"{cost.jobs} x " if cost.jobs > 1 else "") + walltime_text(cost.walltime_minutes) if cost else NONE,
    ]


def _status(sweep: Sweep, site: Site | None, *, as_json: bool) -> int:
    rows = _look(sweep, _jobs(sweep, site))
    if as_json:
        print(json.dumps(as_values(sweep, rows)))
        return 0
    print(table(rows))
    count = {state: sum(row.state == state for row in rows) for state in STATES}
    print(f"{sweep.name}: " + ", ".join(f"{number} {state}" for state, number in count.items() if number))
    if sweep.folder.is_dir():
        print(f"in {sweep.folder}: " + ", ".join(path.name for path in _written(sweep.folder)))
    return 0


def _look(sweep: Sweep, jobs: dict[str, JobState]) -> list[SweepRow]:
    """The rows, written down where the sweep was started."""
    return write_sweep(sweep, jobs) if sweep.folder.is_dir() else read_rows(sweep)


def _written(folder: Path) -> list[Path]:
    return sorted([*folder.glob("table.*"), *folder.glob("accuracy.*")])


def _jobs(sweep: Sweep, site: Site | None) -> dict[str, JobState]:
    """What the schedulers say of each run's last job: of `site`, and of the one that the sweep was submitted to."""
    saved = sweep.folder / "site.yaml"
    sites = [*([load_site(saved)] if saved.is_file() else []), *([site] if site else [])]
    found: dict[str, JobState] = {}
    for one in {site.scheduler: site for site in sites}.values():
        submitted = {
            run.name: [line["id"] for line in submissions(run.spec.run_path) if line["scheduler"] == one.scheduler]
            for run in sweep.runs
        }
        try:
            states = job_states(one, [job_id for ids in submitted.values() for job_id in ids])
        except SubmitError as error:
            print(f"what became of the jobs is unknown: {error}", file=sys.stderr)
            states = {}
        found |= {name: _last(ids, states) for name, ids in submitted.items() if ids}
    return found


def _last(ids: Sequence[str], states: dict[str, str]) -> JobState:
    """The job of a chain that is still there, else the last one."""
    there = [job_id for job_id in ids if states.get(job_id) in ("running", "queued")]
    chosen = there[0] if there else ids[-1]
    return JobState(chosen, states.get(chosen, "unknown"))
