"""Figures of the benches and of the scaling study, drawn from the values that are printed as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from summit_train.core.text import counted, duration, share
from summit_train.report.caption import drawn, wrapped
from summit_train.report.figures import GREY, PALETTE, drawable, series
from summit_train.report.tables import machine_text
from summit_train.scaling.published import SCALABILITY

Rows = Sequence[Mapping[str, Any]]  # as a bench or `simulate` prints them in JSON

ROUND_TIMES = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 108000, 360000, 1080000)  # seconds

BOUNDS = " and ".join(
    f"I3D 3x3x3 {bound}" if arch == "i3d_3x3x3" else f"TSM {bound}" for arch, bound in SCALABILITY.items()
)


def draw_compute(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3a: throughput and utilisation of each network's forward pass."""
    rows, settings = values["rows"], values["settings"]
    panels = ["clips_per_second", *["utilisation"] * bool(values["peaks"])]
    precision = "; ".join(
        f"Peak in {peak['precision']}: {peak['multiply_adds_per_second'] / 1e9:,.1f} G multiply-adds/s, "
        + ("given" if peak["shape"] is None else "the best matrix product measured in the same run")
        for peak in values["peaks"]
    )
    caption = (
        f"Forward pass of {settings['batch']} random clips on {machine_text(values['environment'])}. {precision}.\n"
        f"Bars: median of {settings['repeats']} turns, least and most. x: in multiples of {rows[0]['relative_to']}"
        "; paper: Table 1 and section 3 a, one Tesla P100, 16 clips."
    )
    with drawn(path, wrapped(caption)) as figure:
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            if name == "utilisation":
                _bars(axes, rows, name, "% of peak multiply-adds/s", 100, _use_note)
                axes.set_title("Hardware utilisation")
            else:
                _bars(axes, rows, name, "clips/s, forward", 1, _throughput_note)
                axes.set_title("Throughput")


