"""`summit-train simulate SPEC --machine NAME`: predict a run's time and cost by its number of nodes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable
from summit_train.core.text import duration
from summit_train.scaling.cost import ScaledJob, forecast
from summit_train.scaling.failures import losses
from summit_train.scaling.machines import load_machine, machine_names, with_rate
from summit_train.spec import Spec, load_spec

NODES = "1,8,16,32,64,128,256,384,512,1024"
KINETICS_400 = {"train": 240_000, "val": 20_000}  # clips, for a spec of 400 classes whose lists are not here
NOTE = "Efficiency: against one node's speed times the nodes. Evaluation comes on top."

Rows = Sequence[Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    shipped = ", ".join(machine_names())
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--machine", metavar="NAME", help=f"a machine file: {shipped}, or the path of one")
    machine.add_argument("--site", dest="machine", help=argparse.SUPPRESS)  # its former name
    machine.add_argument("--device", help=argparse.SUPPRESS)  # removed
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the machine's file")
    nodes_help = f"default {NODES}; a,...,b doubles from a to b"
    parser.add_argument("--nodes", default=NODES, metavar="N,...", help=nodes_help)
    parser.add_argument("--fixed-batch", action="store_true", help="keep scale.gpus: fewer GPUs accumulate")
    parser.add_argument("--clips", type=int, metavar="N", help="training clips, if the manifest is not on this machine")
    parser.add_argument("--videos", type=int, metavar="N", help="validation videos, likewise")
    parser.add_argument("--clips-per-second", type=float, metavar="X", help="of one GPU, measured with this spec")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # removed; papers/figure6.py draws
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    if args.device is not None:
        raise UserError("--device was removed; measure a step on your GPU by `summit-train bench step`")
    if args.out is not None:
        raise UserError("--out was removed; draw Figure 6 by `python papers/figure6.py SPEC --out FILE` in a checkout")
    jobs, values = simulate(args)
    return Result(as_text(values, jobs[0].spec.schedule.epochs, run_table(values["rows"]), NOTE), values=values)


def simulate(args: argparse.Namespace) -> tuple[list[ScaledJob], dict[str, Any]]:
    """Return the job on each number of nodes, and the object of --json. Raises UserError."""
    job = _job(args)
    jobs = [replace(job, nodes=nodes) for nodes in parse_nodes(args.nodes)]
    rows = []
    for one in jobs:
        found = forecast(one)
        rows.append(asdict(found) | {"losses": asdict(losses(one, found))})
    return jobs, {
        "site": job.machine.name,
        "about": job.machine.about,
        "spec": job.spec.name,
        "clips": job.clips,
        "videos": job.videos,
        "manifest_counted": args.clips is None and Path(job.spec.data.train).exists(),
        "last_batch": job.machine.last_batch,
        "compute_source": job.machine.compute.source,
        "failures_source": job.machine.failures.source,
        "background": job.spec.checkpoint.background,
        "rows": rows,
    }


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
    for name in ("clips", "videos", "clips_per_second"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be above 0 and finite, got {value:g}")
    spec = load_spec(args.spec, args.overrides)
    machine = load_machine(args.machine, args.set)
    if args.clips_per_second is not None:
        machine = with_rate(machine, spec, args.clips_per_second)
    gpus = spec.scale.gpus if args.fixed_batch else None
    if args.fixed_batch and gpus is None:
        raise UserError("--fixed-batch: scale.gpus is null, so the spec has no batch to keep; set scale.gpus")
    clips = args.clips or _count("--clips", spec, "train")
    videos = args.videos or _count("--videos", spec, "val")
    return ScaledJob(spec, machine, 1, clips, videos, gpus)


def _count(option: str, spec: Spec, which: str) -> int:
    """Return the number of a data set's clips, else that of Kinetics for 400 classes."""
    path = {"train": spec.data.train, "val": spec.data.val}[which]
    if Path(path).exists():
        # Imported here: with the numbers given the command needs no manifest, and so no numpy.
        from summit_train.data.dataset import Dataset
        from summit_train.data.manifest import read_manifest

        manifest = read_manifest(path)
        # Training may cut an annotated list into spans.
        return len(Dataset.open(spec, which) if manifest.boxes is not None else manifest)
    if spec.model.num_classes == 400:
        return KINETICS_400[which]
    raise UserError(f"{path} not found; give the number of its clips with {option} N")


def as_text(values: Mapping[str, Any], epochs: int, runs: Sequence[Sequence[str]], note: str) -> list[str | TextTable]:
    """Return the page of `simulate`. runs: its table of runs; note: the text below that."""
    return [
        f"{values['spec']} on {values['site']}: {values['about']}",
        f"  {values['clips']:,} clips, {epochs} epochs; an epoch's last, partial batch: {values['last_batch']}",
        f"  rates: {values['compute_source']}",
        "",
        TextTable(_step_table(values["rows"]), left=0),
        "",
        TextTable(runs, left=0),
        "",
        *note.split("\n"),
        "",
        TextTable(_failure_table(values["rows"]), left=0),
        "",
        f"failures: {values['failures_source']}.",
        "stall: how long the steps wait for a checkpoint "
        f"in the {'background' if values['background'] else 'foreground'}. Young, Daly: best interval",
        "between checkpoints. Goodput: time of the steps that count / all time since the first start.",
    ]


def _step_table(rows: Rows) -> list[Sequence[str]]:
    parts = ("step s", "= compute", "+ allreduce", "+ stragglers", "+ data")
    table: list[Sequence[str]] = [("nodes", "GPUs", "batch", "steps/epoch", *parts)]
    for row in rows:
        counts = (f"{row[name]:,}" for name in ("nodes", "gpus", "global_batch", "steps_per_epoch"))
        seconds = (row["parts"][name] for name in ("compute_s", "communication_s", "stragglers_s", "data_s"))
        table.append((*counts, *(f"{part_s:.4f}" for part_s in (row["step_s"], *seconds))))
    return table


def run_table(rows: Rows) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [("nodes", "clips/s", "efficiency", "training", "node-hours", "+ evaluation")]
    for row in rows:
        speeds = (f"{row['nodes']:,}", f"{row['clips_per_second']:,.0f}", f"{100 * row['efficiency']:.1f} %")
        table.append((*speeds, duration(row["run_s"]), f"{row['node_hours']:,.1f}", duration(row["evaluation_s"])))
    return table


def _failure_table(rows: Rows) -> list[Sequence[str]]:
    names = ("a failure in", "in the run", "stall s", "Young", "Daly", "goodput", "spec's interval", "its goodput")
    table: list[Sequence[str]] = [("nodes", *names)]
    for row in rows:
        lost = row["losses"]
        counts = (f"{row['nodes']:,}", duration(lost["mtbf_s"]), f"{lost['failures']:.3g}", f"{lost['stall_s']:.2f}")
        best = (duration(lost["young_s"]), duration(lost["daly_s"]), f"{100 * lost['goodput']:.2f} %")
        table.append((*counts, *best, duration(lost["own_interval_s"]), f"{100 * lost['own_goodput']:.2f} %"))
    return table
