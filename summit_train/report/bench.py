"""Figures of the benches, drawn from the values that they print as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.report.figures import GREY, PALETTE, drawable, house_style
from summit_train.report.scaling import MARKERS, finish, size_text
from summit_train.report.tables import machine_text
from summit_train.scaling.published import SCALABILITY
from summit_train.text import counted, share

_CAPTION_LETTERS = 140  # of a line below a figure of 10 inches
BOUNDS = " and ".join(
    f"I3D 3x3x3 {bound}" if arch == "i3d_3x3x3" else f"TSM {bound}" for arch, bound in SCALABILITY.items()
)


def draw_compute(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3a: throughput and utilisation of each network's forward pass."""
    rows, settings = values["rows"], values["settings"]
    panels = ["clips_per_second", *["utilisation"] * bool(values["peaks"])]
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            if name == "utilisation":
                _bars(axes, rows, name, "% of peak multiply-adds/s", 100, _use_note)
                axes.set_title("Hardware utilisation")
            else:
                _bars(axes, rows, name, "clips/s, forward", 1, _throughput_note)
                axes.set_title("Throughput")
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
        finish(figure, _wrapped(caption), path)


def draw_waits(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3b: each network's training step, and the part of it that waits for data."""
    rows, settings = values["rows"], values["settings"]
    busy, waits = ([row[name] for row in rows] for name in ("busy_s", "data_wait_s"))
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(rows)), busy, 0.6, color=PALETTE[0], label="computation and update")
        axes.bar(range(len(rows)), waits, 0.6, bottom=busy, color=PALETTE[1], label="wait for data")
        for i, row in enumerate(rows):
            note = f"{row['step_s']:.3g} s\nwait {share(row['data_wait_s'] / row['step_s'])}"
            _above(axes, i, busy[i] + waits[i], note)
        _name_bars(axes, rows, "seconds of a training step")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        caption = (
            f"{counted(rows[0]['clips_per_step'], 'clip')} a step on {machine_text(values['environment'])}. "
            f"{values['source']}. "
            f"Median of {settings['repeats']} turns. The paper's Figure 3b has no numbers in its text: on a Summit "
            "node loading is the bottleneck of I3D 3x1x1, less of I3D 3x3x3, and hidden under TSM's computation."
        )
        finish(figure, _wrapped(caption), path)


def draw_scalability(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the paper's Figure 3c: speed over ideal speed against ranks."""
    networks, settings = values["networks"], values["settings"]
    with house_style():
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        axes = figure.subplots()
        highest = 100.0
        for i, network in enumerate(networks):
            ranks = [row["ranks"] for row in network["rows"]]
            percent = [{part: 100 * value for part, value in row["efficiency"].items()} for row in network["rows"]]
            style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "capsize": 4}
            medians = [value["median"] for value in percent]
            axes.errorbar(ranks, medians, yerr=_errors(percent), label=drawable(network["label"]), **style)  # type: ignore[arg-type]
            highest = max(highest, *(value["max"] for value in percent))
        axes.axhline(100, linestyle="--", color=GREY, label="ideal")
        ranks = sorted({row["ranks"] for network in networks for row in network["rows"]})
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("scalability (% of ideal speed)")
        axes.set_ylim(0, max(110.0, 1.05 * highest))
        axes.legend(loc="lower left")
        caption = (
            f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}, up to {ranks[-1]} ranks on "
            f"{machine_text(values['environment'])}. Speed over the first point's speed times the ranks: median of "
            f"{settings['repeats']} rounds, least and most. Paper, Figure 3c, 8 nodes of 4 Tesla P100s: {BOUNDS}."
        )
        finish(figure, _wrapped(caption), path)


def draw_messages(path: Path, values: Mapping[str, Any], caption: str) -> None:
    """Draw time and bus bandwidth of an allreduce against its bytes, with the fitted lines of `bench allreduce`."""
    rows, marked = values["rows"], f"gradients of {values['spec']}"
    with house_style():
        figure = Figure(figsize=(12.0, 5.0), layout="constrained")
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
        finish(figure, caption, path)


def _message_curves(
    left: Axes, right: Axes, rows: Sequence[Mapping[str, Any]], fit: Mapping[str, float] | None, i: int
) -> None:
    colour, marker, label = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], drawable(rows[0]["library"])
    sizes = [row["num_bytes"] for row in rows]
    medians = [row["median_s"] for row in rows]
    spreads = [{"min": row["low_s"], "median": row["median_s"], "max": row["high_s"]} for row in rows]
    left.errorbar(sizes, medians, yerr=_errors(spreads), fmt=marker, color=colour, capsize=3, label=label)
    if fit is not None:
        line = [fit["latency_s"] + size / fit["bytes_per_second"] for size in sizes]
        left.plot(sizes, line, "-", color=colour, linewidth=1.0, label=f"{label}: fitted")
    right.plot(sizes, [row["bus_bandwidth"] / 1e9 for row in rows], "-", marker=marker, color=colour, label=label)


def _bars(
    axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, y_label: str, unit: float, note: Callable[..., str]
) -> None:
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


def _name_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], y_label: str) -> None:
    axes.set_xticks(range(len(rows)), [drawable(row["label"]).replace(", ", "\n") for row in rows])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for two lines of notes


def _wrapped(caption: str) -> str:
    return "\n".join(textwrap.fill(line, _CAPTION_LETTERS, break_on_hyphens=False) for line in caption.splitlines())
