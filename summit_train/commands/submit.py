"""`summit-train submit`: one spec -> a job script -> the batch system, with the cost said before."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from summit_train.cluster.estimate import Estimate, check_ranks, estimate
from summit_train.cluster.job import Job, JobError, render
from summit_train.cluster.site import Site, load_site
from summit_train.cluster.submit import (
    SubmitError,
    chain,
    check_scheduler,
    waiting_job,
    write_job,
)
from summit_train.commands.plan import count_clips
from summit_train.commands.site_arguments import add_site_arguments
from summit_train.commands.staging import folders_to_stage, staging_row
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    add_site_arguments(parser, required=True)
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, where the manifest is not at hand")
    parser.add_argument("--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost")
    parser.add_argument(
        "--max-requeues", type=int, default=20, metavar="N", help="how often a job puts itself back into the queue (20)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, and the cost on stderr; no more")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> int:
    """Submit, or show what would be submitted."""
    spec, site = load_spec(args.spec, args.overrides), load_site(args.site, args.set)
    ranks = check_ranks(site, spec, args.nodes)
    plan = make_plan(spec, ranks, count_clips(args.clips, spec))
    cost = estimate(site, spec, plan, args.nodes, args.walltime, args.speed)
    job = make_job(site, spec, args.nodes, cost.walltime_minutes, args.max_requeues)
    script = render(site, job)
    print(f"{spec.name}: {args.nodes} nodes of {site.name}, {ranks} ranks", file=sys.stderr)
    for name, value in (*cost.rows(), *staging_row(site, spec, job.stage)):
        print(f"  {name:<10} {value}", file=sys.stderr)
    if args.dry_run:
        print(script, end="")
        return 0
    return _submit(site, job, spec, cost)


def make_job(site: Site, spec: Spec, nodes: int, walltime_minutes: int, max_requeues: int = 20) -> Job:
    """The job of one run, with this interpreter, from the current directory."""
    if max_requeues < 0:
        raise JobError(f"--max-requeues {max_requeues}: 0 or more is wanted")
    return Job(
        name=spec.name,
        runs=(spec.run_path.absolute(),),
        nodes=nodes,
        walltime_minutes=walltime_minutes,
        workdir=Path.cwd(),
        python=sys.executable,
        max_requeues=max_requeues,
        stage=folders_to_stage(site, [spec]),
    )


def _submit(site: Site, job: Job, spec: Spec, cost: Estimate) -> int:
    check_scheduler(site)
    waiting = waiting_job(site, job.runs[0])
    if waiting is not None:
        raise SubmitError(f"{job.runs[0]}: job {waiting[0]} is {waiting[1]}; wait for it, or cancel it first")
    script = write_job(site, job, [spec])
    if site.scheduler == "local":
        sys.stderr.flush()
        os.execvp("bash", ["bash", str(script)])  # in this process's place: signals then reach the script
    ids = chain(site, job, script, cost.jobs)
    print(f"{spec.name}: {_jobs(ids)} submitted; the script is {script}, its output goes to {script.parent}")
    return 0


def _jobs(ids: Sequence[str]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, one after the other, {ids[0]} to {ids[-1]},"
