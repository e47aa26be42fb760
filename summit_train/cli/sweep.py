"""`summit-train sweep`: plan, start and follow many runs from one file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from summit_train.cli.plan import add_site_arguments
from summit_train.cluster.site import Site, load_site
from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable, warn
from summit_train.core.text import counted
from summit_train.data.manifest.reading import check_same_classes
from summit_train.plan import Plan, make_plan
from summit_train.spec import DataSpec, ModelSpec, Spec
from summit_train.sweep.figure import write_sweep, written
from summit_train.sweep.grid import Sweep, load_sweep
from summit_train.sweep.start import plan_runs, planned_jobs, planned_table, planned_values, run_here, submit_runs
from summit_train.sweep.status import as_values, read_jobs, read_rows, tables
from summit_train.training.preflight import Files, read_files, start_notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="sweep (YAML), or the folder of one that was started")
    add_site_arguments(parser, required=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the runs, plans and job script; start nothing")
    what.add_argument("--local", action="store_true", help="run them here, one after another (--site local)")
    status = "state of the runs; writes table and, over batch sizes, figure"
    what.add_argument("--status", action="store_true", help=status)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override in every run")


def run(args: argparse.Namespace) -> Result:
    """Plan, start or show the runs. The status is 1 if a run started here failed."""
    _check(args)
    name = "local" if args.local else args.site
    site = None if name is None else load_site(name, args.set)
    sweep = load_sweep(args.sweep, args.overrides, site.defaults if site else None)
    if args.status:
        if site is None and (saved := sweep.folder / "site.yaml").is_file():  # which the sweep was started on
            sweep = load_sweep(args.sweep, args.overrides, load_site(saved).defaults)
        return _status(sweep, site)
    for line in site.notes if site else ():
        warn(line)
    read: dict[tuple[DataSpec, ModelSpec], Files] = {}  # once for all runs of the same data and network

    def plan(spec: Spec, ranks: int) -> tuple[Plan, int | None]:
        key = spec.data, spec.model
        if key not in read:
            read[key] = read_files(spec, args.clips)
            for line in read[key].warnings:
                warn(line)
        planned = make_plan(spec, ranks, read[key].clips)
        start_notes(spec, planned, read[key], sweep.folder)
        return planned, read[key].videos

    planned = plan_runs(sweep, site, plan, args.walltime)
    _check_folds(read[run.spec.data, run.spec.model] for run in sweep.runs if run.fold)
    if args.dry_run or site is None:
        values = planned_values(sweep, site, planned)
        what = f"{sweep.name}: {counted(len(planned), 'run')}, to {sweep.folder}"
        text: list[str | TextTable] = [what, planned_table(planned)]
        if values["node_hours"] is not None:
            text.append(f"{values['node_hours']:,.1f} node-hours of training in all")
        if site is not None and not site.is_here:
            text += planned_jobs(sweep, site, planned)
        return Result(text, values=values)
    jobs = read_jobs(sweep, site, warn)
    if site.is_here:
        return Result(status=run_here(sweep, site, planned, jobs))
    submit_runs(sweep, site, planned, jobs)
    return Result()


def _check(args: argparse.Namespace) -> None:
    if args.local and args.site is not None:
        raise UserError(f"--local is --site local; leave out --local or --site {args.site}")
    if args.json and not (args.dry_run or args.status):
        raise UserError("--json needs --dry-run or --status")
    if (args.walltime is not None or args.set) and not (args.local or args.site):
        raise UserError("--walltime and --set need --site")
    if not (args.dry_run or args.local or args.site or args.status):
        raise UserError("choose one of --dry-run, --local, --site NAME and --status")


def _check_folds(folds: Iterable[Files]) -> None:
    """Raise UserError where folds number their classes differently: one table has the clips of all of them."""
    lists = [fold.train.manifest for fold in folds if fold.train is not None]
    named = [one for one in lists if one.classes]
    for other in named[1:]:
        check_same_classes(named[0].source, named[0].classes, other.source, other.classes)


def _status(sweep: Sweep, site: Site | None) -> Result:
    was_started = sweep.folder.is_dir()
    rows = write_sweep(sweep, read_jobs(sweep, site, warn)) if was_started else read_rows(sweep)
    values = as_values(sweep, rows)
    states = ", ".join(f"{count} {state}" for state, count in values["states"].items() if count)
    place = [f"in {sweep.folder}: {written(sweep)}"] if was_started else []
    return Result([*tables(sweep, rows).split("\n"), f"{sweep.name}: {states}", *place], values=values)
