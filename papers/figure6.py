"""Table 3 and Figure 6 of Lin, Gan and Han (2019): `summit-train simulate` next to their published times.

    python papers/figure6.py shipped:kinetics/tsm_r50_8f_1536gpu --machine summit                     Table 3
    python papers/figure6.py shipped:kinetics/tsm_r50_8f_1536gpu --machine summit --out figure6.png   Figure 6

The arguments are those of `simulate`. A row without a published time is a projection. The lower half of the figure is
what failures cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import published
from matplotlib.axes import Axes
from script import checked_figure, run_script

from summit_train.cli.simulate import add_arguments, as_text, run_table, simulate
from summit_train.core.result import Result
from summit_train.core.text import NONE, counted, duration
from summit_train.report.figures import GREY, PALETTE, drawable, drawn, log_ticks, series
from summit_train.scaling.cost import ScaledJob, forecast
from summit_train.scaling.failures import losses
from summit_train.scaling.machines import Machine
from summit_train.spec import Spec
from summit_train.spec.catalog import BOTTLENECK_BACKBONES

NOTE = (
    "published: training time in Table 3; a row without one is a projection. top-1: the paper's at that\n"
    "batch. Efficiency: against one node's speed times the nodes. Evaluation comes on top."
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return run_script(parser, run, argv)


def run(args: argparse.Namespace) -> Result:
    out = checked_figure(args.out)
    jobs, values = simulate(args)
    rows = [row | known(job, row) for job, row in zip(jobs, values["rows"], strict=True)]
    if out is not None:
        draw(out, jobs, rows)
    values |= {"figure": None if out is None else str(out), "rows": rows}
    table: list[Sequence[str]] = []
    cells = [("published", "paper's top-1"), *map(published_cells, rows)]
    for row, further in zip(run_table(rows), cells, strict=True):
        table.append((*row, *further))
    text = as_text(values, jobs[0].spec.schedule.epochs, table, NOTE)
    if out is not None:
        text.append(f"drawn: {out}")
    return Result(text, values=values)


def known(job: ScaledJob, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's values for the same network, batch and machine."""
    is_papers = published.is_table_3_network(job.spec) and job.spec.parallel.method == "synchronous"
    papers = {one.global_batch: one for one in published.TABLE_3} if is_papers else {}
    paper = papers.get(row["global_batch"])
    is_timed = job.machine.name == "summit" and paper is not None and paper.gpus == row["gpus"]
    seconds = paper.seconds if is_timed and paper else None
    accuracy = paper and {"top1": paper.top1, "std": paper.std, "source": "the paper's Table 3 and Figure 4"}
    return {"published_run_s": seconds, "projection": seconds is None, "accuracy": accuracy}


def published_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    accuracy = row["accuracy"]
    top1 = f"{accuracy['top1']:.2f} \N{PLUS-MINUS SIGN} {accuracy['std']:.2f}" if accuracy else NONE
    return NONE if row["projection"] else duration(row["published_run_s"]), top1


def draw(out: Path, jobs: Sequence[ScaledJob], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the paper's Figure 6, the spec's training times with those of Table 3, and below what failures cost."""
    spec = jobs[0].spec
    machine = jobs[0].machine
    nodes = [row["nodes"] for row in rows]
    timed = [row for row in rows if not row["projection"]]
    note = "Beyond the dotted line no time was published." if timed else "All of it is a projection."
    caption = (
        f"Worked out, not measured: {machine.name} ({machine.about}), {spec.scale.clips_per_gpu} clips a GPU.\n"
        f"Rates: {machine.compute.source}. {note}"
    )
    with drawn(out, caption, (12.0, 10.2)) as figure:
        (left, right), below = figure.subplots(2, 2)
        for i, variant in enumerate(variants(spec, machine)):
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
        if timed:
            points = ([row["nodes"] for row in timed], [row["published_run_s"] / 3600 for row in timed])
            right.plot(*points, "+", label="published: Table 3", markersize=10, markeredgewidth=1.8, color=PALETTE[1])
        right.set_ylabel("training time (hours)")
        draw_losses(below, jobs)
        for axes in (left, right):
            axes.set_yscale("log")
            if timed:
                axes.axvline(max(row["nodes"] for row in timed), color=GREY, linestyle=":", linewidth=1.0)
        powers_of_two = [count for count in nodes if count & (count - 1) == 0]
        for axes in (left, right, *below):
            log_ticks(axes, powers_of_two or nodes, base=2)
            axes.set_xlabel(f"nodes ({machine.gpus_per_node} GPUs each)" if machine.gpus_per_node > 1 else "nodes")
            axes.legend()


def draw_losses(axes: Sequence[Axes], jobs: Sequence[ScaledJob]) -> None:
    """Draw Daly's interval and the goodput with it, at the machine's rate of failures and at the published ones."""
    machine = jobs[0].machine
    own = machine.failures.gpu_hours
    rates = published.GPU_HOURS
    if own not in rates.values():
        rates = {"the machine": own, **rates}
    nodes = [job.nodes for job in jobs]
    intervals, goodputs = axes
    for i, (name, hours) in enumerate(rates.items()):
        failures = machine.failures.model_copy(update={"gpu_hours": hours})
        failing = machine.model_copy(update={"failures": failures})
        found = [losses(replace(job, machine=failing), forecast(job)) for job in jobs]
        label = f"{name}: a failure in {hours:,.0f} GPU-hours"
        intervals.plot(nodes, [loss.daly_s / 60 for loss in found], "-", markersize=5, label=label, **series(i))
        goodputs.plot(nodes, [100 * loss.goodput for loss in found], "-", markersize=5, label=label, **series(i))
        if hours == own:
            label = f"{name}, with the spec's interval"
            shares = [100 * loss.own_goodput for loss in found]
            goodputs.plot(nodes, shares, "--", label=label, color=series(i)["color"])
    intervals.set(ylabel="best interval between checkpoints (min)", yscale="log")
    goodputs.set_ylabel("goodput (%)")


def variants(spec: Spec, machine: Machine) -> list[Spec]:
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


if __name__ == "__main__":
    sys.exit(main())
