"""`summit-train simulate SPEC`: predict a run by number of nodes (--machine), or a step on one GPU (--device)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from summit_train.core.errors import UserError
from summit_train.core.files import check_output, figure_path
from summit_train.core.result import Result, TextTable
from summit_train.core.text import NONE, counted, duration
from summit_train.scaling import published
from summit_train.scaling.cost import ScaledJob, forecast
from summit_train.scaling.failures import PUBLISHED_GPU_HOURS, losses
from summit_train.scaling.machines import Machine, load_machine, machine_names, with_rate
from summit_train.scaling.roofline import DEVICES, published_steps, roofline
from summit_train.spec import Spec, load_spec
from summit_train.spec.catalog import BOTTLENECK_BACKBONES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OF_MACHINES = ("set", "nodes", "fixed_batch", "clips", "videos", "clips_per_second", "out")  # need --machine
NODES = "1,8,16,32,64,128,256,384,512,1024"  # those of the paper's Table 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    shipped = ", ".join(machine_names())
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--machine", metavar="NAME", help=f"a machine file: {shipped}, or the path of one")
    machine.add_argument("--site", dest="machine", help=argparse.SUPPRESS)  # its former name
    machine.add_argument("--device", choices=DEVICES, help="one GPU instead: a step's least time by its data sheet")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the machine's file")
    parser.add_argument("--nodes", metavar="N,...", help=f"default {NODES}; a,...,b doubles from a to b")
    parser.add_argument("--fixed-batch", action="store_true", help="keep scale.gpus: fewer GPUs accumulate")
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument("--videos", type=int, metavar="N", help="validation videos, likewise")
    parser.add_argument("--clips-per-second", type=float, metavar="X", help="of one GPU, measured with this spec")
    parser.add_argument("--out", metavar="FILE", help="draw Figure 6 and the times of Table 3: .png, .svg or .pdf")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    for name in ("clips", "videos", "clips_per_second"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be above 0 and finite, got {value:g}")
    if args.device is not None:
        return _on_device(args)
    job = _job(args)
    out = None if args.out is None else figure_path(args.out)
    if out is not None:
        check_output("--out", out, out)
    jobs = [replace(job, nodes=nodes) for nodes in parse_nodes(NODES if args.nodes is None else args.nodes)]
    rows = [_row(job) for job in jobs]
    if out is not None:
        _draw(out, jobs, rows)
    is_counted = args.clips is None and Path(job.spec.data.train).exists()
    values: dict[str, Any] = {"site": job.machine.name, "about": job.machine.about, "spec": job.spec.name}
    values |= {"clips": job.clips, "videos": job.videos, "manifest_counted": is_counted}
    values |= {"last_batch": job.machine.last_batch, "compute_source": job.machine.compute.source}
    values |= {"failures_source": job.machine.failures.source, "background": job.spec.checkpoint.background}
    values |= {"figure": None if out is None else str(out), "rows": rows}
    return Result(_text(values, job.spec.schedule.epochs), values=values)


def _on_device(args: argparse.Namespace) -> Result:
    """Return the roofline of the spec's step on one GPU, and published steps beside theirs."""
    if given := [name for name in _OF_MACHINES if getattr(args, name) not in (None, False, [])]:
        raise UserError(f"--{given[0].replace('_', '-')} must be used with --machine, got --device")
    spec = load_spec(args.spec, args.overrides)
    device = DEVICES[args.device]
    own = {"label": spec.name, "precision": spec.precision, **roofline(spec, device)}
    rows = published_steps(args.device)
    names = ("precision", "clips", "launches", "TFLOP", "GB", "roofline s", "clips/s", "published", "ratio", "FLOP/s")
    table: list[Sequence[str]] = [("", *names)]
    for row in (own, *rows):
        counts = (f"{row['launches']:,}", f"{row['flops'] / 1e12:.2f}", f"{row['moved'] / 1e9:.1f}")
        bound = (f"{row['roofline_s']:.4f}", f"{row['clips'] / row['roofline_s']:,.1f}")
        known = (f"{row['published_rate']:,.1f}", f"{row['ratio']:.2f}") if "ratio" in row else (NONE, NONE)
        share = f"{100 * row['flops_s'] / row['roofline_s'] / row.get('ratio', 1):.0f} %"
        table.append((row["label"], row["precision"], f"{row['clips']:,}", *counts, *bound, *known, share))
    lines = [
        f"a training step on one {device.title}, computed from its data sheet; nothing was measured",
        "",
        TextTable(table, left=2),
        "",
        "roofline: the least time of these unfused operations, without caches, mixing and erasing, with cross entropy.",
        "GB: in 16 bits half of fp32's, without casts. ratio: clips/s / published. FLOP/s: of the peaks, as published.",
        *dict.fromkeys(row["source"] for row in rows),
    ]
    return Result(lines, values={"device": args.device, **own, "published": rows})


