"""Table 1 and Figure 3 of Lin, Gan and Han (2019): the networks that the paper compares, measured on this machine.

    python papers/figure3.py table1 --out table1.png                      Table 1
    python papers/figure3.py a --out fig3a.png                            throughput and utilisation of a forward pass
    python papers/figure3.py b data.train=train.csv data.root=videos      the wait for data in a training step
    python papers/figure3.py c --ranks 1,2 --synthetic                    scalability against ranks

Each takes other networks by --specs, and says by --help what else it takes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from published import SCALABILITY, SLOWEST, label_of, table_1_row
from script import run_script

from summit_train.bench import measure, weak
from summit_train.bench.command import Bench, add_bench, run
from summit_train.bench.measure import Values
from summit_train.bench.peak import Peaks, add_peak, measure_peaks, peak_text
from summit_train.bench.steps import experiment_of, measure_steps, network_values
from summit_train.core.device import environment
from summit_train.core.result import TextTable
from summit_train.core.session import check_single
from summit_train.core.text import counted, share
from summit_train.models.count import count_network
from summit_train.models.network import cpu_kernels, initial_network
from summit_train.models.precision import mixed_precision, parameter_type
from summit_train.report.figures import GREY, PALETTE, drawable, drawn, series, wrapped
from summit_train.report.tables import machine_text
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import SHIPPED
from summit_train.training.timer import Mark

_BOUNDS = " and ".join(f"{'TSM' if arch == 'tsm' else 'I3D 3x3x3'} {bound}" for arch, bound in SCALABILITY.items())
PAPERS = ("i3d_3x3x3_r50_16f", "i3d_3x1x1_r50_32f", "tsm_r50_8f")  # configs/kinetics, in the order of Table 1
_ABOVE: dict[str, Any] = {
    "xytext": (0, 4), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 9
}  # fmt: skip


def add_networks(parser: argparse.ArgumentParser, batch: int = 4, batch_help: str = "clips of a training step") -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, in all specs")
    paths = [f"{SHIPPED}kinetics/{name}" for name in PAPERS]
    parser.add_argument("--specs", nargs="+", default=paths, metavar="SPEC", help="other specs than the paper's three")
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help=f"{batch_help} [{batch}]")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return all overrides: one rank a virtual GPU, of --batch clips."""
    return [*args.overrides, "scale.gpus=null", f"scale.clips_per_gpu={args.batch}"]


def add_table_1(parser: argparse.ArgumentParser) -> None:
    add_networks(parser, 16, "clips of a forward pass")  # 16: section 3 a
    measure.add_turns(parser)
    add_peak(parser)


def run_table_1(args: argparse.Namespace) -> Values:
    turns = measure.Turns(args.repeats, args.steps, args.warm_up)
    specs = [load_spec(path, overrides_of(args)) for path in args.specs]
    check_single(f"papers/figure3.py {args.bench}")
    with measure.open_context() as context:
        return measure_inference(specs, turns, measure_peaks(specs, args.peak, context), context)


@dataclass
class ForwardBench:
    """Networks, each with a batch of its own."""

    networks: Sequence[tuple[Callable[[torch.Tensor], object], torch.Tensor]]
    precision: str
    device: torch.device

    @classmethod
    def of(cls, specs: Sequence[Spec], device: torch.device) -> ForwardBench:
        """Return networks as evaluation runs them, with random weights, each on clips_per_gpu random clips."""
        networks = []
        for spec in specs:
            shape = (spec.scale.clips_per_gpu, *spec.data.clip_shape)
            pixels = torch.randn(shape, device=device, dtype=parameter_type(spec.precision))
            # Channels-last in memory, as from the loader.
            networks.append((initial_network(spec, device).eval(), pixels.permute(0, 1, 4, 2, 3)))
        return cls(networks, specs[0].precision, device)

    def passes(self, clips: int, most: int, seconds: float = math.inf) -> list[float]:
        """Return the seconds of each of `most` passes of `clips` clips; of fewer, and one at least, after `seconds`.

        In a pass all networks run, one after the other.
        """
        times: list[float] = []
        with torch.inference_mode(), mixed_precision(self.precision, self.device):
            while not times or (len(times) < most and sum(times) < seconds):
                start = Mark(self.device)
                for network, batch in self.networks:
                    network(batch[:clips])
                times.append(start.seconds_to(Mark(self.device)))
        return times


