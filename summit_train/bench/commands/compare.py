"""`summit-train bench table1` and `fig3 a|b|c`: the networks that the paper compares, measured on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from summit_train.bench.benches import measure_inference, measure_peaks
from summit_train.bench.commands import arguments, scaling, step
from summit_train.bench.commands.arguments import Values
from summit_train.bench.figures import BOUNDS, draw_compute, draw_scalability, draw_waits
from summit_train.bench.measure import spread_text
from summit_train.core.text import NONE, share, table
from summit_train.report.tables import machine_text
from summit_train.scaling.published import label_of
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped

PAPERS = ("i3d_3x3x3_r50_16f", "i3d_3x1x1_r50_32f", "tsm_r50_8f")  # configs/kinetics, in the order of Table 1
PAPERS_BATCH, TRAINING_BATCH = 16, 4  # 16: section 3 a


def add_table_1(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `table1` and of `fig3 a`."""
    _add_networks(parser, PAPERS_BATCH, "clips of a forward pass")
    arguments.add_turns(parser)
    arguments.add_peak(parser)
    arguments.add_output(parser)


def add_fig3(parser: argparse.ArgumentParser) -> None:
    """Add the panels of Figure 3, each with its arguments."""
    panels = parser.add_subparsers(metavar="PANEL", required=True)
    for name, add, run_panel, help_text in (
        ("a", add_table_1, run_inference, "computation: throughput and utilisation of a forward pass"),
        ("b", _add_b, _run_b, "data loading: the wait for data in a training step"),
        ("c", _add_c, _run_c, "networking: scalability against ranks"),
    ):
        panel = panels.add_parser(name, help=help_text, description=help_text)
        add(panel)
        panel.set_defaults(run_part=run_panel, bench=f"fig3{name}")


def _add_networks(parser: argparse.ArgumentParser, batch: int, batch_help: str) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, in all specs")
    parser.add_argument("--specs", nargs="+", metavar="SPEC", help="other specs than the paper's three")
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help=f"{batch_help} [{batch}]")


def _add_b(parser: argparse.ArgumentParser) -> None:
    _add_networks(parser, TRAINING_BATCH, "clips of a training step")
    parser.add_argument(
        "--frames-per-second", type=float, metavar="X", help="frames that the loader gives; the wait is then computed"
    )
    arguments.add_turns(parser)
    arguments.add_output(parser)


def _add_c(parser: argparse.ArgumentParser) -> None:
    _add_networks(parser, TRAINING_BATCH, "clips a rank and step")
    scaling.add_scaling(parser)
    arguments.add_output(parser)


def _paths(args: argparse.Namespace) -> list[str]:
    return args.specs or [str(shipped("configs/kinetics") / f"{name}.yaml") for name in PAPERS]


def _words(args: argparse.Namespace) -> list[str]:
    """Return all overrides: one rank a virtual GPU, of --batch clips."""
    return [*args.overrides, "scale.gpus=null", f"scale.clips_per_gpu={args.batch}"]


def _specs(args: argparse.Namespace) -> list[Spec]:
    return [load_spec(path, _words(args)) for path in _paths(args)]


def run_inference(args: argparse.Namespace) -> int:
    """Measure and print Table 1, which is Figure 3a too. Raises UserError for a wrong spec or option."""
    return arguments.show(args, _inference, as_text, draw_compute)


def _inference(args: argparse.Namespace) -> Values:
    turns, specs = arguments.turns_of(args), _specs(args)
    arguments.alone("this bench measures one device, start it")
    with arguments.open_place() as place:
        return {"bench": args.bench} | measure_inference(specs, turns, measure_peaks(specs, args.peak, place), place)


