"""`summit-train submit`: one spec -> a job script -> the batch system. The cost is printed first."""

from __future__ import annotations

import argparse

from summit_train.cli.plan import add_site_arguments, plan_start, read_files, start_rows, taken_rows
from summit_train.cluster.estimate import check_ranks, estimate
from summit_train.cluster.job import Job, render
from summit_train.cluster.site import load_site, load_spec_on
from summit_train.cluster.submit import chain, folders_to_stage, prepare_job, staging_row
from summit_train.core.result import Result, TextTable, tell, warn
from summit_train.core.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    add_site_arguments(parser, required=True)
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument("--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost")
    parser.add_argument("--price", type=float, metavar="P", help="price of a node-hour, in any currency")
    requeues = "requeues that a job may make (20)"
    parser.add_argument("--max-requeues", type=int, default=Job.max_requeues, metavar="N", help=requeues)
    parser.add_argument("--dry-run", action="store_true", help="print the script, and the cost on stderr; no more")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    site = load_site(args.site, args.set)
    spec, taken = load_spec_on(site, args.spec, args.overrides)
    files = read_files(spec, args.clips)
    plan, start = plan_start(spec, check_ranks(site, spec, args.nodes), files)
    asked = {"price": args.price, "max_requeues": args.max_requeues}
    cost = estimate(site, spec, plan, args.nodes, args.walltime, args.speed, files.videos, **asked)
    job = Job(
        name=spec.name,
        runs=(spec.run_path.absolute(),),
        nodes=args.nodes,
        walltime_minutes=cost.walltime_minutes,
        max_requeues=args.max_requeues,
        stage=folders_to_stage(site, [spec]),
    )
    text = render(site, job)
    for line in [*site.notes, *files.warnings]:
        warn(line)
    tell(f"{spec.name}: {counted(args.nodes, 'node')} of {site.name}, {counted(plan.ranks, 'rank')}")
    rows = [*taken_rows(site, taken), *cost.rows(), *staging_row(site, spec, job.stage), *start_rows(start, files)]
    tell(str(TextTable(rows, left=2, indent="  ")))
    if args.dry_run:
        return Result([text.removesuffix("\n")])
    script = prepare_job(site, job, spec)
    ids = chain(site, job, script, cost.jobs)
    submitted = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, one after the other, {ids[0]} to {ids[-1]},"
    return Result([f"{spec.name}: {submitted} submitted; the script is {script}, its output goes to {script.parent}"])
