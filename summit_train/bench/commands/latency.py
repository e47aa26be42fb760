"""`summit-train bench latency SPEC ...`: latency and throughput of networks, and the TSM paper's tables with them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from summit_train.bench.commands import arguments
from summit_train.bench.commands.arguments import Values
from summit_train.bench.latency import Entry, Passes, entries_of_table, measure_latency
from summit_train.bench.measure import MeasureError
from summit_train.bench.tradeoff import draw_tradeoff
from summit_train.core.text import NONE, counted, table
from summit_train.report.tables import machine_text
from summit_train.scaling.published_tsm import KINETICS, SOMETHING, TABLES
from summit_train.spec import load_spec

_SHORT = {SOMETHING: "Sth-V1", KINETICS: "K400"}
_TABLES = ", ".join(map(str, TABLES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="experiment specs (YAML), measured in turn")
    parser.add_argument(
        "--table", type=int, choices=TABLES, help=f"a table of the TSM paper in place of SPECs: {_TABLES}"
    )
    parser.add_argument("--published", action="store_true", help="with --table: measure nothing, only count")
    parser.add_argument("--warm-up", "--warmup", type=int, default=10, metavar="N", help="passes not counted [10]")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="passes of each network and batch [50]")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="clips of a pass for the throughput [16]")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="most seconds of a network's passes of a batch [20]"
    )
    parser.add_argument("--precision", metavar="P", help="another precision than the specs'")
    arguments.add_output(parser)
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises UserError for a wrong spec or option."""
    # Specs and key=value words arrive in one list.
    args.overrides = [*(word for word in args.specs if "=" in word), *args.overrides]
    args.specs = [word for word in args.specs if "=" not in word]
    if (args.table is None) == (not args.specs):
        raise MeasureError(f"give one SPEC or more, or --table with one of {_TABLES}")
    if args.table is None and (args.published or args.out is not None):
        raise MeasureError("--published and --out are for a table of the paper: add --table")
    return arguments.show(args, _measure, as_text, draw_tradeoff)


def _measure(args: argparse.Namespace) -> Values:
    words = [*args.overrides, "scale.gpus=null", f"scale.clips_per_gpu={args.batch}"]
    words += [] if args.precision is None else [f"precision={args.precision}"]
    entries = _spec_entries(args, words) if args.table is None else entries_of_table(TABLES[args.table], words)
    arguments.alone("this bench measures one device, start it")
    passes = Passes(args.batch, args.warm_up, args.repeats, args.seconds)
    with arguments.open_place() as place:
        published = None if args.table is None else TABLES[args.table]
        values = measure_latency(entries, passes, place, published, timed=not args.published)
    return values | {"overrides": args.overrides}


def _spec_entries(args: argparse.Namespace, words: list[str]) -> list[Entry]:
    specs = [load_spec(path, words) for path in args.specs]
    return [Entry(spec.name, (spec,)) for spec in specs]


def as_text(values: Values) -> str:
    """Return the table for people."""
    latency = ["latency ms", "least .. most", "of the first", "clips/s"]
    accuracy = [f"{_SHORT[name]} top-1" for name in values["data_sets"]]
    head = ["", "network", "frames", "parameters", "multiply-adds", *latency, *accuracy]
    rows = [head, *(_cells(row, values["data_sets"]) for row in values["rows"])]
    filled = [i for i in range(len(head)) if any(row[i] != NONE for row in rows[1:])]
    return "\n".join([*_about(values), "", table([[row[i] for i in filled] for row in rows], "", left=2)])


def _about(values: Values) -> list[str]:
    """Return what the table shows and where it was measured."""
    settings, paper, lines = values["settings"], values["table"], []
    if paper is not None:
        lines.append(f"TSM paper (journal version), Table {paper['number']}: {paper['title']}")
        lines.append(f"[in brackets] and top-1: published; {paper['setting']}")
        lines.append("parameters and multiply-adds of one clip, without brackets: counted here, with 400 classes")
    if values["timed"]:
        lines.append(f"machine: {machine_text(values['environment'])}")
        lines.append(
            f"RANDOM CLIPS, random weights, networks in turn; latency: median of up to {settings['repeats']} passes of "
            f"1 clip; clips/s: median, {counted(settings['batch'], 'clip')} a pass; warm-up: up to "
            f"{settings['warm_up']} passes"
        )
    if values["overrides"]:
        lines.append(f"with {' '.join(values['overrides'])}")
    return lines


def _cells(row: dict[str, Any], data_sets: Sequence[str]) -> list[str]:
    paper, timed = row["published"] or {}, row["median_ms"] is not None
    times = f" x {paper['clips']}" if paper.get("clips", 1) > 1 else ""
    multiply_adds = _figure(paper.get("multiply_adds"), "{:g} G" + times, 1e9)
    return [
        row["label"],
        " ".join(filter(None, (row["arch"], row["backbone"]))) or NONE,
        str(row["frames"] or paper.get("frames") or NONE),
        _beside(_figure(row["parameters"], "{:.1f} M", 1e6), _figure(paper.get("parameters"), "{:.1f} M", 1e6)),
        _beside(_figure(row["multiply_adds"], "{:.1f} G", 1e9), multiply_adds),
        _beside(_figure(row["median_ms"], "{:.1f}"), _figure(paper.get("latency_ms"), "{:.1f}")),
        f"{row['min_ms']:.1f} .. {row['max_ms']:.1f}" if timed else NONE,
        f"{row['relative_latency']['median']:.2f} x" if timed else NONE,
        _beside(_figure(row["clips_per_second"], "{:.3g}"), _figure(paper.get("clips_per_second"), "{:.1f}")),
        *(_figure(paper["top1"].get(name), "{:.1f} %") or NONE for name in data_sets),
    ]


def _figure(value: float | None, form: str, size: float = 1) -> str:
    return "" if value is None else form.format(value / size)


def _beside(here: str, published: str) -> str:
    """Return what was found here, with the published figure in brackets."""
    return " ".join(filter(None, (here, published and f"[{published}]"))) or NONE
