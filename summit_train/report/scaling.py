"""Figures of the scaling study: training speed and time against nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from summit_train.files import replacing
from summit_train.report.figures import GREY, PALETTE, drawable, house_style
from summit_train.report.tables import duration

ROUND_TIMES = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 108000, 360000, 1080000)  # seconds
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Speed:
    """One network's curve: clips a second at each number of nodes; `ideal`: one node's, times the nodes.

    The points beyond `measured_nodes` are drawn hollow: nobody has measured there.
    """

    label: str
    nodes: Sequence[int]
    clips_per_second: Sequence[float]
    ideal: Sequence[float]


@dataclass(frozen=True)
class Times:
    """Seconds of a run at each number of nodes, predicted; and what was published, where it was."""

    label: str
    nodes: Sequence[int]
    seconds: Sequence[float]
    published: Sequence[tuple[int, float]] = ()


def draw_scaling(
    path: Path, speeds: Sequence[Speed], times: Times, caption: str, *, gpus_per_node: int, measured_nodes: int
) -> None:
    """Draw the paper's Figure 6 beside the training times of its Table 3, into one file."""
    with house_style():
        figure = Figure(figsize=(12.0, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, speed in enumerate(speeds):
            _speed_curve(left, speed, i, measured_nodes)
        left.set_ylabel("training speed (clips/s)")
        _time_curve(right, times, measured_nodes)
        right.set_ylabel("training time")
        right.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
        for axes in (left, right):
            _node_axis(axes, times.nodes, gpus_per_node)
            axes.legend()
        finish(figure, caption, path)


def size_text(num_bytes: float) -> str:
    """Write 4 B, 16 KB, 64 MB: powers of 1024, as messages are sized."""
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.4g} B"


def _speed_curve(axes: Axes, speed: Speed, i: int, measured_nodes: int) -> None:
    colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
    axes.plot(speed.nodes, speed.ideal, "--", color=colour, linewidth=1.0, alpha=0.7)
    _hollow_beyond(axes, speed.nodes, speed.clips_per_second, measured_nodes, colour, marker, speed.label)
    axes.set_yscale("log")
    if i == 0:
        axes.plot([], [], "--", color=GREY, linewidth=1.0, label="ideal: one node's speed times the nodes")


def _time_curve(axes: Axes, times: Times, measured_nodes: int) -> None:
    label = f"predicted: {times.label}"
    _hollow_beyond(axes, times.nodes, times.seconds, measured_nodes, PALETTE[0], "o", label)
    if times.published:
        nodes, seconds = zip(*times.published, strict=True)
        style = {"markersize": 10, "markeredgewidth": 1.8, "color": PALETTE[1]}
        axes.plot(nodes, seconds, "+", label="published: Table 3", zorder=3, **style)  # type: ignore[arg-type]
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ROUND_TIMES))
    axes.yaxis.set_minor_locator(NullLocator())


def _hollow_beyond(
    axes: Axes, x: Sequence[int], y: Sequence[float], limit: int, colour: str, marker: str, label: str
) -> None:
    axes.plot(x, y, "-", color=colour, marker=marker, markersize=5, label=drawable(label))
    beyond = [(nodes, value) for nodes, value in zip(x, y, strict=True) if nodes > limit]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), marker, color=colour, markersize=5, markerfacecolor="white")


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
