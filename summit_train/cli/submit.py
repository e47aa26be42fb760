"""`summit-train submit`: one spec -> a job script -> the batch system. The cost is printed first."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.cli.plan import add_site_arguments, start_rows, taken_rows
from summit_train.cluster.estimate import check_ranks, estimate, save_often
from summit_train.cluster.job import Job, render
from summit_train.cluster.site import load_site, load_spec_on
from summit_train.cluster.submit import chain, output_rows, prepare_job, staged_environment, staged_folders, staging_row
from summit_train.core.result import Result, TextTable, tell, warn
from summit_train.core.text import counted
from summit_train.plan import balance_rows, make_plan
from summit_train.training.preflight import read_files, start_notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    add_site_arguments(parser, required=True)
    parser.add_argument("--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost")
    parser.add_argument("--price", type=float, metavar="P", help="price of a node-hour, in any currency")
    requeues = "requeues that a job may make (default: the site's, else twice the jobs that the run needs)"
    parser.add_argument("--max-requeues", type=int, metavar="N", help=requeues)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the script, and the cost on stderr")
    what.add_argument("--write", action="store_true", help="write script and spec; print how to submit them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    site = load_site(args.site, args.set)
    spec, taken = load_spec_on(site, args.spec, args.overrides)
    files = read_files(spec, args.clips)
    plan = make_plan(spec, check_ranks(site, spec, args.nodes), files.clips)
    spec, saving = save_often(site, spec, plan)
    start = start_notes(spec, plan, files)
    asked = {"price": args.price, "max_requeues": args.max_requeues}
    cost = estimate(site, plan, args.walltime, args.speed, files.videos, **asked)
    job = Job(
        name=spec.name,
        runs=(spec.run_path.absolute(),),
        nodes=args.nodes,
        walltime_minutes=cost.walltime_minutes,
        max_requeues=cost.max_requeues + (cost.jobs - 1 if args.write else 0),
        stage=staged_folders(site, [spec]),
        environment=staged_environment(site, Path(spec.run_dir)),
    )
    text = render(site, job)
    for line in [*site.notes, *files.warnings]:
        warn(line)
    if site.container is not None:
        folders = {"the working folder": job.workdir, "the run": job.runs[0]}
        for line in site.container.gaps(folders | ({"node_local": site.node_local} if job.stage else {})):
            warn(f"{site.name}: {line}")
    tell(f"{spec.name}: {counted(args.nodes, 'node')} of {site.name}, {counted(plan.ranks, 'rank')}")
    rows = [*taken_rows(site, taken), *saving, *balance_rows(plan), *cost.rows(), *staging_row(site, spec, job.stage)]
    rows += output_rows(site, job)
    if job.environment is not None:
        rows.append(("environment", f"{job.environment} to {site.node_local}"))
    rows += start_rows(start, files)
    tell(TextTable(rows, left=2, indent="  "))
    if args.write:
        script = prepare_job(site, job, text, spec, by_hand=True)
        chained = f", which requeues itself in place of a chain of {cost.jobs} jobs" if cost.jobs > 1 else ""
        tell(f"{spec.name}: nothing is submitted; the script is {script}{chained}")
        return Result([site.batch.by_hand(script, site.launcher)])
    if args.dry_run:
        tell(f"{spec.name}: nothing is written; to submit the script by hand, use --write in place of --dry-run")
        return Result(text.removesuffix("\n").split("\n"))
    script = prepare_job(site, job, text, spec)
    ids = chain(site, job, script, cost.jobs)
    submitted = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, one after the other, {ids[0]} to {ids[-1]},"
    most = f"at most {counted(cost.max_requeues, 'requeue')}, {cost.most_node_hours:,.1f} node-hours in all"
    place = f"the script is {script}, its output goes to {script.parent}"
    return Result([f"{spec.name}: {submitted} submitted; {place}; {most}"])
