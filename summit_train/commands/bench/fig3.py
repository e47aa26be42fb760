"""`summit-train bench fig3 a|b|c`: what the paper's Figure 3 shows, measured on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from summit_train.commands.bench import table1
from summit_train.commands.bench.arguments import (
    add_output,
    add_repeats,
    check_repeats,
    machine_text,
    share,
    table,
)
from summit_train.commands.bench.figures import BOUNDS, figure_file, save_scalability, save_waits
from summit_train.commands.bench.measuring import measure_steps
from summit_train.commands.bench.networks import Subject, add_networks, batch_words, read_networks
from summit_train.commands.bench.scaling import about, add_scaling, measure_scaling
from summit_train.commands.bench.scaling import as_text as scaling_text
from summit_train.commands.start import this_launch
from summit_train.scaling.measure import MeasureError

TRAINING_BATCH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    panels = parser.add_subparsers(metavar="PANEL", required=True)
    for name, add, run_panel, help_text in (
        ("a", table1.add_arguments, _run_a, "computation: throughput and utilisation of a forward pass"),
        ("b", _add_b, _run_b, "data loading: the wait for data in a training step"),
        ("c", _add_c, _run_c, "networking: scalability against ranks"),
    ):
        panel = panels.add_parser(name, help=help_text, description=help_text)
        add(panel)
        panel.set_defaults(run_panel=run_panel)


def run(args: argparse.Namespace) -> int:
    """Measure and print one panel. Raises ValueError for a wrong spec or option."""
    return int(args.run_panel(args))


def _run_a(args: argparse.Namespace) -> int:
    values = table1.measure(args, "fig3a")
    print(json.dumps(values) if args.json else table1.as_text(values))
    return 0


def _add_b(parser: argparse.ArgumentParser) -> None:
    add_networks(parser, TRAINING_BATCH, "clips of a training step")
    parser.add_argument(
        "--frames-per-second", type=float, metavar="X", help="frames that the loader gives; the wait is then computed"
    )
    add_repeats(parser)
    add_output(parser)


def _run_b(args: argparse.Namespace) -> int:
    check_repeats(args)
    rate = args.frames_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise MeasureError(f"--frames-per-second {rate:g}: a number above 0 is wanted")
    if this_launch().size > 1:
        raise MeasureError(f"{this_launch().size} ranks were started: communication is left out here, start it alone")
    out, subjects = figure_file(args.out), read_networks(args)
    options = argparse.Namespace(**vars(args) | {"synthetic": rate is not None, "peak": 0.0})
    options.overrides = batch_words(args)
    measured = measure_steps([subject.path for subject in subjects], options)
    assert measured is not None, "this is the only rank"
    values = _waits(measured, subjects, rate)
    if out is not None:
        save_waits(out, values)
    print(json.dumps(values) if args.json else _waits_text(values))
    return 0


def _waits(measured: dict[str, Any], subjects: list[Subject], rate: float | None) -> dict[str, Any]:
    rows = [_wait_row(spec, subject, rate) for spec, subject in zip(measured["specs"], subjects, strict=True)]
    source = f"Clips of {measured['specs'][0]['clips']}, {measured['specs'][0]['workers']} workers"
    if rate is not None:
        source = f"PROJECTION: the wait is computed from a loader of {rate:g} frames/s, the rest is measured"
    return {
        "bench": "fig3b",
        "environment": measured["environment"],
        "settings": measured["settings"],
        "projection": rate is not None,
        "frames_per_second": rate,
        "source": source,
        "rows": rows,
        "steps": measured["specs"],
    }


def _wait_row(spec: dict[str, Any], subject: Subject, rate: float | None) -> dict[str, Any]:
    """Seconds of one network's step. With a rate: the wait is what loading takes longer than the rest."""
    waited = spec["phases_s"]["data_wait"]["median"]
    busy = spec["step_s"]["median"] - waited
    frames = spec["global_batch"] * spec["frames"]
    wait = waited if rate is None else max(0.0, frames / rate - busy)
    return {
        "label": subject.label,
        "name": spec["name"],
        "clips_per_step": spec["global_batch"],
        "frames_per_step": frames,
        "busy_s": busy,
        "data_wait_s": wait,
        "step_s": busy + wait,
        "clips_per_second": spec["global_batch"] / (busy + wait),
    }


def _waits_text(values: dict[str, Any]) -> str:
    head = ("", "clips a step", "frames", "step s", "computing s", "data wait s", "of the step", "clips/s")
    rows = [head, *map(_wait_cells, values["rows"])]
    return f"machine: {machine_text(values['environment'])}\n{values['source']}\n\n{table(rows, '')}"


def _wait_cells(row: dict[str, Any]) -> list[str]:
    seconds = (f"{row[name]:.3f}" for name in ("step_s", "busy_s", "data_wait_s"))
    counts = (str(row["clips_per_step"]), str(row["frames_per_step"]))
    waits = share(row["data_wait_s"] / row["step_s"])
    return [row["label"], *counts, *seconds, waits, f"{row['clips_per_second']:.3g}"]


def _add_c(parser: argparse.ArgumentParser) -> None:
    add_networks(parser, TRAINING_BATCH, "clips a rank and step")
    add_scaling(parser)
    add_output(parser)


def _run_c(args: argparse.Namespace) -> int:
    out, subjects = figure_file(args.out), read_networks(args)
    networks = [measure_scaling(subject.path, batch_words(args), args)[1] for subject in subjects]
    labelled = [{"label": subject.label, **network} for subject, network in zip(subjects, networks, strict=True)]
    values = {"bench": "fig3c", **about(args, networks), "networks": labelled}
    if out is not None:
        save_scalability(out, values)
    print(json.dumps(values) if args.json else f"{scaling_text(values)}\npaper, 8 nodes of 4 Tesla P100s: {BOUNDS}")
    return 0