def parse_nodes(text: str) -> list[int]:
    """Read '1,8,16' or '1,8,...,64'; '...' doubles from the number before it to the one behind it. Raises UserError."""
    words = text.split(",")
    nodes: list[int] = []
    for i, word in enumerate(words):
        if word == "..." and nodes and i + 1 < len(words) and words[i + 1].isdecimal():
            while 2 * nodes[-1] < int(words[i + 1]):
                nodes.append(2 * nodes[-1])
        elif word.isdecimal() and int(word) > 0:
            nodes.append(int(word))
        else:
            raise UserError(f"--nodes must be numbers above 0 with commas, got {text}; try 1,8,...,1024")
    return nodes


def _job(args: argparse.Namespace) -> ScaledJob:
    """Return the job on one node."""
    spec = load_spec(args.spec, args.overrides)
    machine = load_machine(args.machine, args.set)
    if args.clips_per_second is not None:
        machine = with_rate(machine, spec, args.clips_per_second)
    gpus = spec.scale.gpus if args.fixed_batch else None
    if args.fixed_batch and gpus is None:
        raise UserError("--fixed-batch: scale.gpus is null, so the spec has no batch to keep; set scale.gpus")
    clips = args.clips or _count("--clips", spec, "train", published.TRAINING_VIDEOS)
    videos = args.videos or _count("--videos", spec, "val", published.VALIDATION_VIDEOS)
    return ScaledJob(spec, machine, 1, clips, videos, gpus)


def _count(option: str, spec: Spec, which: str, kinetics: int) -> int:
    """Return the number of a data set's clips, else the paper's number for 400 classes."""
    path = {"train": spec.data.train, "val": spec.data.val}[which]
    if Path(path).exists():
        # Imported here: with the numbers given the command needs no manifest, and so no numpy.
        from summit_train.data.dataset import Dataset
        from summit_train.data.manifest import read_manifest

        manifest = read_manifest(path)
        # Training may cut an annotated list into spans.
        return len(Dataset.open(spec, which) if manifest.boxes is not None else manifest)
    if spec.model.num_classes == 400:
        return kinetics
    raise UserError(f"{path} not found; give the number of its clips with {option} N")


def _row(job: ScaledJob) -> dict[str, Any]:
    """Return the forecast with what the paper published of the same network, batch and machine."""
    found = forecast(job)
    is_papers = published.is_table_3_network(job.spec) and job.spec.parallel.method == "synchronous"
    rows = {row.global_batch: row for row in published.TABLE_3} if is_papers else {}
    row = rows.get(found.global_batch)
    is_timed = job.machine.name == "summit" and row is not None and row.gpus == found.gpus
    seconds = row.seconds if is_timed and row else None
    accuracy = row and {"top1": row.top1, "std": row.std, "source": "the paper's Table 3 and Figure 4"}
    known = {"published_run_s": seconds, "projection": seconds is None, "accuracy": accuracy}
    return asdict(found) | known | {"losses": asdict(losses(job, found))}


