"""Draw what the GPU bench measured: speeds by network, precision and execution, and the shares of the kernels.

    python bench/gpu/figures.py --speed speed.json --kernels kernels.json --out FOLDER

Writes FOLDER/speed.png and FOLDER/kernels.png, from each file that is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from summit_train.report.caption import drawn, wrapped
from summit_train.report.figures import GREY, PALETTE, drawable
from summit_train.report.tables import machine_text

NAMES = {
    "tsm": "TSM",
    "tsn": "2D (TSN)",
    "i3d_3x3x3": "I3D 3x3x3",
    "i3d_3x1x1": "I3D 3x1x1",
    "images": "ResNet-50, images",
}
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
EXECUTIONS = ("accelerated", "plain", "official", "weights_last", "compiled", "graph")  # the first is the default
SHOWN = {"train": 16, "inference": 8}  # clips of a panel
MOST_RATIOS = 16
_ABOUT: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
Row = Mapping[str, Any]


def draw_speed(path: Path, speed: Mapping[str, Any]) -> None:
    """Draw clips/s of each network and precision, a colour an execution, one panel a mode; the ratios as text."""
    panels = {mode: rows for mode in SHOWN if (rows := rows_of(speed, mode))}
    lines = ratio_lines(speed["ratios"])
    inches = [*[3.4] * len(panels), 0.4 + 0.19 * len(lines)]  # of each panel and of the text
    with drawn(path, _caption(speed), (13.0, sum(inches) + 1.0)) as figure:
        *axes, text = figure.subplots(len(inches), squeeze=False, height_ratios=inches)[:, 0]
        for panel, (mode, rows) in zip(axes, panels.items(), strict=True):
            _bars(panel, rows)
            panel.set_title(f"{mode}, {rows[0]['batch']} clips", loc="left")
        handles = {label: bar for panel in axes for bar, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        text.set_axis_off()
        text.text(0, 1, "\n".join(lines), fontsize=9, va="top", family="DejaVu Sans Mono", linespacing=1.4)
        if handles:
            text.legend(list(handles.values()), list(handles), loc="upper right", title="execution")


def rows_of(speed: Mapping[str, Any], mode: str) -> list[Row]:
    """Return the rows of a panel: those of a mode with SHOWN's batch; in a rehearsal, with the largest. Each once."""
    rows = [row for row in speed["rows"] if row["mode"] == mode]
    batch = SHOWN[mode] if not speed.get("small") else max((row["batch"] for row in rows), default=0)
    once: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["batch"] == batch:
            once.setdefault((row["network"], row["precision"], row["execution"]), row)
    return list(once.values())


def ratio_lines(ratios: Sequence[Row]) -> list[str]:
    """Return the ratios as text, those of other executions and of images first."""
    first = [r for r in ratios if "i3d" not in r["of"]["network"]]
    lines = []
    for ratio in first[:MOST_RATIOS]:
        spread = ratio["ratio"]
        lines.append(
            f"{spread['median']:.3f} ({spread['min']:.3f} .. {spread['max']:.3f})  {drawable(ratio['name'], 90)}"
        )
    left = len(ratios) - len(lines)
    return [*lines, *([f"and {left} more in the JSON file"] if left else [])]


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar for each row, those of a precision side by side, those of a network under its name."""
    x, highest, ticks = 0.0, 0.0, []
    for network in dict.fromkeys(name for name in NAMES if any(row["network"] == name for row in rows)):
        begin = x
        for precision in PRECISIONS:
            mine = [row for row in rows if (row["network"], row["precision"]) == (network, precision)]
            for number, row in enumerate(sorted(mine, key=lambda row: EXECUTIONS.index(row["execution"]))):
                _bar(axes, x + number, row)
                highest = max(highest, row["clips_per_second"]["max"])
            if mine:
                ticks.append((x + (len(mine) - 1) / 2, precision))
                x += len(mine) + 0.3
        middle = (begin + x - 1.3) / 2
        axes.annotate(NAMES[network], (middle, 0), (0, -28), **_ABOUT, xycoords=("data", "axes fraction"), fontsize=9)
        x += 0.7
    axes.set_xticks([place for place, _ in ticks], [precision for _, precision in ticks], fontsize=8)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1.2 * highest)
    axes.set_ylabel("clips/s")


def _bar(axes: Axes, x: float, row: Row) -> None:
    """Draw a row's clips/s with its spread and its utilisation."""
    rate, colour = row["clips_per_second"], PALETTE[EXECUTIONS.index(row["execution"])]
    errors = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
    axes.bar(x, rate["median"], 0.9, color=colour, label=row["execution"], yerr=errors, ecolor=GREY)
    note = f"{rate['median']:.3g}\n{100 * row['utilisation']['median']:.0f} %"
    axes.annotate(note, (x, rate["max"]), (0, 3), **_ABOUT, fontsize=7)


