"""`summit-train plan`: every number of a run before the run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from summit_train.cluster.estimate import check_ranks, estimate
from summit_train.cluster.site import Site, load_site, load_spec_on, parse_walltime
from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable, show, warn
from summit_train.core.run_folder import CheckpointError
from summit_train.core.text import counted
from summit_train.plan import Plan, make_plan, plan_rows, sample_learning_rates
from summit_train.spec import Spec, own_parts
from summit_train.training.preflight import Files, read_files, start_notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", metavar="SPEC", help="experiment spec (YAML)")
    add("--ranks", type=int, metavar="N", help="number of ranks (default: one a virtual GPU)")
    add("--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost on the site")
    add("--price", type=float, metavar="P", help="price of a node-hour on the site, in any currency")
    add_site_arguments(parser, required=False)
    add("--nodes", type=int, metavar="N", help="nodes of the site (default: one GPU a virtual GPU)")
    add("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def add_site_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add = parser.add_argument
    add("--site", required=required, metavar="NAME", help="a shipped site profile, or the path of one")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="key of the site to override: account=abc123")
    add("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    add("--walltime", type=_walltime, metavar="H:MM", help="walltime (default: what the run needs)")


def _walltime(text: str) -> int:
    try:
        return parse_walltime(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def run(args: argparse.Namespace) -> Result:
    site = None if args.site is None else load_site(args.site, args.set)
    spec, taken = load_spec_on(site, args.spec, args.overrides)
    ranks = _ranks(args, site, spec)
    files = read_files(spec, args.clips)
    plan = make_plan(spec, ranks, files.clips)
    if own_parts(spec, "loss", "data", "evaluate"):
        from summit_train.training.inputs import loss_and_measures

        loss_and_measures(spec)
    try:
        start = start_notes(spec, plan, files)
        conflict = None
    except CheckpointError as error:  # the run folder's; the numbers of the plan do not depend on it
        start = []
        conflict = error
    warnings = [*(site.notes if site else ()), *files.warnings]
    for line in warnings:
        warn(line)
    values = plan.values() | {
        "learning_rates": [{"step": step, "lr": lr} for step, lr in sample_learning_rates(plan)],
        "warnings": warnings,
        "not_checked": files.not_checked,
        "start": start,
        "conflict": conflict and str(conflict),
    }
    rows = start_rows(start, files)
    if site is not None:
        cost = estimate(site, plan, args.walltime, args.speed, files.videos, price=args.price)
        values["site"] = {"name": args.site, "comm": site.comm, "spec": taken, **cost.values()}
        joined = "auto: Horovod where it is installed and MPI starts the ranks, else torch.distributed"
        comm = joined if site.comm == "auto" else f"{site.comm}, by the site profile"
        rows += [*taken_rows(site, taken), ("nodes", f"{cost.nodes:,}"), ("comm", comm), *cost.rows()]
    result = Result(_text(spec, plan, rows), values=values)
    if conflict is not None:
        show(result, as_json=args.json)
        raise conflict
    return result


def taken_rows(site: Site, taken: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("spec", f"{', '.join(f'{key}={value}' for key, value in taken.items())}, by {site.name}")] if taken else []


def start_rows(start: Sequence[str], files: Files) -> list[tuple[str, str]]:
    """Return rows of the notes of `start_notes`, and of the keys whose files were not read."""
    rows = [("start", note) for note in start]
    return [*rows, ("not checked", ", ".join(files.not_checked))] if files.not_checked else rows


def _ranks(args: argparse.Namespace, site: Site | None, spec: Spec) -> int:
    """Return the ranks of --ranks or --nodes; by default as many as there are virtual GPUs."""
    if site is None:
        for name in ("nodes", "walltime", "speed", "price"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} must be used with --site; try --site local")
        ranks = args.ranks if args.ranks is not None else spec.scale.gpus or 1
        if ranks < 1:
            raise UserError(f"--ranks must be 1 or more, got {ranks}")
        return ranks
    ranks = args.ranks if args.ranks is not None else spec.scale.gpus or site.ranks
    nodes = args.nodes if args.nodes is not None else max(1, ranks // site.ranks)
    if args.ranks is not None and args.ranks != nodes * site.ranks:
        right = f"{nodes * site.ranks} on {counted(nodes, 'node')} of {site.name}"
        raise UserError(f"--ranks must be {right}, got {args.ranks}; try --nodes alone")
    return check_ranks(site, spec, nodes)


def _text(spec: Spec, plan: Plan, more: list[tuple[str, str]]) -> list[str | TextTable]:
    stacked = f" of {spec.data.flow_length} flow fields" if spec.data.modality == "flow" else ""
    rates = [("step", "epoch", "learning rate", "")]
    sampled = sample_learning_rates(plan)
    largest = max(plan.peak_lr, *(lr for _, lr in sampled))  # a decay of the user's own may exceed the peak
    for step, lr in sampled:
        bar = f"{'#' * round(24 * lr / largest):<24}"
        rates.append((f"{step:,}", f"{step / plan.steps_per_epoch:.1f}", f"{lr:.6g}", bar))
    return [
        f"{spec.name}: {spec.model.title}, {counted(spec.data.num_frames, 'frame')}{stacked}",
        TextTable([*plan_rows(plan), *more], left=2, indent="  "),
        "",
        TextTable(rates, left=0, indent="  "),
    ]