def _text(values: Mapping[str, Any], epochs: int) -> list[str | TextTable]:
    parts = ("step s", "= compute", "+ allreduce", "+ stragglers", "+ data")
    steps: list[Sequence[str]] = [("nodes", "GPUs", "batch", "steps/epoch", *parts)]
    times = ("training", "node-hours", "+ evaluation", "published", "paper's top-1")
    runs: list[Sequence[str]] = [("nodes", "clips/s", "efficiency", *times)]
    names = ("a failure in", "in the run", "stall s", "Young", "Daly", "goodput", "spec's interval", "its goodput")
    failures: list[Sequence[str]] = [("nodes", *names)]
    for row in values["rows"]:
        counts = (f"{row[name]:,}" for name in ("nodes", "gpus", "global_batch", "steps_per_epoch"))
        seconds = (row["parts"][name] for name in ("compute_s", "communication_s", "stragglers_s", "data_s"))
        steps.append((*counts, *(f"{part_s:.4f}" for part_s in (row["step_s"], *seconds))))
        accuracy = row["accuracy"]
        lost = row["losses"]
        top1 = f"{accuracy['top1']:.2f} \N{PLUS-MINUS SIGN} {accuracy['std']:.2f}" if accuracy else NONE
        speeds = (f"{row['nodes']:,}", f"{row['clips_per_second']:,.0f}", f"{100 * row['efficiency']:.1f} %")
        run = (duration(row["run_s"]), f"{row['node_hours']:,.1f}", duration(row["evaluation_s"]))
        mtbf, young, daly, own = (duration(lost[key]) for key in ("mtbf_s", "young_s", "daly_s", "own_interval_s"))
        best, spec = (f"{100 * lost[key]:.2f} %" for key in ("goodput", "own_goodput"))
        counted = (f"{row['nodes']:,}", mtbf, f"{lost['failures']:.3g}", f"{lost['stall_s']:.2f}")
        failures.append((*counted, young, daly, best, own, spec))
        runs.append((*speeds, *run, NONE if row["projection"] else duration(row["published_run_s"]), top1))
    return [
        f"{values['spec']} on {values['site']}: {values['about']}",
        f"  {values['clips']:,} clips, {epochs} epochs; an epoch's last, partial batch: {values['last_batch']}",
        f"  rates: {values['compute_source']}",
        "",
        TextTable(steps, left=0),
        "",
        TextTable(runs, left=0),
        "",
        "published: training time in Table 3; a row without one is a projection. top-1: the paper's at that",
        "batch. Efficiency: against one node's speed times the nodes. Evaluation comes on top.",
        "",
        TextTable(failures, left=0),
        "",
        f"failures: {values['failures_source']}.",
        "stall: how long the steps wait for a checkpoint "
        f"in the {'background' if values['background'] else 'foreground'}. Young, Daly: best interval",
        "between checkpoints. Goodput: time of the steps that count / all time since the first start.",
        *([f"drawn: {values['figure']}"] if values["figure"] else []),
    ]


