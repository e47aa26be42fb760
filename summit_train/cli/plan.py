"""`summit-train plan`: every number of a run before the run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from summit_train.cluster.estimate import Estimate, check_ranks, estimate, scored_clips
from summit_train.cluster.site import Site, load_site, parse_walltime
from summit_train.core.errors import UserError
from summit_train.core.text import NONE, counted
from summit_train.plan import Plan, averages_per_epoch, make_plan, sample_learning_rates
from summit_train.spec import Spec, load_spec
from summit_train.spec.optimizer import describe_decay, describe_solver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: one a virtual GPU)")
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument(
        "--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the time the run takes"
    )
    add_site_arguments(parser, required=False)
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the site (default: one GPU a virtual GPU)")
    parser.add_argument("--compare", metavar="SPEC2", help="print this spec's plan alongside; overrides hold for both")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def add_site_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add --site, --set and --walltime."""
    parser.add_argument("--site", required=required, metavar="NAME", help="a shipped site profile, or the path of one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="key of the site to override: account=abc123"
    )
    parser.add_argument("--walltime", type=_walltime, metavar="H:MM", help="walltime (default: what the run needs)")


def _walltime(text: str) -> int:
    try:
        return int(parse_walltime(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    spec = load_spec(args.spec, args.overrides)
    site = None if args.site is None else load_site(args.site, args.set, warn)
    nodes = 0 if site is None else _nodes(args, site, spec)
    ranks = _ranks(args, spec) if site is None else check_ranks(site, spec, nodes)
    files = check_files(spec, args.clips)
    plan = make_plan(spec, ranks, files.clips)
    for line in files.warnings:
        warn(line)
    hours = None if args.speed is None else _hours(plan, args.speed)
    cost = None if site is None else estimate(site, spec, plan, nodes, args.walltime, args.speed, files.videos)
    more = None
    if hours is not None and files.videos is not None:
        more = hours * scored_clips(spec, plan, files.videos) / _trained_clips(plan)
    other = None if args.compare is None else _other(args)
    if args.json:
        values = _values(plan) | {"quarantined_clips": files.left_out}
        values |= {"warnings": files.warnings, "not_checked": files.not_checked}
        if hours is not None:
            values |= {"training_hours": hours, "rank_hours": hours * plan.ranks, "evaluation_hours": more}
        if site is not None and cost is not None:
            values["site"] = {"name": args.site, "comm": site.comm, **cost.values()}
        if other is not None:
            values["compare"] = {"name": other[0].name, **_values(other[1])}
        print(json.dumps(values))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if other is not None:
        _print_beside(console, [(spec, plan), other])
    else:
        _print_tables(console, spec, plan, _more_rows(spec, plan, files, hours, more, cost, site))
    return 0


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr)


def _other(args: argparse.Namespace) -> tuple[Spec, Plan]:
    """Return the spec of --compare and its plan, on one rank a virtual GPU where --ranks is not given."""
    spec = load_spec(args.compare, args.overrides)
    return spec, make_plan(spec, args.ranks or spec.scale.gpus or 1, check_files(spec, args.clips).clips)


def _values(plan: Plan) -> dict[str, Any]:
    rates = [{"step": step, "lr": lr} for step, lr in sample_learning_rates(plan)]
    return plan.values() | {"learning_rates": rates}


def _ranks(args: argparse.Namespace, spec: Spec) -> int:
    for name in ("nodes", "walltime"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is of a site: name it with --site")
    ranks = args.ranks if args.ranks is not None else spec.scale.gpus or 1
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be 1 or more")
    return int(ranks)


def _nodes(args: argparse.Namespace, site: Site, spec: Spec) -> int:
    """Return --nodes, or as many as --ranks or the virtual GPUs fill."""
    ranks = args.ranks if args.ranks is not None else spec.scale.gpus or site.ranks
    nodes = int(args.nodes if args.nodes is not None else max(1, ranks // site.ranks))
    if args.ranks is not None and args.ranks != nodes * site.ranks:
        have = f"{nodes} nodes of {site.name} have {nodes * site.ranks}"
        raise UserError(f"--ranks {args.ranks}: {have}; give --nodes alone")
    return nodes


@dataclass(frozen=True)
class Files:
    """What was found in the files of a spec: training clips, clips that the quarantine leaves out, and warnings.

    videos: the number in a validation, None if unknown. not_checked: keys whose files were not read.
    """

    clips: int
    videos: int | None
    left_out: int
    warnings: list[str]
    not_checked: list[str]


def check_files(spec: Spec, clips: int | None) -> Files:
    """Check the files that the spec names, as `train` does before its first step.

    clips: --clips, if the manifests are not here; they are not read then, and the weights may be missing, too.
    Raises UserError for a mistake in a file.
    """
    files = read_files(spec, clips)
    return replace(files, not_checked=files.not_checked + check_weights(spec, may_be_missing=clips is not None))


def read_files(spec: Spec, clips: int | None) -> Files:
    """Check the files as check_files does, without the weights."""
    if clips is not None:
        return Files(clips, None, 0, [], ["data.train", "data.val"])
    # Imported here: with --clips the command needs neither numpy nor PyAV.
    from summit_train.data.manifest.quarantine import class_warnings
    from summit_train.training.start import open_datasets

    for key, path in (("train", spec.data.train), ("val", spec.data.val)):
        if not Path(path).exists():
            number = "the number of its clips" if key == "train" else "the number of training clips"
            raise UserError(f"data.{key}: there is no {path}; give {number} with --clips N")
    train, val = open_datasets(spec)
    warnings = class_warnings(train.manifest, val.manifest)
    return Files(len(train), len(val), len(train.kept.excluded), warnings, [])


def check_weights(spec: Spec, to_come: Path | None = None, *, may_be_missing: bool) -> list[str]:
    """Check model.pretrained as check_files does; return its key where it is missing and may be.

    to_come: a folder whose runs will be there when the spec is trained.
    """
    from summit_train.core.saved import find_checkpoints
    from summit_train.models.weights import check_weights_exist

    path = spec.model.pretrained
    if path is None or find_checkpoints(spec.run_path):  # a run that has checkpoints takes its weights from them
        return []
    if to_come is not None and to_come.absolute() in Path(path).absolute().parents:
        return []
    if may_be_missing and not Path(path).exists():
        return ["model.pretrained"]
    try:
        check_weights_exist(Path(path))
    except UserError as error:
        raise UserError(f"model.pretrained: {error}") from error
    return []


def _hours(plan: Plan, speed: float) -> float:
    if not 0 < speed < math.inf:
        raise UserError(f"--speed {speed:g}: must be a number above 0")
    return _trained_clips(plan) / plan.ranks / speed / 3600


def _trained_clips(plan: Plan) -> int:
    return plan.total_steps * plan.global_batch


def _more_rows(
    spec: Spec,
    plan: Plan,
    files: Files,
    hours: float | None,
    more: float | None,
    cost: Estimate | None,
    site: Site | None,
) -> list[tuple[str, str]]:
    """Return the rows below those that every plan has. more: hours of the evaluation, None if unknown."""
    rows = [("left out", f"{files.left_out:,} clips, by {spec.data.quarantine}")] if files.left_out else []
    rows += [("not checked", ", ".join(files.not_checked))] if files.not_checked else []
    if site is not None and cost is not None:
        joined = "auto: Horovod where it is installed and MPI starts the ranks, else torch.distributed"
        comm = joined if site.comm == "auto" else f"{site.comm}, by the site profile"
        rows += [("nodes", f"{cost.nodes:,}"), ("comm", comm), *cost.rows()]
    elif hours is not None:
        evaluation = (
            "without evaluation (how many videos is unknown)" if more is None else f"and {more:,.2f} h of evaluation"
        )
        rows.append(("training time", f"{hours:,.2f} h, {hours * plan.ranks:,.1f} rank-hours, {evaluation}"))
    return rows


def _rows(spec: Spec, plan: Plan) -> list[tuple[str, str]]:
    warmup_epochs = f"{plan.warmup_steps / plan.steps_per_epoch:.4g} epochs, {spec.schedule.warmup}"
    return [
        ("virtual GPUs", f"{plan.virtual_gpus:,} = {plan.ranks:,} ranks x {plan.accumulation:,} accumulation"),
        ("global batch", f"{plan.global_batch:,} clips = {plan.frames_per_batch:,} frames"),
        ("BN batch", f"{plan.clips_per_gpu} clips x {spec.data.num_frames} frames of one virtual GPU"),
        ("steps", f"{plan.total_steps:,} = {plan.epochs} epochs x {plan.steps_per_epoch:,}"),
        ("dropped clips", f"{plan.dropped_clips_per_epoch:,} of {plan.clips:,} an epoch, others in each"),
        ("solver", describe_solver(spec.optimizer)),
        ("warm-up", f"{plan.warmup_steps:,} steps = {warmup_epochs}"),
        ("peak LR", f"{plan.peak_lr:.6g} ({spec.optimizer.lr_scaling} scaling of {spec.optimizer.base_lr:g})"),
        ("decay", describe_decay(spec.schedule)),
        ("parameters", f"{plan.parameters:,}"),
        *_communication_rows(spec, plan),
        ("multiply-adds", f"{plan.multiply_adds / 1e9:,.2f} G a clip, forward"),
        ("input", f"{plan.input_bytes_per_step_and_rank / 1e6:,.1f} MB a step and rank, uint8"),
        ("memory", f"about {plan.memory_bytes_per_rank / 2**30:,.1f} GiB a rank (weights and activations)"),
        ("checkpoint", f"{plan.checkpoint_bytes / 1e6:,.0f} MB, {spec.checkpoint.keep} kept"),
    ]


def _communication_rows(spec: Spec, plan: Plan) -> list[tuple[str, str]]:
    """Return what the ranks exchange, and where the batch grows what becomes of it."""
    parallel = spec.parallel
    if parallel.method == "synchronous":
        return [("gradients", f"{plan.gradient_bytes / 1e6:,.1f} MB a step through the allreduce")]
    rounds = averages_per_epoch(spec, plan.steps_per_epoch)
    state = "weights and solver state" if parallel.optimizer_state == "average" else "weights"
    sent = f"{plan.averaging_bytes / 1e6:,.1f} MB of {state}"
    rows = [("averaging", f"{counted(plan.virtual_gpus, 'learner')}; {counted(rounds, 'average')} an epoch of {sent}")]
    if len(plan.ladder) > 1:
        sizes = ", ".join(f"{rung.clips_per_gpu:,}" for rung in plan.ladder)
        lengths = ", ".join(f"{rung.steps_per_epoch:,}" for rung in plan.ladder)
        rows += [
            ("growing batch", f"{sizes} clips of a learner: {lengths} steps an epoch"),
            ("updates", f"{plan.total_steps:,} if it never grows, {plan.fewest_updates:,} if each decision grows it"),
        ]
    return rows


def _print_tables(console: Console, spec: Spec, plan: Plan, more: list[tuple[str, str]]) -> None:
    stacked = f" of {spec.data.flow_length} flow fields" if spec.data.modality == "flow" else ""
    console.print(f"{spec.name}: {spec.model.title}, {spec.data.num_frames} frames{stacked}")
    for name, value in [*_rows(spec, plan), *more]:
        console.print(f"  {name:<15} {value}")
    table = Table("step", "epoch", "learning rate", "", title="learning rate", title_justify="left")
    for step, lr in sample_learning_rates(plan):
        table.add_row(f"{step:,}", f"{step / plan.steps_per_epoch:.1f}", f"{lr:.6g}", _bar(lr, plan.peak_lr))
    console.print(table)


def _bar(lr: float, largest: float, characters: int = 24) -> str:
    return "#" * round(characters * lr / largest)


def _print_beside(console: Console, planned: list[tuple[Spec, Plan]]) -> None:
    """Print two plans in columns, and their LRs at the same epochs, drawn to one scale."""
    names = [spec.name for spec, _ in planned]
    table = Table("", *names, title="plan", title_justify="left")
    one, other = (dict(_rows(spec, plan)) for spec, plan in planned)
    for name in dict.fromkeys((*one, *other)):
        table.add_row(name, one.get(name, NONE), other.get(name, NONE))
    console.print(table)
    columns = [column for name in names for column in (name, "")]
    table = Table("epoch", *columns, title="learning rate", title_justify="left")
    largest = max(plan.peak_lr for _, plan in planned)
    plans = [plan for _, plan in planned]
    for epoch in sorted({step / plan.steps_per_epoch for plan in plans for step, _ in sample_learning_rates(plan)}):
        steps = [round(epoch * plan.steps_per_epoch) for plan in plans]
        pairs = zip(steps, plans, strict=True)
        rates = [plan.learning_rate(step) if step < plan.total_steps else 0.0 for step, plan in pairs]
        cells = [cell for lr in rates for cell in (f"{lr:.6g}" if lr else NONE, _bar(lr, largest, 12))]
        table.add_row(f"{epoch:.2f}", *cells)
    console.print(table)
