"""Write a sweep's table and its figure over batch sizes, as the paper's Figure 4, into its folder."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence, Set
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from summit_train.core.files import locked, replacing, write_json, write_text
from summit_train.core.text import counted, listed
from summit_train.report.figures import GREY, MARKERS, PALETTE, drawable, finite, house_style
from summit_train.report.noise import Measured
from summit_train.sweep.grid import Sweep
from summit_train.sweep.points import Point, as_values, clear_noise, has_seeds, sweep_points, tables
from summit_train.sweep.status import JobState, SweepRow, as_csv, read_rows


def write_sweep(sweep: Sweep, jobs: Mapping[str, JobState]) -> list[SweepRow]:
    """Write table.txt, table.csv, table.json, accuracy.png and .svg into the sweep's folder; return the rows."""
    # Several runs that end together all do this. One lock covers reading and writing, so that no run overwrites newer
    # results by older ones.
    with locked(sweep.folder / "lock"):
        rows = read_rows(sweep, jobs)
        write_text(sweep.folder / "table.txt", tables(sweep, rows) + "\n")
        write_text(sweep.folder / "table.csv", as_csv(rows))
        write_json(sweep.folder / "table.json", as_values(sweep, rows))
        for name, content in draw_accuracy(sweep, rows).items():
            with replacing(sweep.folder / name) as file:
                file.write(content)
    return rows


def written(sweep: Sweep) -> str:
    """Return the names of the files that `write_sweep` wrote, and the reason if there is no figure."""
    figures = sorted(path.name for path in sweep.folder.glob("accuracy.*"))
    names = [*sorted(path.name for path in sweep.folder.glob("table.*")), *figures]
    return ", ".join(names) + ("" if figures else "; no figure, which needs a finished run and batch sizes that differ")


def draw_accuracy(sweep: Sweep, rows: Sequence[SweepRow]) -> dict[str, bytes]:
    """Draw top-1 of the finished runs against the global batch; return file name -> content, PNG and SVG.

    Validation: the final evaluation, mean and standard deviation over the seeds; where no runs differ in their seed
    alone, over the last checkpoints. Training: the batches of the last epoch, of a single curve. Beside them each
    curve's noise scale at its smallest batch at which it is clear. Without two batch sizes nothing is drawn.
    """
    drawn = [row for row in rows if row.state == "done" and row.global_batch is not None]
    if not drawn or len({row.global_batch for row in rows}) < 2:
        return {}
    points = [point for point in sweep_points(sweep, rows) if point.done]
    with house_style():
        lines = len({point.curve for point in points})  # of the legend
        figure = Figure(figsize=(6.4, 4.2 + 0.2 * lines), layout="constrained")
        axes: Axes = figure.subplots()
        axes.set_title(f"{sweep.name}: accuracy against batch size", loc="left", fontsize=12)
        measured_at = _curves(axes, points)
        _published(axes, sweep)
        _scale(axes, sweep, drawn)
        for text in figure.legend(loc="outside lower left", ncols=2).get_texts():
            text.set_parse_math(False)
        words = _caption(rows, drawn, _bars(points), measured_at)
        caption = axes.annotate(
            words, (0, 0), (0, -44), "axes fraction", "offset points", fontsize=8, color=GREY, va="top"
        )
        caption.set_parse_math(False)
        return {f"accuracy.{kind}": _image(figure, kind) for kind in ("png", "svg")}


def _curves(axes: Axes, points: Sequence[Point]) -> set[int]:
    """Draw the curves and their noise scales; return the batches at which these were measured."""
    names, seeds, measured_at = list(dict.fromkeys(point.curve for point in points)), has_seeds(points), set()
    for i, name in enumerate(names):
        curve = sorted((point for point in points if point.curve == name), key=lambda point: point.global_batch or 0)
        batches, top1 = finite(point.global_batch for point in curve), finite(point.top1 for point in curve)
        bars = [(point.top1_std if seeds else point.checkpoints_std) or 0.0 for point in curve]
        title, colour = f", {drawable(name)}" if name else "", PALETTE[i % len(PALETTE)]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "capsize": 3}
        axes.errorbar(batches, top1, bars, color=colour, label=f"validation{title}", zorder=3, **style)
        if len(names) == 1:  # as the paper's Figure 4; the training of several curves would hide their validation
            training = finite(point.training_top1 for point in curve)
            style |= {"markerfacecolor": "white", "linestyle": "--", "color": PALETTE[1]}
            axes.errorbar(batches, training, label="training, last epoch", **style)
        if (clear := clear_noise(curve)) is not None:
            _noise(axes, clear[1], f"noise scale{title}", colour)
            measured_at.add(clear[0])
    return measured_at


def _noise(axes: Axes, noise: Measured, title: str, colour: str) -> None:
    """Draw a noise scale as a line, and its standard error as a band."""
    value, error = noise.value or 0.0, noise.error or 0.0
    if error:
        axes.axvspan(value - error, value + error, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(value, color=colour, linestyle=":", linewidth=1.4, label=f"{title}: {noise.text}")


def _published(axes: Axes, sweep: Sweep) -> None:
    if sweep.reference is None:
        return
    points = sorted(sweep.reference.points, key=lambda point: point.global_batch)
    axes.errorbar(
        [point.global_batch for point in points],
        [point.top1 for point in points],
        [point.top1_std or 0.0 for point in points],
        marker="s",
        markerfacecolor="white",
        linestyle=":",
        color=GREY,
        capsize=3,
        label=drawable(f"published: {sweep.reference.label}"),
    )


def _scale(axes: Axes, sweep: Sweep, drawn: Sequence[SweepRow]) -> None:
    """Scale the horizontal axis by log2, with a tick at every batch size."""
    batches = {row.global_batch for row in drawn if row.global_batch}
    batches |= {point.global_batch for point in sweep.reference.points} if sweep.reference else set()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(batches)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda batch, _: f"{batch:,.0f}"))
    axes.tick_params(axis="x", labelsize=9 if len(batches) > 8 else 10)
    axes.set_xlabel("global batch (clips)")
    axes.set_ylabel("top-1 (%)")
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(high, 102.0))


def _bars(points: Sequence[Point]) -> str:
    if not has_seeds(points):
        return "Bars: one standard deviation over the last checkpoints."
    fewest, most = min(point.done for point in points), max(point.done for point in points)
    seeds = counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
    return f"Mean and standard deviation (n - 1) over {seeds}."


def _caption(rows: Sequence[SweepRow], drawn: Sequence[SweepRow], bars: str, measured_at: Set[int]) -> str:
    machines = "; ".join(dict.fromkeys(row.machine for row in drawn if row.machine))
    missing = f" {len(rows) - len(drawn)} of {len(rows)} runs are not done and not shown." if drawn != rows else ""
    lines = [bars + missing]
    if measured_at:
        batches = listed(sorted(measured_at), most=4)
        lines.append(
            f"Noise scale measured at {batches} clips: below it larger batches save steps, above it they cost clips."
        )
    lines.append(f"Machine: {machines}" if machines else "")
    return "\n".join(line if len(line) < 110 else f"{line[:108]}\N{HORIZONTAL ELLIPSIS}" for line in lines)


def _image(figure: Figure, kind: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return content.getvalue()
