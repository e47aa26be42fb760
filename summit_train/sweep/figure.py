"""Write a sweep's table and its figure over batch sizes, as the paper's Figure 4, into its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.core.files import locked, replacing, write_json, write_text
from summit_train.core.text import counted, csv_text, listed
from summit_train.report.figures import GREY, PALETTE, drawable, finite, house_style, image, log_ticks, series
from summit_train.report.noise import Measured
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import Row, as_values, has_seeds, read_rows, sweep_points, tables


def write_sweep(sweep: Sweep, jobs: Mapping[str, tuple[str, str]]) -> list[Row]:
    """Write table.txt, table.csv, table.json, accuracy.png and .svg into the sweep's folder; return the rows."""
    # Several runs that end together all do this. One lock covers reading and writing, so that no run overwrites newer
    # results by older ones.
    with locked(sweep.folder / "lock"):
        rows = read_rows(sweep, jobs)
        write_text(sweep.folder / "table.txt", tables(sweep, rows) + "\n")
        columns = dict.fromkeys(key for row in rows for key in row)  # a run of another task has measures of its own
        write_text(sweep.folder / "table.csv", csv_text([columns, *(map(row.get, columns) for row in rows)]))
        write_json(sweep.folder / "table.json", as_values(sweep, rows))
        for name, content in draw_accuracy(sweep, rows).items():
            with replacing(sweep.folder / name) as file:
                file.write(content)
    return rows


def written(sweep: Sweep) -> str:
    """Return the names of the files that `write_sweep` wrote."""
    return ", ".join(sorted(path.name for kind in ("table", "accuracy") for path in sweep.folder.glob(f"{kind}.*")))


def draw_accuracy(sweep: Sweep, rows: Sequence[Row]) -> dict[str, bytes]:
    """Draw the main measure of the finished runs against the global batch; return file name -> content, PNG and SVG.

    Validation: the final evaluation, mean and standard deviation over the seeds; where no runs differ in their seed
    alone, over the last checkpoints. Training: the batches of the last epoch, of a single curve. Each curve has its
    noise scale at the smallest batch at which it is clear. Without two batch sizes nothing is drawn.
    """
    done = [row for row in rows if row["state"] == "done" and row["global_batch"]]
    if not done or len({row["global_batch"] for row in rows}) < 2:
        return {}
    points = [point for point in sweep_points(sweep, rows) if point["done"] and point["global_batch"]]
    names = list(dict.fromkeys(point["curve"] for point in points))
    with house_style():
        figure = Figure(figsize=(6.4, 4.2 + 0.2 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(f"{sweep.name}: accuracy against batch size", loc="left", fontsize=12)
        main = sweep.measures.main
        noise_at = {_draw_curve(axes, i, name, points, main.key) for i, name in enumerate(names)}
        batches = {row["global_batch"] for row in done}
        if sweep.reference is not None:
            published = sorted(sweep.reference.points, key=lambda point: point.global_batch)
            batches |= {point.global_batch for point in published}
            axes.errorbar(
                [point.global_batch for point in published],
                [point.top1 for point in published],
                [point.top1_std or 0.0 for point in published],
                label=drawable(f"published: {sweep.reference.label}"),
                marker="s", markerfacecolor="white", linestyle=":", color=GREY, capsize=3,
            )  # fmt: skip
        log_ticks(axes, sorted(batches), base=2)
        axes.tick_params(axis="x", labelsize=9 if len(batches) > 8 else 10)
        axes.set(xlabel="global batch (clips)", ylabel=f"{main.name} (%)")
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), min(high, 102.0))
        for text in figure.legend(loc="outside lower left", ncols=2).get_texts():
            text.set_parse_math(False)
        caption = _caption(rows, done, points, sorted(filter(None, noise_at)))
        below = axes.annotate(
            caption, (0, 0), (0, -44), "axes fraction", "offset points", fontsize=8, color=GREY, va="top"
        )
        below.set_parse_math(False)
        return {f"accuracy.{kind}": image(figure, kind) for kind in ("png", "svg")}


def clear_noise(curve: Sequence[Row]) -> tuple[int, Measured] | None:
    """Return the first batch of a curve at which its noise scale exceeds its standard error, and the noise scale.

    None where it does so at none.
    """
    for point in curve:
        noise: Measured | None = point["noise_scale"]
        if noise and noise.value is not None and noise.value > (noise.error or 0.0):
            return point["global_batch"], noise
    return None


def _draw_curve(axes: Axes, i: int, name: str, points: Sequence[Row], key: str) -> int | None:
    """Draw the measure `key` of curve i and its noise scale; return the batch at which this was measured."""
    curve = sorted((point for point in points if point["curve"] == name), key=lambda point: point["global_batch"])
    batches, measured = finite(point["global_batch"] for point in curve), finite(point[key] for point in curve)
    error_of = f"{key}_std" if has_seeds(points) else "checkpoints_std"
    bars = [point[error_of] or 0.0 for point in curve]
    title = f", {drawable(name)}" if name else ""
    style = series(i) | {"capsize": 3}
    axes.errorbar(batches, measured, bars, label=f"validation{title}", zorder=3, **style)
    # As the paper's Figure 4; the training of several curves would hide their validation.
    if len(curve) == len(points) and key == "top1":
        training = finite(point["training_top1"] for point in curve)
        style |= {"markerfacecolor": "white", "linestyle": "--", "color": PALETTE[1]}
        axes.errorbar(batches, training, label="training, last epoch", **style)
    clear = clear_noise(curve)
    if clear is None:
        return None
    batch, noise = clear
    value, error, colour = noise.value or 0.0, noise.error or 0.0, series(i)["color"]
    if error:
        axes.axvspan(value - error, value + error, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(value, color=colour, linestyle=":", linewidth=1.4, label=f"noise scale{title}: {noise.text}")
    return batch


def _caption(rows: Sequence[Row], done: Sequence[Row], points: Sequence[Row], measured_at: Sequence[int]) -> str:
    bars = "Bars: one standard deviation over the last checkpoints."
    if has_seeds(points):
        fewest, most = min(point["done"] for point in points), max(point["done"] for point in points)
        seeds = counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
        bars = f"Mean and standard deviation (n - 1) over {seeds}."
    missing = f" {len(rows) - len(done)} of {len(rows)} runs are not done and not shown." if done != rows else ""
    lines = [bars + missing]
    if measured_at:
        clips = f"Noise scale measured at {listed(measured_at, most=4)} clips"
        lines.append(f"{clips}: below it larger batches save steps, above it they cost clips.")
    machines = "; ".join(dict.fromkeys(row["machine"] for row in done if row["machine"]))
    lines.append(f"Machine: {machines}" if machines else "")
    return "\n".join(line if len(line) < 110 else f"{line[:108]}\N{HORIZONTAL ELLIPSIS}" for line in lines)