def draw_waits(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3b: each network's training step, and the part of it that waits for data."""
    rows, settings = values["rows"], values["settings"]
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
            _above(axes, i, busy[i] + waits[i], note)
        _name_bars(axes, rows, "seconds of a training step")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_scalability(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3c: speed over ideal speed against ranks."""
    networks, settings = values["networks"], values["settings"]
    ranks = sorted({row["ranks"] for network in networks for row in network["rows"]})
    caption = (
        f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}, up to {ranks[-1]} ranks on "
        f"{machine_text(values['environment'])}. Speed over the first point's speed times the ranks: median of "
        f"{settings['repeats']} rounds, least and most. Paper, Figure 3c, 8 nodes of 4 Tesla P100s: {BOUNDS}."
    )
    with drawn(path, wrapped(caption)) as figure:
        axes = figure.subplots()
        highest = 100.0
        for i, network in enumerate(networks):
            percent = [{part: 100 * value for part, value in row["efficiency"].items()} for row in network["rows"]]
            points = ([row["ranks"] for row in network["rows"]], [value["median"] for value in percent])
            axes.errorbar(*points, yerr=_errors(percent), label=drawable(network["label"]), capsize=4, **series(i))
            highest = max(highest, *(value["max"] for value in percent))
        axes.axhline(100, linestyle="--", color=GREY, label="ideal")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("scalability (% of ideal speed)")
        axes.set_ylim(0, max(110.0, 1.05 * highest))
        axes.legend(loc="lower left")


def draw_messages(path: Path, values: Mapping[str, Any], caption: str) -> None:
    """Draw time and bus bandwidth of an allreduce against its bytes, with the fitted lines of `bench allreduce`."""
    rows, marked = values["rows"], f"gradients of {values['spec']}"
    with drawn(path, caption, (12.0, 5.0)) as figure:
        left, right = figure.subplots(1, 2)
        for i, (library, fit) in enumerate(values["fits"].items()):
            mine = [row for row in rows if row["library"] == library]
            _message_curves(left, right, mine, fit, i)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            ticks = [4 * 16**i for i in range(8)]
            axes.set_xticks(ticks, [size_text(size) for size in ticks])
            axes.set_xlabel("message size")
            axes.axvline(values["gradient_bytes"], color=GREY, linestyle=":", label=drawable(marked))
            axes.set_xlim(2, 2 * max(row["num_bytes"] for row in rows))
        left.set_yscale("log")
        left.set_ylabel("seconds of one allreduce")
        right.set_ylim(bottom=0)
        right.set_ylabel("bus bandwidth (GB/s)")
        # Above both: among the points there is no place that is always free.
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5)


def _message_curves(left: Axes, right: Axes, rows: Rows, fit: Mapping[str, float] | None, i: int) -> None:
    style, label = series(i), drawable(rows[0]["library"])
    sizes = [row["num_bytes"] for row in rows]
    medians = [row["median_s"] for row in rows]
    spreads = [{"min": row["low_s"], "median": row["median_s"], "max": row["high_s"]} for row in rows]
    left.errorbar(sizes, medians, yerr=_errors(spreads), linestyle="", capsize=3, label=label, **style)
    if fit is not None:
        line = [fit["latency_s"] + size / fit["bytes_per_second"] for size in sizes]
        left.plot(sizes, line, "-", color=style["color"], linewidth=1.0, label=f"{label}: fitted")
    right.plot(sizes, [row["bus_bandwidth"] / 1e9 for row in rows], "-", label=label, **style)


def _bars(axes: Axes, rows: Rows, name: str, y_label: str, unit: float, note: Callable[..., str]) -> None:
    """Draw each row's spread `name`, in `unit`s, with the row's note above it."""
    for i, row in enumerate(rows):
        bar = {part: unit * value for part, value in row[name].items()}
        axes.bar(i, bar["median"], 0.6, color=PALETTE[i % len(PALETTE)], yerr=_errors([bar]), capsize=4, ecolor=GREY)
        _above(axes, i, bar["max"], note(row))
    _name_bars(axes, rows, y_label)


def _errors(spreads: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return how far the least and the most lie from the medians, as matplotlib takes it."""
    below = [spread["median"] - spread["min"] for spread in spreads]
    return [below, [spread["max"] - spread["median"] for spread in spreads]]


def _throughput_note(row: Mapping[str, Any]) -> str:
    paper = row["published"]
    beside = "" if paper is None else f"\npaper {paper['clips_per_second']:g}, {paper['relative_throughput']:.1f} x"
    return f"{row['clips_per_second']['median']:.3g}, {row['relative_throughput']['median']:.2f} x{beside}"


def _use_note(row: Mapping[str, Any]) -> str:
    beside = "" if row["published"] is None else f"\npaper {row['published']['utilisation']:.1f} x"
    return f"{100 * row['utilisation']['median']:.1f} %, {row['relative_utilisation']['median']:.2f} x{beside}"


def _above(axes: Axes, x: float, y: float, note: str) -> None:
    axes.annotate(note, (x, y), xytext=(0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=9)


def _name_bars(axes: Axes, rows: Rows, y_label: str) -> None:
    axes.set_xticks(range(len(rows)), [drawable(row["label"]).replace(", ", "\n") for row in rows])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for two lines of notes


def draw_scaling(path: Path, curves: Mapping[str, Rows], rows: Rows, name: str, caption: str) -> None:
    """Draw the paper's Figure 6 for networks beside the training times of `rows` and of Table 3, into one file.

    curves: the rows of each network by its label. Points beyond the largest published row are hollow.
    """
    published = [row for row in rows if row["published_run_s"] is not None]
    measured_nodes = max((row["nodes"] for row in published), default=0)
    nodes = [row["nodes"] for row in rows]
    with drawn(path, caption, (12.0, 5.4)) as figure:
        left, right = figure.subplots(1, 2)
        for i, (label, curve) in enumerate(curves.items()):
            speeds = [row["clips_per_second"] for row in curve]
            ideal = [row["clips_per_second"] / row["efficiency"] for row in curve]
            left.plot(nodes, ideal, "--", color=series(i)["color"], linewidth=1.0, alpha=0.7)
            _hollow_beyond(measured_nodes, left, nodes, speeds, label, series(i))
            left.set_yscale("log")
            if i == 0:
                left.plot([], [], "--", color=GREY, linewidth=1.0, label="ideal: one node's speed times the nodes")
        left.set_ylabel("training speed (clips/s)")
        seconds = [row["run_s"] for row in rows]
        _hollow_beyond(measured_nodes, right, nodes, seconds, f"predicted: {name}", series(0))
        if published:
            style = {"markersize": 10, "markeredgewidth": 1.8, "color": PALETTE[1], "zorder": 3}
            points = ([row["nodes"] for row in published], [row["published_run_s"] for row in published])
            right.plot(*points, "+", label="published: Table 3", **style)
        right.set_yscale("log")
        right.yaxis.set_major_locator(FixedLocator(ROUND_TIMES))
        right.yaxis.set_minor_locator(NullLocator())
        right.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
        right.set_ylabel("training time")
        for axes in (left, right):
            _node_axis(axes, nodes, rows[0]["gpus"] // rows[0]["nodes"])
            axes.legend()


def size_text(num_bytes: float) -> str:
    """Write 4 B, 16 KB, 64 MB: powers of 1024, as messages are sized."""
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.4g} B"


def _hollow_beyond(
    limit: int, axes: Axes, x: Sequence[int], y: Sequence[float], label: str, style: Mapping[str, Any]
) -> None:
    axes.plot(x, y, "-", markersize=5, label=drawable(label), **style)
    beyond = [(nodes, value) for nodes, value in zip(x, y, strict=True) if nodes > limit]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), linestyle="", markersize=5, markerfacecolor="white", **style)


def _node_axis(axes: Axes, nodes: Sequence[int], gpus_per_node: int) -> None:
    axes.set_xscale("log", base=2)
    shown = [count for count in nodes if count & (count - 1) == 0] or list(nodes)
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"nodes ({gpus_per_node} GPUs each)" if gpus_per_node > 1 else "nodes")