def measure_inference(specs: Sequence[Spec], turns: measure.Turns, peaks: Peaks, context: measure.Context) -> Values:
    """Measure the forward passes of networks in turn: the paper's Table 1 and Figure 3a.

    Throughput and multiply-adds/s are also in multiples of I3D 3x1x1's, or of the last network's.
    """
    batch = specs[0].scale.clips_per_gpu
    benches = [ForwardBench.of([spec], context.device) for spec in specs]
    for bench in benches:
        bench.passes(batch, turns.warm_up)
    seconds: list[list[float]] = [[] for _ in specs]
    measurements = {i: partial(bench.passes, batch, turns.steps) for i, bench in enumerate(benches)}
    for i, found in measure.in_turn(measurements, turns.repeats):
        seconds[i].append(fmean(found))
        context.tell(f"{label_of(specs[i])}: {seconds[i][-1]:.3f} s a forward pass of {counted(batch, 'clip')}")
    base = next((i for i, spec in enumerate(specs) if spec.model.arch == SLOWEST), len(specs) - 1)
    base_work = count_network(specs[base]).multiply_adds
    rows = []
    for spec, times in zip(specs, seconds, strict=True):
        network = count_network(spec)
        peak = peaks.get(spec.precision)
        rates = [batch * network.multiply_adds / s for s in times]
        faster = measure.pair_ratios(seconds[base], times)
        counts = {name: getattr(network, name) for name in ("parameters", "multiply_adds", "input_bytes", "compute_io")}
        measured = {
            "pass_s": measure.spread(times),
            "clips_per_second": measure.spread([batch / s for s in times]),
            "multiply_adds_per_second": measure.spread(rates),
            "utilisation": peak and measure.spread([rate / peak["multiply_adds_per_second"] for rate in rates]),
            "published": table_1_row(spec),
            "relative_to": label_of(specs[base]),
            "relative_throughput": measure.spread(faster),
            "relative_utilisation": measure.spread([network.multiply_adds / base_work * ratio for ratio in faster]),
        }
        rows.append({"label": label_of(spec)} | network_values(spec) | counts | measured)
    about = {
        "environment": environment(context.world, context.device, [context.world.host], cpu_kernels(context.device))
    }
    return about | {"settings": {"batch": batch} | asdict(turns), "peaks": list(peaks.values()), "rows": rows}


def table_1_text(values: Values) -> str:
    """Return the table for people: a line of what was measured, and below it the paper's."""
    head = ("", "parameters", "multiply-adds", "compute/IO", "clips/s", "utilisation", "times as fast")

    def cells(label: str, row: Values, use: str) -> list[str]:
        counts = [f"{row['parameters'] / 1e6:.1f} M", f"{row['multiply_adds'] / 1e9:.3g} G"]
        rates = [f"{row['compute_io'] / 1e3:.3g} k", f"{row['clips_per_second']:.3g}", use]
        return [label, *counts, *rates, f"{row['relative_throughput']:.2f} x"]

    rows: list[Sequence[str]] = [head]
    for row in values["rows"]:
        medians = {name: row[name]["median"] for name in ("clips_per_second", "relative_throughput")}
        use = f"{row['relative_utilisation']['median']:.2f} x"
        if row["utilisation"] is not None:
            use = f"{share(row['utilisation']['median'])}, {use}"
        rows.append(cells(f"{row['label']}, {row['height']} x {row['width']}", row | medians, use))
        if (paper := row["published"]) is not None:
            rows.append(cells("  the paper", paper, f"{paper['utilisation']:.1f} x"))
    spreads = (f"{row['label']} {measure.spread_text(row['clips_per_second'])}" for row in values["rows"])
    settings = values["settings"]
    lines = [
        f"machine: {machine_text(values['environment'])}",
        f"forward pass of {settings['batch']} random clips; median of {settings['repeats']} turns",
        "the paper's Table 1: one Tesla P100, 16 clips; utilisation in multiples of the slowest network's\n",
        str(TextTable(rows)),
        f"\nspread (min .. max) of clips/s: {'; '.join(spreads)}",
        *map(peak_text, values["peaks"]),
    ]
    return "\n".join(lines)


