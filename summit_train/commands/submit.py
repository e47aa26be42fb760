"""`summit-train submit`: one spec -> a job script -> the batch system, with the cost said before."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from summit_train.cluster.job import Job, render
from summit_train.cluster.site import Site, load_site, parse_walltime
from summit_train.cluster.submit import SubmitError, check_scheduler, record, submit, waiting_job, write_job
from summit_train.spec import Spec, load_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--site", required=True, metavar="NAME", help="a shipped site profile, or the path of one")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    parser.add_argument("--walltime", metavar="H:MM", help="walltime of a job")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="key of the site to override")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> int:
    """Submit."""
    spec, site = load_spec(args.spec, args.overrides), load_site(args.site, args.set)
    walltime = site.default_walltime if args.walltime is None else parse_walltime(args.walltime)
    job = make_job(spec, args.nodes, walltime)
    if args.dry_run:
        print(render(site, job), end="")
        return 0
    return _submit(site, job, spec)


def make_job(spec: Spec, nodes: int, walltime_minutes: int) -> Job:
    """The job of one run."""
    run_path = spec.run_path.resolve()
    return Job(spec.name, (run_path,), nodes, walltime_minutes, Path.cwd(), sys.executable)


def _submit(site: Site, job: Job, spec: Spec) -> int:
    check_scheduler(site)
    waiting = waiting_job(site, job.runs[0])
    if waiting is not None:
        raise SubmitError(f"{job.runs[0]}: job {waiting[0]} is {waiting[1]}; wait for it, or cancel it first")
    script = write_job(site, job, [spec])
    if site.scheduler == "local":
        return subprocess.run(["bash", str(script)], check=False).returncode
    job_id = submit(site, script)
    record(site, job, script, job_id)
    print(f"{spec.name}: job {job_id} on {job.nodes} nodes, script {script}")
    return 0
