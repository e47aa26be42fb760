"""Accuracy against cost, as in Figure 5 of the TSM paper: one bubble for each row of one of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from summit_train.report.caption import drawn, wrapped
from summit_train.report.figures import GREY, PALETTE, drawable

_COLOURS = dict(zip(("TSM", "ECO", "I3D", "TRN", "TSN", "other 3D"), PALETTE, strict=False))
_AREA = 9e-6  # square points of a bubble for each parameter
_TICKS = [step * 10**power for power in range(-1, 5) for step in (1, 2, 5)]
_SIZES = (25e6, 100e6)  # parameters of the bubbles in the legend
# Where a label may stand, in multiples of its distance, the best first: right, left, above, below, at the corners.
_NEAR = ((1, 0.0), (-1, 0.0), (1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0))
_PLACES = tuple((x, y * far) for far in (1.0, 1.7, 2.5) for x, y in _NEAR)


@dataclass(frozen=True)
class Point:
    """A row on one data set: multiply-adds in G of all clips of a video, top-1 in percent, parameters.

    counted: the multiply-adds are counted here, as the paper prints none. parameters None: neither printed nor counted.
    """

    label: str
    family: str
    cost: float
    top1: float
    parameters: float | None
    counted: bool

    @property
    def area(self) -> float:
        """Return the bubble's area in square points."""
        return 30.0 if self.parameters is None else _AREA * self.parameters


def points_of(rows: Iterable[Mapping[str, Any]], data_set: str) -> list[Point]:
    """Return the rows of a table with an accuracy on `data_set` and a cost: the published one, else the counted."""
    points = []
    for row in rows:
        paper = row["published"]
        cost = paper["multiply_adds"] or row["multiply_adds"]
        if data_set not in paper["top1"] or cost is None:
            continue
        parameters = paper["parameters"] or row["parameters"]
        cost, counted = cost * paper["clips"] / 1e9, paper["multiply_adds"] is None
        points.append(Point(row["label"], paper["family"], cost, paper["top1"][data_set], parameters, counted))
    return points


def draw_tradeoff(path: Path, values: Mapping[str, Any]) -> None:
    """Draw top-1 (published) against multiply-adds (published, or counted) of a table, a panel for each data set.

    `values` are those of `bench latency --table`.
    """
    panels = {name: points for name in values["data_sets"] if (points := points_of(values["rows"], name))}
    table, every = values["table"], [point for points in panels.values() for point in points]
    with drawn(path, wrapped(_caption(values, every)), (10.0, 5.8) if len(panels) < 2 else (12.0, 5.8)) as figure:
        axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
        figure.suptitle(drawable(f"TSM paper, Table {table['number']}: accuracy against cost"), fontsize=12)
        for panel, (name, points) in zip(axes, panels.items(), strict=False):
            _draw_bubbles(panel, points)
            panel.set_ylabel(f"top-1 on {name} (%), published")
        figure.legend(handles=_handles(every), loc="outside right upper", labelspacing=1.5, handletextpad=1.3)
        figure.draw_without_rendering()  # fixes the panels' sizes, which the labels' places need
        for panel, points in zip(axes, panels.values(), strict=False):
            _label(figure, panel, points)


def _caption(values: Mapping[str, Any], points: Sequence[Point]) -> str:
    shown = {point.label for point in points}
    left_out = [row["label"] for row in values["rows"] if row["label"] not in shown]
    notes = {
        "Lin, Gan, Wang and Han, TSM (journal version): accuracies and, where printed, multiply-adds and parameters as "
        f"published ({values['table']['setting']}); nothing was trained here.": True,
        "Hollow: multiply-adds of one clip counted here, as the table prints none.": any(p.counted for p in points),
        "Small dot: parameters not printed.": any(point.parameters is None for point in points),
        f"With {' '.join(values['overrides'])}.": values["overrides"],
        f"Left out, without a cost: {'; '.join(left_out)}.": left_out,
    }
    return " ".join(note for note, holds in notes.items() if holds)


def _draw_bubbles(axes: Axes, points: Sequence[Point]) -> None:
    for point in sorted(points, key=lambda point: -point.area):
        colour = _COLOURS[point.family]
        face = "white" if point.counted else colour
        axes.scatter(point.cost, point.top1, s=point.area, facecolor=face, edgecolor=colour, linewidth=1.5, alpha=0.75)
    costs, accuracies = [point.cost for point in points], [point.top1 for point in points]
    axes.set_xscale("log")
    axes.set_xlim(min(costs) / 1.8, max(costs) * 1.8)
    margin = max(1.0, 0.12 * (max(accuracies) - min(accuracies)))
    axes.set_ylim(min(accuracies) - margin, max(accuracies) + margin)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}"))
    axes.set_xlabel("multiply-adds of a video (G)")


def _handles(points: Sequence[Point]) -> list[Line2D]:
    """Return the legend: a colour a family, a circle a size."""
    families = [family for family in _COLOURS if any(point.family == family for point in points)]

    def circle(label: str, area: float, **style: Any) -> Line2D:
        return Line2D([], [], linestyle="", marker="o", markersize=area**0.5, label=label, **style)

    colours = [circle(family, 81.0, color=_COLOURS[family], alpha=0.75) for family in families]
    sizes = [circle(f"{size / 1e6:.0f} M parameters", _AREA * size, color=GREY, fillstyle="none") for size in _SIZES]
    return colours + sizes


def _label(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    """Write each label beside its bubble, at the first place where it covers no bubble and no other label."""
    bubbles = [_bubble_box(figure, axes, point) for point in points]
    taken, frame = list(bubbles), axes.get_window_extent()
    for point in sorted(points, key=lambda point: (point.cost, point.top1)):
        radius = point.area**0.5 / 2
        tries: list[tuple[float, int, Annotation, Bbox]] = []
        for x, y in _PLACES:
            text = axes.annotate(
                drawable(point.label), (point.cost, point.top1), (x * (radius + 3), y * (radius + 7)),
                textcoords="offset points", fontsize=9, va="center", ha=("right", "center", "left")[x + 1],
            )  # fmt: skip
            box = text.get_window_extent()
            text.remove()
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 + 4
            tries.append((sum(_overlap(box, other) for other in taken) + 1e6 * (not inside), len(tries), text, box))
        _, _, text, box = min(tries, key=lambda found: found[:2])
        axes.add_artist(text)
        taken.append(box)


def _bubble_box(figure: Figure, axes: Axes, point: Point) -> Bbox:
    x, y = axes.transData.transform((point.cost, point.top1))
    side = point.area**0.5 * figure.dpi / 72
    return Bbox.from_bounds(x - side / 2, y - side / 2, side, side)


def _overlap(one: Bbox, other: Bbox) -> float:
    """Return the area in which two boxes overlap, in square pixels."""
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else common.width * common.height