def error_bars(spreads: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return the distances of the least and the most from the medians, as matplotlib takes them."""
    below = [spread["median"] - spread["min"] for spread in spreads]
    return [below, [spread["max"] - spread["median"] for spread in spreads]]


def draw_table_1(path: Path, values: Values) -> None:
    """Draw the paper's Figure 3a: throughput and utilisation of each network's forward pass."""
    rows = values["rows"]
    settings = values["settings"]
    caption = (
        f"Forward pass of {settings['batch']} random clips on {machine_text(values['environment'])}."
        f"{''.join(f' Utilisation: of the {peak_text(peak)}.' for peak in values['peaks'])}\n"
        f"Bars: median of {settings['repeats']} turns, least and most. x: in multiples of {rows[0]['relative_to']}"
        "; paper: Table 1 and section 3 a, one Tesla P100, 16 clips."
    )

    def bars(axes: Axes, name: str, unit: float, form: str, relative: str, published: str) -> None:
        for i, row in enumerate(rows):
            bar = {part: unit * value for part, value in row[name].items()}
            paper = row["published"]
            colour = PALETTE[i % len(PALETTE)]
            axes.bar(i, bar["median"], 0.6, color=colour, yerr=error_bars([bar]), capsize=4, ecolor=GREY)
            note = f"{form.format(bar['median'])}, {row[relative]['median']:.2f} x"
            note += "" if paper is None else f"\npaper {published.format(**paper)}"
            axes.annotate(note, (i, bar["max"]), **_ABOVE)

    with drawn(path, wrapped(caption)) as figure:
        panels = figure.subplots(1, 1 + bool(values["peaks"]), squeeze=False)[0]
        paper = "{clips_per_second:g}, {relative_throughput:.1f} x"
        bars(panels[0], "clips_per_second", 1, "{:.3g}", "relative_throughput", paper)
        panels[0].set_title("Throughput")
        _name_bars(panels[0], rows, "clips/s, forward")
        if values["peaks"]:
            bars(panels[1], "utilisation", 100, "{:.1f} %", "relative_utilisation", "{utilisation:.1f} x")
            panels[1].set_title("Hardware utilisation")
            _name_bars(panels[1], rows, "% of peak multiply-adds/s")


def _name_bars(axes: Axes, rows: Sequence[Mapping[str, str]], y_label: str) -> None:
    axes.set_xticks(range(len(rows)), [drawable(row["label"]).replace(", ", "\n") for row in rows])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for two lines of notes


def add_waits(parser: argparse.ArgumentParser) -> None:
    add_networks(parser)
    rate_help = "frames that the loader gives; the wait is then computed"
    parser.add_argument("--frames-per-second", type=float, metavar="X", help=rate_help)
    measure.add_turns(parser)


def run_waits(args: argparse.Namespace) -> Values:
    """Measure training steps with their wait for data, or compute it from a rate of the loader.

    With a rate, the wait is the part of loading that exceeds the rest of the step.
    """
    rate = args.frames_per_second
    specs = [load_spec(path, overrides_of(args)) for path in args.specs]
    check_single("papers/figure3.py b")
    experiments = [experiment_of(spec, 1, synthetic=rate is not None) for spec in specs]
    with measure.open_context() as context:
        measured = measure_steps(experiments, measure.Turns(args.repeats, args.steps, args.warm_up), {}, context)
    assert measured is not None, "this is the only rank"
    rows = []
    steps = measured["specs"]
    for spec, step in zip(specs, steps, strict=True):
        clips = step["global_batch"]
        wait_s = step["phases_s"]["data_wait"]["median"]
        busy_s = step["step_s"]["median"] - wait_s
        frames = clips * step["frames"]
        if rate is not None:
            wait_s = max(0.0, frames / rate - busy_s)
        row = {"label": label_of(spec), "name": step["name"], "clips_per_step": clips, "frames_per_step": frames}
        times = {"busy_s": busy_s, "data_wait_s": wait_s, "step_s": busy_s + wait_s}
        rows.append(row | times | {"clips_per_second": clips / (busy_s + wait_s)})
    source = f"Clips of {steps[0]['clips']}, {counted(steps[0]['workers'], 'worker')}"
    if rate is not None:
        source = f"PROJECTION: the wait is computed from a loader of {rate:g} frames/s, the rest is measured"
    about = {"projection": rate is not None, "frames_per_second": rate, "source": source}
    return {name: measured[name] for name in ("environment", "settings")} | about | {"rows": rows, "steps": steps}


def waits_text(values: Values) -> str:
    head = ("", "clips a step", "frames", "step s", "computing s", "data wait s", "of the step", "clips/s")
    rows: list[Sequence[str]] = [head]
    for row in values["rows"]:
        counts = (str(row["clips_per_step"]), str(row["frames_per_step"]))
        seconds = (f"{row[name]:.3f}" for name in ("step_s", "busy_s", "data_wait_s"))
        waits = share(row["data_wait_s"] / row["step_s"])
        rows.append([row["label"], *counts, *seconds, waits, f"{row['clips_per_second']:.3g}"])
    return f"machine: {machine_text(values['environment'])}\n{values['source']}\n\n{TextTable(rows)}"


def draw_waits(path: Path, values: Values) -> None:
    """Draw the paper's Figure 3b: each network's training step, and the part of it that waits for data."""
    rows = values["rows"]
    settings = values["settings"]
    busy, waits = ([row[name] for row in rows] for name in ("busy_s", "data_wait_s"))
    caption = (
        f"{counted(rows[0]['clips_per_step'], 'clip')} a step on {machine_text(values['environment'])}. "
        f"{values['source']}. "
        f"Median of {settings['repeats']} turns. The paper's Figure 3b has no numbers in its text: on a Summit "
        "node loading is the bottleneck of I3D 3x1x1, less of I3D 3x3x3, and hidden under TSM's computation."
    )
    with drawn(path, wrapped(caption)) as figure:
        axes = figure.subplots()
        axes.bar(range(len(rows)), busy, 0.6, color=PALETTE[0], label="computation and update")
        axes.bar(range(len(rows)), waits, 0.6, bottom=busy, color=PALETTE[1], label="wait for data")
        for i, row in enumerate(rows):
            note = f"{row['step_s']:.3g} s\nwait {share(row['data_wait_s'] / row['step_s'])}"
            axes.annotate(note, (i, row["step_s"]), **_ABOVE)
        _name_bars(axes, rows, "seconds of a training step")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def add_scalability(parser: argparse.ArgumentParser) -> None:
    add_networks(parser)
    weak.add_scaling(parser)


def run_scalability(args: argparse.Namespace) -> Values:
    check_single("papers/figure3.py c")
    values = weak.measure_scaling(args, args.specs, overrides_of(args))
    for network, path in zip(values["networks"], args.specs, strict=True):
        network["label"] = label_of(load_spec(path, overrides_of(args)))
    return values


def scalability_text(values: Values) -> str:
    return f"{weak.as_text(values)}\npaper, 8 nodes of 4 Tesla P100s: {_BOUNDS}"


def draw_scalability(path: Path, values: Values) -> None:
    """Draw the paper's Figure 3c: speed over ideal speed against ranks."""
    networks = values["networks"]
    settings = values["settings"]
    ranks = [row["ranks"] for row in networks[0]["rows"]]
    caption = (
        f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}, up to {ranks[-1]} ranks on "
        f"{machine_text(values['environment'])}. Speed over the first point's speed times the ranks: median of "
        f"{settings['repeats']} rounds, least and most. "
        f"Paper, Figure 3c, 8 nodes of 4 Tesla P100s: {_BOUNDS}."
    )
    with drawn(path, wrapped(caption)) as figure:
        axes = figure.subplots()
        highest = 100.0
        for i, network in enumerate(networks):
            percent = [{part: 100 * value for part, value in row["efficiency"].items()} for row in network["rows"]]
            medians = [value["median"] for value in percent]
            label = drawable(network["label"])
            axes.errorbar(ranks, medians, yerr=error_bars(percent), label=label, capsize=4, **series(i))
            highest = max(highest, *(value["max"] for value in percent))
        axes.axhline(100, linestyle="--", color=GREY, label="ideal")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set(xlabel="ranks", ylabel="scalability (% of ideal speed)", ylim=(0, max(110.0, 1.05 * highest)))
        axes.legend(loc="lower left")


TABLE_1 = (add_table_1, run_table_1, table_1_text, draw_table_1)
BENCHES = {
    "table1": Bench("the paper's Table 1: three networks", *TABLE_1),
    "a": Bench("computation: throughput and utilisation of a forward pass", *TABLE_1),
    "b": Bench("data loading: the wait for data in a training step", add_waits, run_waits, waits_text, draw_waits),
    "c": Bench(
        "networking: scalability against ranks", add_scalability, run_scalability, scalability_text, draw_scalability
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    panels = parser.add_subparsers(metavar="PANEL", required=True)
    for name, bench in BENCHES.items():
        add_bench(panels.add_parser(name, help=bench.help, description=bench.help), name, bench)
    return run_script(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
