"""`summit-train doctor`: what works on this machine, or on a site, and how to fix what does not."""

from __future__ import annotations

import argparse
import dataclasses
import os
from itertools import chain
from pathlib import Path
from typing import Any

from summit_train.cluster.doctor import check_disk, check_disks, check_launch, examine, try_start
from summit_train.cluster.doctor_site import examine_site, trial
from summit_train.cluster.probe import Check
from summit_train.cluster.site import load_site
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.core.result import Result, show
from summit_train.core.session import session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will be written [runs]")
    parser.add_argument("--node-local", metavar="DIR", help="folder on this node's own disk; $NAME is expanded")
    parser.add_argument("--site", metavar="NAME", help="check a site from its login node: its name, or its path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="key of the site to override")
    parser.add_argument("--check-nodes", action="store_true", help="under a launcher: also look for slow nodes")
    parser.add_argument("--submit", action="store_true", help="also check the site's nodes, in a trial job")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the trial job [1]")
    answer = "only try what a rank needs at its start: this program, the run's SPEC, the temporary folder"
    parser.add_argument("--answer", type=Path, metavar="SPEC", help=answer)


def run(args: argparse.Namespace) -> Result:
    """Show each check when it is done. Of several ranks the first one does. The status is 1 if a check failed."""
    if args.answer is not None:
        try_start(args.answer)
        return Result()
    site = None if args.site is None else load_site(args.site, args.set)
    if args.submit and (site is None or site.is_here):
        raise UserError("--submit must be used with --site NAME of a batch system; try --site slurm_generic")
    launch = this_launch()
    is_alone = launch.launcher == "hand"
    node_local = args.node_local and os.path.expandvars(args.node_local)
    ranks: list[dict[str, Any]] = []
    of_ranks: list[Check] = []
    disks: list[Check] = []
    if not is_alone:
        with session(launch) as world:
            of_launch, ranks = check_launch(world, launch)
            disks = check_disks(world, node_local) if node_local else []
            of_ranks = [of_launch]
            if args.check_nodes or (site is not None and site.check_nodes):
                # Imported here: without torch the other checks still run.
                from summit_train.cluster.node_check import check_speeds
                from summit_train.core.device import choose_device

                of_ranks += check_speeds(world, choose_device(world))
        if launch.rank:
            return Result()
    elif args.check_nodes:
        raise UserError("--check-nodes must be used with ranks; try srun summit-train doctor --check-nodes")
    elif node_local:
        disks = [check_disk("node-local disk", Path(node_local))]
    of_machine = examine(args.run_dir, alone=is_alone) if site is None else examine_site(site, args.run_dir)
    of_trial = trial(site, args.run_dir, args.nodes) if args.submit and site is not None else ()
    done: list[Check] = []
    for check in chain(of_ranks, of_machine, disks, of_trial):
        done.append(check)
        fix = [f"{'':<33} -> {check.fix}"] if check.fix else []
        show(Result([f"{check.status:<5} {check.name:<27} {check.found}", *fix]), as_json=args.json)
    is_healthy = all(check.status != "fail" for check in done)
    values = {"ok": is_healthy, "checks": [dataclasses.asdict(check) for check in done], "ranks": ranks}
    return Result(values=values, status=0 if is_healthy else 1)
