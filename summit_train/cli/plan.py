"""`summit-train plan`: every number of a run before the run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from summit_train.cluster.estimate import check_ranks, estimate
from summit_train.cluster.site import Site, load_site, load_spec_on, parse_walltime
from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable, show, warn
from summit_train.core.run_folder import CheckpointError, find_checkpoints
from summit_train.core.text import binary_size, counted, share
from summit_train.plan import Plan, averages_per_epoch, make_plan, sample_learning_rates
from summit_train.spec import Spec, own_parts
from summit_train.spec.keys import SOLVER_KEYS, OptimizerSpec, ScheduleSpec

if TYPE_CHECKING:
    from summit_train.data.dataset import Dataset


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
    """Return what the run starts from, by `start_notes`, and the keys whose files were not read."""
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


@dataclass(frozen=True)
class Files:
    """What was found in the files of a spec: training clips and warnings.

    videos: the number in a validation, None if unknown. not_checked: keys whose files were not read. train: the
    training set, None if it was not opened.
    """

    clips: int
    videos: int | None = None
    warnings: Sequence[str] = ()
    not_checked: Sequence[str] = ()
    train: Dataset | None = None


def read_files(spec: Spec, clips: int | None) -> Files:
    """Open the data sets as `train` does; with --clips do not read them. Raises UserError for a mistake in a file."""
    if clips is not None:
        keys = ("train", "val", "root")
        not_checked = [f"data.{key}" for key in keys if getattr(spec.data, key) is not None]
        has_weights = spec.model.pretrained is None or Path(spec.model.pretrained).exists()
        return Files(clips, not_checked=not_checked if has_weights else [*not_checked, "model.pretrained"])
    # Imported here: with --clips the command needs neither numpy nor PyAV.
    from summit_train.data.dataset import leaks, open_datasets
    from summit_train.data.manifest.overlap import class_warnings

    for key, path in (("train", spec.data.train), ("val", spec.data.val)):
        if not Path(path).exists():
            number = "the number of its clips" if key == "train" else "the number of training clips"
            raise UserError(f"data.{key}: {path} not found; give {number} with --clips N")
    train, val = open_datasets(spec)
    warnings = class_warnings(train.manifest, val.manifest)
    warnings += leaks(train, val).warnings(val.manifest)
    return Files(len(train), len(val), warnings, train=train)


def start_notes(spec: Spec, plan: Plan, files: Files, sweep: Path | None = None) -> list[str]:
    """Return notes on the weights or the checkpoint that a run starts from.

    sweep: the folder of the run's sweep, which knows the states of its runs and makes the weights that are there.
    Raises UserError for what `train` would refuse of these and of the network: CheckpointError for the checkpoints in
    the run's folder.
    """
    if spec.scale.clips_per_gpu == 1:  # the check needs torch
        from summit_train.models.network import check_batch

        check_batch(spec)
    weights = spec.model.pretrained
    if find_checkpoints(spec.run_path):  # the run takes its weights from them
        is_fresh = sweep is not None
    else:
        is_made = weights is not None and sweep is not None and sweep.absolute() in Path(weights).absolute().parents
        is_fresh = weights is None or is_made or "model.pretrained" in files.not_checked
    if is_fresh:
        return []
    import torch

    from summit_train.models.build import build_network
    from summit_train.training.checkpoint import starting_state

    with torch.device("meta"):  # a network without numbers takes little time and memory
        model = build_network(spec)
    return starting_state(spec, plan, files.train, model)[1]


def _rows(spec: Spec, plan: Plan) -> list[tuple[str, str]]:
    warmup_epochs = f"{counted(plan.warmup_steps / plan.steps_per_epoch, 'epoch')}, {spec.schedule.warmup}"
    kept = f"{spec.checkpoint.keep} kept" + ("" if spec.checkpoint.keep_best is None else " and the best")
    views = spec.data.repeats
    repeats = f", {views} views of each of {plan.global_batch // views:,} clips of the list" if views > 1 else ""
    network = plan.network
    trained = plan.network.trained_parameters
    part = "" if trained == network.parameters else f", of which {trained:,} are trained"
    beside = "; written alongside the steps from a copy in rank 0's memory" if spec.checkpoint.background else ""
    workers = spec.data.workers
    held = f"{plan.clip_bytes_per_rank / 1e6:,.1f} MB in memory at once"
    bn_batch = f"{counted(plan.clips_per_gpu, 'clip')} x {spec.data.num_frames} frames of one virtual GPU"
    most = ""
    early = ""
    if (stop := spec.schedule.early_stop) is not None:
        most = "at most "
        early = f"; stops after {counted(stop.epochs, 'epoch')} without a better {stop.measure}"
    fewer, more = divmod(plan.virtual_gpus, plan.ranks)
    shares = [f"{counted(n, 'rank')} x {each:,}" for n, each in ((plan.ranks - more, fewer), (more, fewer + 1)) if n]
    return [
        ("virtual GPUs", f"{plan.virtual_gpus:,} = {' + '.join(shares)} accumulation"),
        *balance_rows(plan),
        ("global batch", f"{counted(plan.global_batch, 'clip')} = {counted(plan.frames_per_batch, 'frame')}{repeats}"),
        *([("BN batch", bn_batch)] if plan.network.has_bn else []),
        ("steps", f"{most}{plan.total_steps:,} = {counted(plan.epochs, 'epoch')} x {plan.steps_per_epoch:,}{early}"),
        ("dropped clips", f"{plan.dropped_clips_per_epoch:,} of {plan.clips:,} per epoch, different ones each time"),
        ("solver", _solver_text(spec.optimizer)),
        ("warm-up", f"{counted(plan.warmup_steps, 'step')} = {warmup_epochs}"),
        ("peak LR", f"{plan.peak_lr:.6g} ({spec.optimizer.lr_scaling} scaling of {spec.optimizer.base_lr:g})"),
        ("decay", _decay_text(spec.schedule)),
        ("parameters", f"{network.parameters:,}{part}"),
        *_communication_rows(spec, plan),
        ("multiply-adds", f"{network.multiply_adds / 1e9:,.2f} G a clip, forward"),
        ("input", f"{plan.input_bytes_per_step_and_rank / 1e6:,.1f} MB a step and rank, uint8, {held}"),
        ("workers", "one for each core of a rank, at most 4" if workers is None else f"{workers:,} a rank"),
        ("memory", f"about {binary_size(plan.memory_bytes_per_rank)} a rank (weights and activations)"),
        *([("network built", network.note)] if network.note else []),
        ("checkpoint", f"{plan.checkpoint_bytes / 1e6:,.0f} MB, {kept}{beside}"),
    ]


def _solver_text(optimizer: OptimizerSpec) -> str:
    """Return the solver with its constants and its trust ratio: "sgd, momentum 0.9; weight decay 0.0001"."""
    solver: list[str] = [optimizer.name]
    for key in SOLVER_KEYS[optimizer.name]:
        value = getattr(optimizer, key)
        if key == "betas":
            solver.append(f"betas {value[0]:g}, {value[1]:g}")
        elif value or key != "momentum":
            solver.append(f"{key} {value:g}")
    words = [", ".join(solver), f"weight decay {optimizer.weight_decay:g}"]
    if optimizer.layer_decay != 1:
        words.append(f"layer decay {optimizer.layer_decay:g}")
    for frozen in optimizer.freeze:
        until = "" if frozen.until_epoch is None else f" for {counted(frozen.until_epoch, 'epoch')}"
        words.append(f"frozen{until}: {', '.join(frozen.names)}")
    trust = optimizer.trust_ratio
    if trust is not None:
        values = f"{trust.coefficient:g}" if trust.kind == "lars" else f"[{trust.lower:g}, {trust.upper:g}]"
        words.append(f"trust ratio {trust.kind} {values}")
    return "; ".join(words)


def _decay_text(schedule: ScheduleSpec) -> str:
    """Return the decay with its constants: "polynomial, power 2"."""
    if schedule.decay == "polynomial":
        return f"polynomial, power {schedule.power:g}"
    if schedule.decay == "steps":
        epochs = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
        return f"steps, x {schedule.factor:g} after epochs {epochs}"
    return ", ".join([schedule.decay, *(f"{name} {value}" for name, value in schedule.options.items())])


def balance_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what it costs that some ranks have one virtual GPU more than others, if any have."""
    if plan.load_balance == 1:
        return []
    enough = -(-plan.virtual_gpus // plan.accumulation)
    as_fast = f"; {counted(enough, 'rank')} would be as fast" if enough < plan.ranks else ""
    waits = f"ranks with {counted(plan.accumulation - 1, 'virtual GPU')} wait for those with {plan.accumulation:,}"
    return [("load balance", f"{share(plan.load_balance)} efficiency: {waits}{as_fast}")]


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
        sizes = ", ".join(f"{size.clips_per_gpu:,}" for size in plan.ladder)
        lengths = ", ".join(f"{size.steps_per_epoch:,}" for size in plan.ladder)
        rows.append(("growing batch", f"{sizes} clips of a learner: {lengths} steps an epoch"))
    return rows


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
        TextTable([*_rows(spec, plan), *more], left=2, indent="  "),
        "",
        TextTable(rates, left=0, indent="  "),
    ]