def _draw(out: Path, jobs: Sequence[ScaledJob], rows: Sequence[dict[str, Any]]) -> None:
    """Draw the paper's Figure 6, the spec's training times with those of Table 3, and below what failures cost."""
    # Imported here: without --out the command draws nothing.
    from summit_train.report.figures import GREY, PALETTE, drawable, drawn, log_ticks, series

    spec = jobs[0].spec
    machine = jobs[0].machine
    nodes = [row["nodes"] for row in rows]
    known = [row for row in rows if not row["projection"]]
    published_to = max((row["nodes"] for row in known), default=0)
    note = "Beyond the dotted line no time was published." if known else "All of it is a projection."
    caption = (
        f"Worked out, not measured: {machine.name} ({machine.about}), {spec.scale.clips_per_gpu} clips a GPU.\n"
        f"Rates: {machine.compute.source}. {note}"
    )
    with drawn(out, caption, (12.0, 10.2)) as figure:
        (left, right), below = figure.subplots(2, 2)
        for i, variant in enumerate(_variants(spec, machine)):
            curve = [forecast(replace(job, spec=variant)) for job in jobs]
            ideal = [row.clips_per_second / row.efficiency for row in curve]
            left.plot(nodes, ideal, "--", color=series(i)["color"], linewidth=1.0, alpha=0.7)
            label = drawable(f"{variant.model.arch}, {counted(variant.data.num_frames, 'frame')}")
            left.plot(nodes, [row.clips_per_second for row in curve], "-", markersize=5, label=label, **series(i))
            if i == 0:
                left.plot([], [], "--", color=GREY, linewidth=1.0, label="ideal: one node's speed times the nodes")
        left.set_ylabel("training speed (clips/s)")
        label = drawable(f"predicted: {spec.name}")
        right.plot(nodes, [row["run_s"] / 3600 for row in rows], "-", markersize=5, label=label, **series(0))
        if known:
            points = ([row["nodes"] for row in known], [row["published_run_s"] / 3600 for row in known])
            right.plot(*points, "+", label="published: Table 3", markersize=10, markeredgewidth=1.8, color=PALETTE[1])
        right.set_ylabel("training time (hours)")
        shown = [count for count in nodes if count & (count - 1) == 0] or nodes
        _draw_losses(below, jobs)
        for axes in (left, right):
            axes.set_yscale("log")
            if known:
                axes.axvline(published_to, color=GREY, linestyle=":", linewidth=1.0)
        for axes in (left, right, *below):
            log_ticks(axes, shown, base=2)
            axes.set_xlabel(f"nodes ({machine.gpus_per_node} GPUs each)" if machine.gpus_per_node > 1 else "nodes")
            axes.legend()


def _draw_losses(axes: Sequence[Axes], jobs: Sequence[ScaledJob]) -> None:
    """Draw Daly's interval and the goodput with it, at the machine's rate of failures and at the published ones."""
    from summit_train.report.figures import series

    own = jobs[0].machine.failures.gpu_hours
    rates = PUBLISHED_GPU_HOURS if own in PUBLISHED_GPU_HOURS.values() else {"the machine": own, **PUBLISHED_GPU_HOURS}
    nodes, intervals, goodputs = [job.nodes for job in jobs], *axes
    for i, (name, hours) in enumerate(rates.items()):
        found = [losses(job, forecast(job), hours) for job in jobs]
        label = f"{name}: a failure in {hours:,.0f} GPU-hours"
        intervals.plot(nodes, [loss.daly_s / 60 for loss in found], "-", markersize=5, label=label, **series(i))
        goodputs.plot(nodes, [100 * loss.goodput for loss in found], "-", markersize=5, label=label, **series(i))
        if hours == own:
            label = f"{name}, with the spec's interval"
            shares = [100 * loss.own_goodput for loss in found]
            goodputs.plot(nodes, shares, "--", label=label, color=series(i)["color"])
    intervals.set(ylabel="best interval between checkpoints (min)", yscale="log")
    goodputs.set_ylabel("goodput (%)")


def _variants(spec: Spec, machine: Machine) -> list[Spec]:
    """Return the spec as the paper's three networks, where the machine has rates for them, and the spec itself."""
    rates = {(rate.arch, rate.precision) for rate in machine.compute.rates}
    variants = []
    for arch, row in published.TABLE_1.items():
        if (arch, spec.precision) in rates and spec.model.backbone in BOTTLENECK_BACKBONES:
            model = spec.model.model_copy(update={"arch": arch})
            data = spec.data.model_copy(update={"num_frames": row.frames})
            variants.append(spec.model_copy(update={"model": model, "data": data}))
    own = (spec.model.arch, spec.data.num_frames)
    return variants if own in {(v.model.arch, v.data.num_frames) for v in variants} else [*variants, spec]