def _caption(speed: Mapping[str, Any]) -> str:
    peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in speed["peaks"].items())
    rehearsed = "A REHEARSAL WITH TINY NETWORKS. " if speed.get("small") else ""
    return wrapped(
        f"{rehearsed}{machine_text(speed['environment'])}. Bars: median, least and most; below the clips/s the share of"
        f" "
        f"the best matrix product of that precision (T multiply-adds/s: {peaks}). Images: a plain ResNet-50 "
        f"({speed['images']}), 8 pictures counted as a clip. Text: ratios of seconds, side by side."
    )


def draw_kernels(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the shares of the groups of kernels, and the kernels that take longest."""
    groups, top = values["groups"], values["top"]
    colours = {group["group"]: (*PALETTE, GREY, "#999999", "#CCCCCC")[i % 10] for i, group in enumerate(groups)}
    with drawn(path, _kernel_caption(values), (13.0, 5.6)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        for axes, rows, key in ((left, groups, "group"), (right, top, "name")):
            places = range(len(rows))
            shares = [100 * row["share"] for row in rows]
            axes.barh(places, shares, color=[colours[row["group"]] for row in rows])
            axes.set_yticks(places, [short(row[key]) for row in rows], fontsize=8, parse_math=False)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_xlabel("% of the time of all kernels")
            axes.set_xlim(0, 1.25 * max(shares))
            for place, row in zip(places, rows, strict=True):
                note = f" {100 * row['share']:.1f} %, {1e3 * row['seconds']:.3g} ms"
                axes.annotate(note, (100 * row["share"], place), va="center", fontsize=8)
        left.set_title("groups", loc="left")
        right.set_title(f"the {len(top)} longest", loc="left")


def short(name: str, most: int = 56) -> str:
    """Return a kernel's name without its namespace, cut in the middle: both ends of a template tell it from others."""
    bare = name.removeprefix("void ").replace("at::native::", "")
    half = most // 2
    return drawable(bare if len(bare) <= most else f"{bare[:half]} \N{HORIZONTAL ELLIPSIS} {bare[-half:]}", most + 3)


def _kernel_caption(values: Mapping[str, Any]) -> str:
    copies, operators = values["copies"], " CPU OPERATORS STAND IN FOR KERNELS." if values["skipped"] else ""
    return wrapped(
        f"{values['row']}, {1e3 * values['step_s']:.4g} ms a step on {machine_text(values['environment'])}.{operators} "
        f"Busy {100 * values['busy']:.1f} % of a step; copies from the host {100 * copies['share']:.2g} % of it, "
        f"{100 * copies['exposed_share']:.2g} % under no kernel. ms: of a step."
    )


def main() -> int:
    """Draw the figures of the files that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=Path, help="the JSON file of speed.py")
    parser.add_argument("--kernels", type=Path, help="the JSON file of kernels.py")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for given, draw, name in ((args.speed, draw_speed, "speed"), (args.kernels, draw_kernels, "kernels")):
        if given is not None:
            draw(args.out / f"{name}.png", json.loads(given.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
