"""The benches' values drawn as the paper's Figure 3, each figure with its values as JSON beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from summit_train.commands.bench.arguments import counted, machine_text, share
from summit_train.commands.simulate import figure_path
from summit_train.files import write_json
from summit_train.report.bench import Bar, Curve, Panel, Step, draw_panels, draw_scalability, draw_steps
from summit_train.scaling.published import SCALABILITY, TABLE_1

BOUNDS = " and ".join(
    f"I3D 3x3x3 {bound}" if arch == "i3d_3x3x3" else f"TSM {bound}" for arch, bound in SCALABILITY.items()
)


def figure_file(path: str | None) -> Path | None:
    """The figure's path. Raises ValueError for a suffix that nothing is drawn for."""
    return None if path is None else figure_path(path)


def save_compute(out: Path, values: dict[str, Any]) -> None:
    """Figure 3a: throughput and utilisation of each network."""
    rows, settings = values["rows"], values["settings"]
    panels = [Panel("Throughput", "clips/s, forward", [_throughput_bar(row) for row in rows])]
    if values["peaks"]:
        panels.append(Panel("Hardware utilisation", "% of peak multiply-adds/s", [_use_bar(row) for row in rows]))
    precision = "; ".join(
        f"Peak in {peak['precision']}: {peak['multiply_adds_per_second'] / 1e9:,.1f} G multiply-adds/s, "
        + ("given" if peak["shape"] is None else "the best matrix product measured in the same run")
        for peak in values["peaks"]
    )
    caption = (
        f"Forward pass of {settings['batch']} random clips on {machine_text(values['environment'])}. {precision}.\n"
        f"Bars: median of {settings['repeats']} turns, least and most. x: in multiples of {rows[0]['relative_to']}; "
        "paper: Table 1 and section 3 a, one Tesla P100, 16 clips."
    )
    draw_panels(out, panels, caption)
    write_json(values_file(out), values)


def save_waits(out: Path, values: dict[str, Any]) -> None:
    """Figure 3b: the step of each network and its wait for data."""
    rows, settings = values["rows"], values["settings"]
    steps = [
        Step(
            row["label"],
            row["busy_s"],
            row["data_wait_s"],
            f"{row['step_s']:.3g} s\nwait {share(row['data_wait_s'] / row['step_s'])}",
        )
        for row in rows
    ]
    caption = (
        f"{counted(rows[0]['clips_per_step'], 'clip')} a step on {machine_text(values['environment'])}. "
        f"{values['source']}. "
        f"Median of {settings['repeats']} turns. The paper's Figure 3b has no numbers in its text: on a Summit node "
        "loading is the bottleneck of I3D 3x1x1, less of I3D 3x3x3, and hidden under TSM's computation."
    )
    draw_steps(out, steps, caption)
    write_json(values_file(out), values)


def save_scalability(out: Path, values: dict[str, Any]) -> None:
    """Figure 3c: scalability of each network."""
    curves = [
        Curve(
            network["label"],
            [row["ranks"] for row in network["rows"]],
            *([100 * row["efficiency"][part] for row in network["rows"]] for part in ("median", "min", "max")),
        )
        for network in values["networks"]
    ]
    settings = values["settings"]
    most = max(row["ranks"] for network in values["networks"] for row in network["rows"])
    caption = (
        f"{settings['clips_per_rank']} clips a rank and step, {settings['clips']}, up to {most} ranks on "
        f"{machine_text(values['environment'])}. Speed over the first point's speed times the ranks: median of "
        f"{settings['repeats']} rounds, least and most. Paper, Figure 3c, 8 nodes of 4 Tesla P100s: {BOUNDS}."
    )
    draw_scalability(out, curves, caption)
    write_json(values_file(out), values)


def values_file(out: Path) -> Path:
    """fig3a.png -> fig3a.json."""
    return out.with_suffix(".json")


def _throughput_bar(row: dict[str, Any]) -> Bar:
    speed, times, paper = row["clips_per_second"], row["relative_throughput"]["median"], row["published"]
    beside = "" if paper is None else f"\npaper {paper['clips_per_second']:g}, {paper['relative_throughput']:.1f} x"
    note = f"{speed['median']:.3g}, {times:.2f} x{beside}"
    return Bar(row["label"], speed["median"], speed["min"], speed["max"], note)


def _use_bar(row: dict[str, Any]) -> Bar:
    median, low, high = (100 * row["utilisation"][part] for part in ("median", "min", "max"))
    paper = TABLE_1.get(row["arch"]) if row["published"] is not None else None
    beside = "" if paper is None else f"\npaper {paper.utilisation:.1f} x"
    note = f"{median:.1f} %, {row['relative_utilisation']['median']:.2f} x{beside}"
    return Bar(row["label"], median, low, high, note)
