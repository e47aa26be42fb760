"""Figures of the scaling study: training speed and time against nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from summit_train.files import replacing
from summit_train.report.figures import GREY, PALETTE, drawable, house_style
from summit_train.text import duration

ROUND_TIMES = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 108000, 360000, 1080000)  # seconds
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


Rows = Sequence[Mapping[str, Any]]  # as `simulate` prints them in JSON


def draw_scaling(path: Path, curves: Mapping[str, Rows], rows: Rows, name: str, caption: str) -> None:
    """Draw the paper's Figure 6 for networks beside the training times of `rows` and of Table 3, into one file.

    curves: the rows of each network by its label. Points beyond the largest published row are hollow.
    """
    published = [row for row in rows if row["published_run_s"] is not None]
    measured_nodes = max((row["nodes"] for row in published), default=0)
    nodes = [row["nodes"] for row in rows]
    with house_style():
        figure = Figure(figsize=(12.0, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, (label, curve) in enumerate(curves.items()):
            colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
            speeds = [row["clips_per_second"] for row in curve]
            ideal = [row["clips_per_second"] / row["efficiency"] for row in curve]
            left.plot(nodes, ideal, "--", color=colour, linewidth=1.0, alpha=0.7)
            _hollow_beyond(measured_nodes, left, nodes, speeds, color=colour, marker=marker, label=label)
            left.set_yscale("log")
            if i == 0:
                left.plot([], [], "--", color=GREY, linewidth=1.0, label="ideal: one node's speed times the nodes")
        left.set_ylabel("training speed (clips/s)")
        seconds = [row["run_s"] for row in rows]
        _hollow_beyond(measured_nodes, right, nodes, seconds, color=PALETTE[0], marker="o", label=f"predicted: {name}")
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
        finish(figure, caption, path)


def size_text(num_bytes: float) -> str:
    """Write 4 B, 16 KB, 64 MB: powers of 1024, as messages are sized."""
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.4g} B"


def _hollow_beyond(
    limit: int, axes: Axes, x: Sequence[int], y: Sequence[float], *, color: str, marker: str, label: str
) -> None:
    axes.plot(x, y, "-", color=color, marker=marker, markersize=5, label=drawable(label))
    beyond = [(nodes, value) for nodes, value in zip(x, y, strict=True) if nodes > limit]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), marker, color=color, markersize=5, markerfacecolor="white")


def _node_axis(axes: Axes, nodes: Sequence[int], gpus_per_node: int) -> None:
    axes.set_xscale("log", base=2)
    shown = [count for count in nodes if count & (count - 1) == 0] or list(nodes)
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"nodes ({gpus_per_node} GPUs each)" if gpus_per_node > 1 else "nodes")


def finish(figure: Figure, caption: str, path: Path) -> None:
    """Add the caption below the axes and write the file at once, without a date: equal figures have equal bytes."""
    figure.supxlabel(caption.replace("$", r"\$"), fontsize=9, color=GREY)
    kind = path.suffix[1:]
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=150, metadata=date)
