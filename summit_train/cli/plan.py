"""`summit-train plan`: every number of a run before the run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from summit_train.cluster.estimate import Estimate, check_ranks, estimate
from summit_train.cluster.site import Site, load_site, parse_walltime
from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable
from summit_train.core.text import counted
from summit_train.plan import Plan, averages_per_epoch, make_plan, sample_learning_rates
from summit_train.spec import Spec, load_spec
from summit_train.spec.optimizer import describe_decay, describe_solver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: one a virtual GPU)")
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument(
        "--speed", type=float, metavar="CLIPS_PER_S", help="clips a second of one rank, for the cost on the site"
    )
    add_site_arguments(parser, required=False)
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the site (default: one GPU a virtual GPU)")
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


def run(args: argparse.Namespace) -> Result:
    spec = load_spec(args.spec, args.overrides)
    site = None if args.site is None else load_site(args.site, args.set, warn)
    nodes, ranks = _nodes_and_ranks(args, site, spec)
    files = check_files(spec, args.clips)
    plan = make_plan(spec, ranks, files.clips)
    for line in files.warnings:
        warn(line)
    cost = None if site is None else estimate(site, spec, plan, nodes, args.walltime, args.speed, files.videos)
    values = plan.values() | {
        "learning_rates": [{"step": step, "lr": lr} for step, lr in sample_learning_rates(plan)],
        "quarantined_clips": files.left_out,
        "warnings": files.warnings,
        "not_checked": files.not_checked,
    }
    if site is not None and cost is not None:
        values["site"] = {"name": args.site, "comm": site.comm, **cost.values()}
    return Result(_text(spec, plan, _more_rows(spec, files, cost, site)), values=values)


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr)


def _nodes_and_ranks(args: argparse.Namespace, site: Site | None, spec: Spec) -> tuple[int, int]:
    """Return --nodes and --ranks; by default as many as the virtual GPUs fill."""
    if site is None:
        for name in ("nodes", "walltime", "speed"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} must be used with --site; try --site local")
        ranks = args.ranks if args.ranks is not None else spec.scale.gpus or 1
        if ranks < 1:
            raise UserError(f"--ranks must be 1 or more, got {ranks}")
        return 0, ranks
    ranks = args.ranks if args.ranks is not None else spec.scale.gpus or site.ranks
    nodes = args.nodes if args.nodes is not None else max(1, ranks // site.ranks)
    if args.ranks is not None and args.ranks != nodes * site.ranks:
        have = f"{nodes} nodes of {site.name} have {nodes * site.ranks}"
        raise UserError(f"--ranks {args.ranks}: {have}; give --nodes alone")
    return nodes, check_ranks(site, spec, nodes)


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
            raise UserError(f"data.{key}: {path} not found; give {number} with --clips N")
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


def _more_rows(spec: Spec, files: Files, cost: Estimate | None, site: Site | None) -> list[tuple[str, str]]:
    """Return the rows below those that every plan has."""
    rows = [("left out", f"{files.left_out:,} clips, by {spec.data.quarantine}")] if files.left_out else []
    rows += [("not checked", ", ".join(files.not_checked))] if files.not_checked else []
    if site is not None and cost is not None:
        joined = "auto: Horovod where it is installed and MPI starts the ranks, else torch.distributed"
        comm = joined if site.comm == "auto" else f"{site.comm}, by the site profile"
        rows += [("nodes", f"{cost.nodes:,}"), ("comm", comm), *cost.rows()]
    return rows


def _rows(spec: Spec, plan: Plan) -> list[tuple[str, str]]:
    warmup_epochs = f"{plan.warmup_steps / plan.steps_per_epoch:.4g} epochs, {spec.schedule.warmup}"
    beside = "; written alongside the steps from a copy in rank 0's memory" if spec.checkpoint.background else ""
    return [
        ("virtual GPUs", f"{plan.virtual_gpus:,} = {plan.ranks:,} ranks x {plan.accumulation:,} accumulation"),
        ("global batch", f"{plan.global_batch:,} clips = {plan.frames_per_batch:,} frames"),
        ("BN batch", f"{plan.clips_per_gpu} clips x {spec.data.num_frames} frames of one virtual GPU"),
        ("steps", f"{plan.total_steps:,} = {plan.epochs} epochs x {plan.steps_per_epoch:,}"),
        ("dropped clips", f"{plan.dropped_clips_per_epoch:,} of {plan.clips:,} per epoch, different ones each time"),
        ("solver", describe_solver(spec.optimizer)),
        ("warm-up", f"{plan.warmup_steps:,} steps = {warmup_epochs}"),
        ("peak LR", f"{plan.peak_lr:.6g} ({spec.optimizer.lr_scaling} scaling of {spec.optimizer.base_lr:g})"),
        ("decay", describe_decay(spec.schedule)),
        ("parameters", f"{plan.parameters:,}"),
        *_communication_rows(spec, plan),
        ("multiply-adds", f"{plan.multiply_adds / 1e9:,.2f} G a clip, forward"),
        ("input", f"{plan.input_bytes_per_step_and_rank / 1e6:,.1f} MB a step and rank, uint8"),
        ("memory", f"about {plan.memory_bytes_per_rank / 2**30:,.1f} GiB a rank (weights and activations)"),
        ("checkpoint", f"{plan.checkpoint_bytes / 1e6:,.0f} MB, {spec.checkpoint.keep} kept{beside}"),
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
        rows.append(("growing batch", f"{sizes} clips of a learner: {lengths} steps an epoch"))
    return rows


def _text(spec: Spec, plan: Plan, more: list[tuple[str, str]]) -> list[str | TextTable]:
    stacked = f" of {spec.data.flow_length} flow fields" if spec.data.modality == "flow" else ""
    rates = [("step", "epoch", "learning rate", "")]
    for step, lr in sample_learning_rates(plan):
        bar = f"{'#' * round(24 * lr / plan.peak_lr):<24}"
        rates.append((f"{step:,}", f"{step / plan.steps_per_epoch:.1f}", f"{lr:.6g}", bar))
    return [
        f"{spec.name}: {spec.model.title}, {spec.data.num_frames} frames{stacked}",
        TextTable([*_rows(spec, plan), *more], left=2, indent="  "),
        "",
        TextTable(rates, left=0, indent="  "),
    ]