def as_text(values: Values) -> str:
    """Return the table for people: here, and behind it the paper's value in brackets."""
    batch = values["settings"]["batch"]
    head = ("", "parameters", "multiply-adds", "input", "compute/IO", "clips/s", "utilisation", "times as fast")
    spreads = (f"{row['label']} {spread_text(row['clips_per_second'])}" for row in values["rows"])
    lines = [
        f"machine: {machine_text(values['environment'])}",
        f"forward pass of {batch} random clips; median of {values['settings']['repeats']} turns; in brackets the",
        "paper's Table 1 (one Tesla P100, 16 clips; its utilisation is in multiples of the slowest network's)\n",
        table([head, *map(_cells, values["rows"])], ""),
        f"\nspread (min .. max) of clips/s: {'; '.join(spreads)}",
        *map(step.peak_text, values["peaks"]),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    def beside(name: str, form: str, size: float = 1, unit: str = "") -> str:
        return "" if row["published"] is None else f" [{row['published'][name] / size:{form}}{unit}]"

    use, times = row["utilisation"], row["relative_throughput"]["median"]
    percent = NONE if use is None else share(use["median"])
    return [
        row["label"],
        f"{row['parameters'] / 1e6:.1f} M" + beside("parameters", ".1f", 1e6, " M"),
        f"{row['multiply_adds'] / 1e9:.1f} G" + beside("multiply_adds", ".0f", 1e9, " G"),
        f"{row['frames']} x 3 x {row['crop']}^2",
        f"{row['compute_io'] / 1e3:.3g} k" + beside("compute_io", ".3g", 1e3, " k"),
        f"{row['clips_per_second']['median']:.3g}" + beside("clips_per_second", ".1f"),
        f"{percent}, {row['relative_utilisation']['median']:.2f} x" + beside("utilisation", ".1f", unit=" x"),
        f"{times:.2f} x" + beside("relative_throughput", ".1f", unit=" x"),
    ]


def _run_b(args: argparse.Namespace) -> int:
    return arguments.show(args, _waits, _waits_text, draw_waits)


def _waits(args: argparse.Namespace) -> Values:
    turns, rate = arguments.turns_of(args), args.frames_per_second
    arguments.alone("communication is left out here, start it")
    specs = _specs(args)
    experiments = [arguments.experiment_of(spec, 1, synthetic=rate is not None) for spec in specs]
    measured = step.measure(experiments, turns, 0.0)
    assert measured is not None, "this is the only rank"
    source = f"Clips of {measured['specs'][0]['clips']}, {measured['specs'][0]['workers']} workers"
    if rate is not None:
        source = f"PROJECTION: the wait is computed from a loader of {rate:g} frames/s, the rest is measured"
    rows = [_wait_row(label_of(spec), found, rate) for spec, found in zip(specs, measured["specs"], strict=True)]
    about = {"bench": args.bench, "environment": measured["environment"], "settings": measured["settings"]}
    about |= {"projection": rate is not None, "frames_per_second": rate, "source": source}
    return about | {"rows": rows, "steps": measured["specs"]}


def _wait_row(label: str, spec: dict[str, Any], rate: float | None) -> dict[str, Any]:
    """Return the seconds of a network's step. With a rate, the wait is the part of loading that exceeds the rest."""
    clips, waited = spec["global_batch"], spec["phases_s"]["data_wait"]["median"]
    busy, frames = spec["step_s"]["median"] - waited, clips * spec["frames"]
    wait = waited if rate is None else max(0.0, frames / rate - busy)
    row = {"label": label, "name": spec["name"], "clips_per_step": clips, "frames_per_step": frames}
    step_s = busy + wait
    return row | {"busy_s": busy, "data_wait_s": wait, "step_s": step_s, "clips_per_second": clips / step_s}


def _waits_text(values: Values) -> str:
    head = ("", "clips a step", "frames", "step s", "computing s", "data wait s", "of the step", "clips/s")
    rows: list[Sequence[str]] = [head]
    for row in values["rows"]:
        seconds = (f"{row[name]:.3f}" for name in ("step_s", "busy_s", "data_wait_s"))
        waits = share(row["data_wait_s"] / row["step_s"])
        counts = (str(row["clips_per_step"]), str(row["frames_per_step"]))
        rows.append([row["label"], *counts, *seconds, waits, f"{row['clips_per_second']:.3g}"])
    return f"machine: {machine_text(values['environment'])}\n{values['source']}\n\n{table(rows, '')}"


def _run_c(args: argparse.Namespace) -> int:
    def as_text(values: Values) -> str:
        return f"{scaling.as_text(values)}\npaper, 8 nodes of 4 Tesla P100s: {BOUNDS}"

    measure = partial(scaling.measure_networks, _paths(args), _words(args), label_of)
    return arguments.show(args, measure, as_text, draw_scalability)
