"""Latency and throughput of networks, and the TSM paper's tables and Figure 5 with them.

    python papers/latency.py mine.yaml other.yaml                          ms of one clip, clips/s of 16
    python papers/latency.py --table 6                                     a table of the paper, measured here
    python papers/latency.py --table 2 --published --out tradeoff.png      Figure 5; nothing is measured

As in Lin et al., TSM (journal version), 5.3.5 and 5.4: passes with one clip after a warm-up, throughput with 16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from figure3 import ForwardBench
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from published_tsm import KINETICS, SOMETHING, TABLES, Row, Table
from script import run_script

from summit_train.bench.command import Bench, add_bench
from summit_train.bench.command import run as run_bench
from summit_train.bench.measure import Context, Values, in_turn, open_context, pair_ratios, spread
from summit_train.bench.steps import network_values
from summit_train.core.device import environment
from summit_train.core.errors import UserError
from summit_train.core.result import TextTable
from summit_train.core.session import check_single
from summit_train.core.text import NONE, counted
from summit_train.models.build import build_network
from summit_train.models.count import count_network
from summit_train.models.network import cpu_kernels
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import parameter_type
from summit_train.report.figures import GREY, PALETTE, drawable, drawn, log_ticks, wrapped
from summit_train.report.tables import machine_text
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import split_overrides
from summit_train.tasks.detection.detect import detect

ROUNDS = 5  # turns of each network, fewer for fewer passes
_BASE = "shipped:kinetics/tsm_r50_8f"  # the network of a table's row, but for the keys that the row names
_SHORT = {SOMETHING: "Sth-V1", KINETICS: "K400"}
_COLOURS = dict(zip(("TSM", "ECO", "I3D", "TRN", "TSN", "other 3D"), PALETTE, strict=False))
_AREA = 9e-6  # square points of a bubble for each parameter

Rounds = list[list[float]]  # seconds of each pass, by turn


@dataclass(frozen=True)
class Passes:
    """How long to measure: `repeats` passes with one clip and as many with `batch` clips, each after `warm_up` passes.

    seconds: most time of one network's timed passes at one batch, about. A warm-up ends after a quarter of it, and at
    least one pass of each turn is timed.
    """

    batch: int
    warm_up: int
    repeats: int
    seconds: float


@dataclass(frozen=True)
class Entry:
    """The networks of one row: one, or several of an ensemble, which run one after the other.

    published: the row of the paper that it is compared with. specs: empty where this version has no such network.
    """

    label: str
    specs: tuple[Spec, ...]
    published: Row | None = None

    def count_values(self) -> Values:
        """Return the values that need no measurement; None where the network does not exist here."""
        counts = [count_network(spec) for spec in self.specs]
        network: Values = dict.fromkeys(("name", "arch", "backbone", "precision", "height", "width", "crop"))
        return (network_values(self.specs[0]) if self.specs else network) | {
            "label": self.label,
            "frames": sum(spec.data.num_frames for spec in self.specs) or None,
            "parameters": sum(count.parameters for count in counts) or None,
            "multiply_adds": sum(count.multiply_adds for count in counts) or None,
            "published": self.published and asdict(self.published),
        }


def entries_of_table(table: Table, words: Sequence[str]) -> list[Entry]:
    """Return an entry for each row of a table, its networks with the overrides `words`. Raises UserError for these."""
    entries = []
    for row in table.rows:
        specs = []
        if (network := row.network) is not None:
            keys = [f"model.arch={network.arch}", f"model.backbone={network.backbone or 'null'}"]
            keys += [] if network.non_local is None else [f"model.non_local={network.non_local}"]
            specs = [load_spec(_BASE, [*keys, f"data.num_frames={frames}", *words]) for frames in network.frames]
        entries.append(Entry(row.label, tuple(specs), row))
    return entries


def measure_rounds(benches: Sequence[ForwardBench], clips: int, settings: Passes) -> list[Rounds]:
    """Measure all benches in turn; return the seconds of each pass by bench and turn."""
    for bench in benches:
        bench.passes(clips, settings.warm_up, settings.seconds / 4)
    rounds = min(ROUNDS, settings.repeats)
    passes = -(-settings.repeats // rounds)

    def turn(bench: ForwardBench) -> list[float]:
        bench.passes(clips, 1)  # not counted: the caches contain another network's weights
        return bench.passes(clips, passes, settings.seconds / rounds)

    found: list[Rounds] = [[] for _ in benches]
    for i, times in in_turn({i: partial(turn, bench) for i, bench in enumerate(benches)}, rounds):
        found[i].append(times)
    return found


def timed_values(single: Rounds, many: Rounds, first: Rounds, batch: int) -> Values:
    """Return latency and throughput of a row from the passes of one clip, of `batch`, and of the first row's network.

    `relative_latency` is over the first row's: the ratio of the medians of each turn, which were side by side.
    """
    milliseconds = spread([1000 * seconds for turn in single for seconds in turn])
    rates = spread([batch / seconds for turn in many for seconds in turn])
    medians, firsts = ([median(turn) for turn in rounds] for rounds in (single, first))
    return {f"{name}_ms": milliseconds[name] for name in ("median", "min", "max")} | {
        "passes": sum(map(len, single)),
        "turns": len(single),
        "relative_latency": spread(pair_ratios(medians, firsts)),
        "clips_per_second": rates["median"],
        "clips_per_second_spread": rates,
        "throughput_passes": sum(map(len, many)),
    }


def measure_latency(entries: Sequence[Entry], settings: Passes, context: Context, *, timed: bool) -> list[Values]:
    """Return a row of each entry. Those with a network are measured in turn; without `timed` they are only counted."""
    here = [entry for entry in entries if entry.specs]
    rows: list[Values] = []
    if timed and here:
        context.tell(f"building the networks: {'; '.join(entry.label for entry in here)}")
        benches = [ForwardBench.of(entry.specs, context.device) for entry in here]
        found = {}
        for clips in dict.fromkeys((1, settings.batch)):
            context.tell(f"batch {clips}, the networks in turn")
            found[clips] = measure_rounds(benches, clips, settings)
        pairs = zip(found[1], found[settings.batch], strict=True)
        rows = [timed_values(single, many, found[1][0], settings.batch) for single, many in pairs]
    untimed: Values = dict.fromkeys(timed_values([[1.0]], [[1.0]], [[1.0]], 1))
    times = iter(rows)
    return [entry.count_values() | (next(times, untimed) if entry.specs else untimed) for entry in entries]


def measure_detectors(entries: Sequence[Entry], settings: Passes, context: Context) -> list[Values]:
    """Return a row of each detector, all measured in turn: the network on a frame of a stream, and `boxes_ms` apart."""
    context.tell(f"building the detectors: {'; '.join(entry.label for entry in entries)}")
    benches = [bench for entry in entries for bench in frame_benches(entry.specs[0], context.device)]
    found = measure_rounds(benches, 1, settings)
    rows = []
    for entry, frames, boxes in zip(entries, found[::2], found[1::2], strict=True):
        times = timed_values(frames, frames, found[0], 1)
        no_clips: Values = dict.fromkeys(("clips_per_second", "clips_per_second_spread", "throughput_passes"))
        boxes_ms = spread([1000 * seconds for turn in boxes for seconds in turn])
        rows.append(entry.count_values() | times | no_clips | {"boxes_ms": boxes_ms})
    return rows


def frame_benches(spec: Spec, device: torch.device) -> list[ForwardBench]:
    """Return the bench of a detector with random weights, and of what follows it: the boxes of its last maps.

    The network sees one random frame as in training again and again, as a stream.
    """
    kind = parameter_type(spec.precision)
    _, height, width, channels = spec.data.clip_shape
    detector = spec.model.detector
    assert detector is not None
    stream = StreamNetwork(build_network(spec).to(device=device, dtype=kind))
    pixels = torch.randn(1, height, width, channels, device=device, dtype=kind)
    maps = torch.empty(0)
    caches = list[torch.Tensor]()

    def see(frame: torch.Tensor) -> None:
        nonlocal maps, caches
        maps, caches = stream(frame, caches)

    def find(_: torch.Tensor) -> None:
        detect(maps.float(), (height, width), detector, spec.model.num_classes)

    channels_last = pixels.permute(0, 3, 1, 2)  # in memory, as a stream's
    network = ForwardBench([(see, channels_last)], spec.precision, device)
    return [network, ForwardBench([(find, channels_last)], "fp32", device)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="experiment specs (YAML), measured in turn")
    table_help = f"a table of the TSM paper in place of SPECs: {', '.join(map(str, TABLES))}"
    parser.add_argument("--table", type=int, choices=TABLES, help=table_help)
    parser.add_argument("--published", action="store_true", help="with --table: measure nothing, only count")
    parser.add_argument("--warm-up", type=int, default=10, metavar="N", help="passes not counted [10]")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="passes of each network and batch [50]")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="clips of a pass for the throughput [16]")
    seconds_help = "most seconds of a network's passes of a batch [20]"
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help=seconds_help)
    parser.add_argument("--precision", metavar="P", help="another precision than the specs'")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> Values:
    paths, overrides = split_overrides([*args.specs, *args.overrides])
    if (args.table is None) == (not paths):
        raise UserError(f"give one SPEC or more, or --table with one of {', '.join(map(str, TABLES))}")
    if args.table is None and (args.published or args.out is not None):
        raise UserError("--published and --out are for a table of the paper: add --table")
    words = [*overrides, "scale.gpus=null", f"scale.clips_per_gpu={args.batch}"]
    words += [] if args.precision is None else [f"precision={args.precision}"]
    paper = None if args.table is None else TABLES[args.table]
    entries = [Entry(spec.name, (spec,)) for spec in (load_spec(path, words) for path in paths)]
    if paper is not None:
        entries = entries_of_table(paper, words)
    check_single("papers/latency.py")
    tasks = {spec.task for entry in entries for spec in entry.specs}
    if len(tasks) > 1:
        raise UserError(f"the SPECs must be of one task, got {' and '.join(sorted(tasks))}; time them one by one")
    passes = Passes(args.batch, args.warm_up, args.repeats, args.seconds)
    with open_context() as context:
        if tasks == {"detection"}:
            rows = measure_detectors(entries, passes, context)
        else:
            rows = measure_latency(entries, passes, context, timed=not args.published)
        about = environment(context.world, context.device, [context.world.host], cpu_kernels(context.device))
    return {
        "environment": about,
        "settings": asdict(passes) | {"clips": "random"},
        "timed": not args.published,
        "table": paper and {"number": paper.number, "title": paper.title, "setting": paper.setting},
        "data_sets": [name for name in _SHORT if paper and any(name in row.top1 for row in paper.rows)],
        "relative_to": next((entry.label for entry in entries if entry.specs), None),
        "rows": rows,
        "overrides": overrides,
    }


def as_text(values: Values) -> str:
    settings = values["settings"]
    paper = values["table"]
    lines = []
    if paper is not None:
        lines.append(f"TSM paper (journal version), Table {paper['number']}: {paper['title']}")
        lines.append(f"[in brackets] and top-1: published; {paper['setting']}")
        lines.append("parameters and multiply-adds of one clip, without brackets: counted here, with 400 classes")
    if values["timed"]:
        lines.append(f"machine: {machine_text(values['environment'])}")
    after = [key for key, value in values["rows"][0].items() if key.endswith("_ms") and isinstance(value, dict)]
    if after:
        names = ", ".join(key.removesuffix("_ms") for key in after)
        lines.append(
            f"RANDOM FRAMES, random weights, networks in turn; latency: the network on 1 frame of a stream; {names}: "
            f"what follows it; medians of up to {settings['repeats']} passes, warm-up: up to {settings['warm_up']}"
        )
    elif values["timed"]:
        lines.append(
            f"RANDOM CLIPS, random weights, networks in turn; latency: median of up to {settings['repeats']} passes of "
            f"1 clip; clips/s: median, {counted(settings['batch'], 'clip')} a pass; warm-up: up to "
            f"{settings['warm_up']} passes"
        )
    if values["overrides"]:
        lines.append(f"with {' '.join(values['overrides'])}")
    latency = ["latency ms", "least .. most", "of the first", *(key.replace("_", " ") for key in after), "clips/s"]
    accuracy = [f"{_SHORT[name]} top-1" for name in values["data_sets"]]
    head = ["", "network", "frames", "parameters", "multiply-adds", *latency, *accuracy]
    rows = [head, *(_cells(row, values["data_sets"], after) for row in values["rows"])]
    filled = [i for i in range(len(head)) if any(row[i] != NONE for row in rows[1:])]
    return "\n".join([*lines, "", str(TextTable([[row[i] for i in filled] for row in rows], left=2))])


def _cells(row: Values, data_sets: Sequence[str], after: Sequence[str]) -> list[str]:
    paper = row["published"] or {}
    timed = row["median_ms"] is not None

    times = f" x {paper['clips']}" if paper.get("clips", 1) > 1 else ""

    def with_published(name: str, form: str, size: float = 1, published: str | None = None, suffix: str = "") -> str:
        here = row[name]
        printed = paper.get(published or name)
        texts = [] if here is None else [form.format(here / size)]
        return " ".join(texts + ([] if printed is None else [f"[{form.format(printed / size)}{suffix}]"])) or NONE

    return [
        row["label"],
        " ".join(filter(None, (row["arch"], row["backbone"]))) or NONE,
        str(row["frames"] or paper.get("frames") or NONE),
        with_published("parameters", "{:.1f} M", 1e6),
        with_published("multiply_adds", "{:.4g} G", 1e9, suffix=times),
        with_published("median_ms", "{:.1f}", published="latency_ms"),
        f"{row['min_ms']:.1f} .. {row['max_ms']:.1f}" if timed else NONE,
        f"{row['relative_latency']['median']:.2f} x" if timed else NONE,
        *(f"{row[key]['median']:.1f}" for key in after),
        with_published("clips_per_second", "{:.3g}"),
        *(f"{paper['top1'][name]:.1f} %" if name in paper["top1"] else NONE for name in data_sets),
    ]


class Point(NamedTuple):
    """A row on one data set: multiply-adds in G of all clips of a video, top-1 in percent, parameters.

    counted: the multiply-adds are counted here, as the paper prints none. parameters None: neither printed nor counted.
    """

    label: str
    family: str
    cost: float
    top1: float
    parameters: float | None
    counted: bool


def points_of(rows: Sequence[Values], data_set: str) -> list[Point]:
    """Return the rows of a table with an accuracy on `data_set` and a cost: the published one, else the counted."""
    points = []
    for row in rows:
        paper = row["published"]
        cost = paper["multiply_adds"] or row["multiply_adds"]
        counted_here = paper["multiply_adds"] is None
        if data_set in paper["top1"] and cost is not None:
            size = paper["parameters"] or row["parameters"]
            top1 = paper["top1"][data_set]
            points.append(Point(row["label"], paper["family"], cost * paper["clips"] / 1e9, top1, size, counted_here))
    return points


def draw(path: Path, values: Values) -> None:
    """Draw Figure 5 of the TSM paper: published top-1 against multiply-adds, a panel for each data set.

    Bubbles have numbers; the legend names them.
    """
    panels = {name: points for name in values["data_sets"] if (points := points_of(values["rows"], name))}
    labels = dict.fromkeys(point.label for points in panels.values() for point in points)
    numbers = {label: str(i) for i, label in enumerate(labels, 1)}
    left_out = [row["label"] for row in values["rows"] if row["label"] not in numbers]
    caption = (
        "Lin, Gan, Wang and Han, TSM (journal version): accuracies and, where printed, multiply-adds and parameters as "
        f"published ({values['table']['setting']}); nothing was trained here. Hollow: multiply-adds of one clip, "
        "counted here where none are printed. Small dot: parameters not printed. "
    )
    caption += f"With {' '.join(values['overrides'])}. " if values["overrides"] else ""
    caption += f"Left out, without a cost: {'; '.join(left_out)}." if left_out else ""
    with drawn(path, wrapped(caption), (12.0, 5.8)) as figure:
        figure.suptitle(f"TSM paper, Table {values['table']['number']}: accuracy against cost", fontsize=12)
        subplots = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
        for axes, (name, points) in zip(subplots, panels.items(), strict=False):
            _draw_bubbles(axes, points, numbers)
            axes.set_ylabel(f"top-1 on {name} (%), published")
        colours = {point.label: _COLOURS[point.family] for points in panels.values() for point in points}
        circle = partial(Line2D, [], [], linestyle="", marker="o")
        handles = [
            circle(markersize=60**0.5, label=drawable(f"{numbers[label]}  {label}"), color=colour)
            for label, colour in colours.items()
        ]
        for millions in (25, 100):
            size = (_AREA * millions * 1e6) ** 0.5
            label = f"{millions} M parameters"
            handles.append(circle(markersize=size, label=label, color=GREY, fillstyle="none"))
        figure.legend(handles=handles, loc="outside right upper", fontsize=9, labelspacing=0.9, handletextpad=1.3)


def _draw_bubbles(axes: Axes, points: Sequence[Point], numbers: dict[str, str]) -> None:
    areas = [30.0 if point.parameters is None else _AREA * point.parameters for point in points]
    for area, point in sorted(zip(areas, points, strict=True), key=lambda pair: -pair[0]):
        colour = _COLOURS[point.family]
        face = "white" if point.counted else colour
        axes.scatter(point.cost, point.top1, s=area, facecolor=face, edgecolor=colour, linewidth=1.5, alpha=0.75)
        at = (point.cost, point.top1)
        right_of_it = (area**0.5 / 2 + 2, 0)
        axes.annotate(numbers[point.label], at, right_of_it, textcoords="offset points", fontsize=9, va="center")
    costs = [point.cost for point in points]
    log_ticks(axes, [step * 10.0**power for power in range(-1, 5) for step in (1, 2, 5)])
    axes.set(xlabel="multiply-adds of a video (G)", xlim=(min(costs) / 1.8, max(costs) * 1.8))
    axes.margins(y=0.12)


LATENCY = Bench("latency and throughput of networks; tables of the TSM paper", add_arguments, run, as_text, draw)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bench(parser, "latency", LATENCY)
    return run_script(parser, run_bench, argv)


if __name__ == "__main__":
    sys.exit(main())
