"""`summit-train submit`: one spec -> a job script -> the batch system. The cost is printed first."""

from __future__ import annotations

import argparse
import sys

from summit_train.cli.plan import add_site_arguments, check_files, warn
from summit_train.cluster.estimate import check_ranks, estimate
from summit_train.cluster.job import Job, render
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import chain, folders_to_stage, prepare_job, staging_row
from summit_train.core.result import Result, TextTable
from summit_train.plan import make_plan
from summit_train.spec import load_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    add_site_arguments(parser, required=True)
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument("--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost")
    parser.add_argument(
        "--max-requeues", type=int, default=20, metavar="N", help="how often a job puts itself back into the queue (20)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, and the cost on stderr; no more")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    """Submit the job, or with --dry-run show its script."""
    spec, site = load_spec(args.spec, args.overrides), load_site(args.site, args.set, warn)
    files = check_files(spec, args.clips)
    plan = make_plan(spec, check_ranks(site, spec, args.nodes), files.clips)
    cost = estimate(site, spec, plan, args.nodes, args.walltime, args.speed, files.videos)
    job = Job(
        name=spec.name,
        runs=(spec.run_path.absolute(),),
        nodes=args.nodes,
        walltime_minutes=cost.walltime_minutes,
        max_requeues=args.max_requeues,
        stage=folders_to_stage(site, [spec]),
    )
    text = render(site, job)
    for line in files.warnings:
        warn(line)
    print(f"{spec.name}: {args.nodes} nodes of {site.name}, {plan.ranks} ranks", file=sys.stderr)
    not_checked = [("unchecked", ", ".join(files.not_checked))] if files.not_checked else []
    rows = [*cost.rows(), *staging_row(site, spec, job.stage), *not_checked]
    print(TextTable(rows, left=2, indent="  "), file=sys.stderr)
    if args.dry_run:
        return Result([text.removesuffix("\n")])
    script = prepare_job(site, job, spec)
    ids = chain(site, job, script, cost.jobs)
    submitted = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, one after the other, {ids[0]} to {ids[-1]},"
    return Result([f"{spec.name}: {submitted} submitted; the script is {script}, its output goes to {script.parent}"])
