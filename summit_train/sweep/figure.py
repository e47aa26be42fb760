"""Write a sweep's folder: its table, its figure over batch sizes or another key, and the clips of its folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.core.errors import UserError
from summit_train.core.files import locked, replacing, write_json, write_text
from summit_train.core.text import NONE, counted, csv_text, listed
from summit_train.evaluation.fuse import RunScores, check_classes, read_run
from summit_train.evaluation.scores import probabilities
from summit_train.report.confusion import all_names
from summit_train.report.figures import GREY, PALETTE, drawable, finite, house_style, image, log_ticks, series
from summit_train.report.noise import Measured
from summit_train.sweep.grid import Sweep, SweepRun, is_number
from summit_train.sweep.status import Point, SweepRow, as_values, has_repeats, read_rows, sweep_points, tables


def write_sweep(sweep: Sweep, jobs: Mapping[str, tuple[str, str]]) -> list[SweepRow]:
    """Write table.txt, .csv, .json, accuracy.png, .svg and with folds clips.csv into the folder; return the rows."""
    # Runs that end together all do this. One lock covers reading and writing: no run writes older results over newer.
    with locked(sweep.folder / "lock"):
        rows = read_rows(sweep, jobs)
        if any(run.fold for run in sweep.runs):
            write_text(sweep.folder / "clips.csv", csv_text(clip_table(sweep, rows)))
        write_text(sweep.folder / "table.txt", tables(sweep, rows) + "\n")
        columns = dict.fromkeys(key for row in rows for key in row.values())  # another task has measures of its own
        write_text(sweep.folder / "table.csv", csv_text([columns, *(map(row.of, columns) for row in rows)]))
        write_json(sweep.folder / "table.json", as_values(sweep, rows))
        for name, content in draw_accuracy(sweep, rows).items():
            with replacing(sweep.folder / name) as file:
                file.write(content)
    return rows


def clip_table(sweep: Sweep, rows: Sequence[SweepRow]) -> list[list[object]]:
    """Return a heading and a row for each clip of each run that is done, by its last checkpoint.

    A row has the labels and the probability of each class; none where the clip could not be read. The `note` in `rows`
    says why the scores of a run are left out: they cannot be read, or their classes are not those of the other folds.
    """
    scored: list[tuple[SweepRun, RunScores]] = []
    first: RunScores | None = None  # the first run whose classes have names, if any have
    for run, row in zip(sweep.runs, rows, strict=True):
        if row.state == "done":
            try:
                one = read_run(row.run)
                check_classes(first or one, one)
            except UserError as error:
                row.add_note(str(error))
                continue
            scored.append((run, one))
            if first is None or not first.class_names:
                first = one
    size = first.scores.scores.shape[1] if first else 0
    classes = all_names(first.class_names, size) if first else ()
    table: list[list[object]] = [["run", "fold", "seed", "clip", "label", "predicted", *classes]]
    for run, one in scored:
        scores = one.scores
        likely = probabilities(scores.scores, scores.kind)
        for number, clip in enumerate(one.clips):
            labels = ";".join(name for name, is_one in zip(classes, scores.hot[number], strict=True) if is_one)
            prediction: list[object] = [""] * (1 + size)
            if scores.is_read[number]:
                prediction = [classes[likely[number].argmax()], *(f"{share:.6f}" for share in likely[number])]
            table.append([run.name, run.fold, run.spec.seed, str(clip), labels, *prediction])
    return table


def written(sweep: Sweep) -> str:
    return ", ".join(
        sorted(path.name for kind in ("table", "accuracy", "clips") for path in sweep.folder.glob(f"{kind}.*"))
    )


def draw_accuracy(sweep: Sweep, rows: Sequence[SweepRow]) -> dict[str, bytes]:
    """Draw the main measure of the finished runs against the sweep's axis; return file name -> content, PNG and SVG.

    Validation: the final evaluation, mean and standard deviation over the folds or the seeds; else over the last
    checkpoints. Training: the batches of the last epoch, of a single curve. Over batches, each curve has its noise
    scale at the smallest batch at which it is clear. Nothing is drawn without two positions on the axis.
    """
    done = [row for row in rows if row.state == "done" and (sweep.x or row.global_batch)]
    every = sweep_points(sweep, rows)
    every = [point for point in every if sweep.x or point["global_batch"]]
    values = [point["x"] for point in every]
    # A number has its own position on the axis, other values follow one another.
    words = {_word(value): value for value in values}
    positions = words if all(map(is_number, values)) else {word: position for position, word in enumerate(words)}
    if not done or len(positions) < 2:
        return {}
    points = [point | {"position": positions[_word(point["x"])]} for point in every if point["done"]]
    if sweep.x is not None:
        points = [point | {"noise_scale": None} for point in points]  # a position on the axis of batches alone
    names = list(dict.fromkeys(point["curve"] for point in points))
    with house_style():
        figure = Figure(figsize=(6.4, 4.2 + 0.2 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(drawable(f"{sweep.name}: accuracy against {sweep.x or 'batch size'}"), loc="left", fontsize=12)
        main = sweep.measures.main
        noise_at = {_draw_curve(axes, i, name, points, main.key) for i, name in enumerate(names)}
        shown = {_word(point["x"]): point["position"] for point in points}
        _draw_ticks(axes, shown, is_batch=sweep.x is None)
        if not _are_numbers(shown):
            for container in axes.containers:
                container.get_children()[0].set(linestyle="")  # nothing lies between two words
        axes.set(xlabel=drawable(sweep.x or "global batch (clips)"), ylabel=f"{main.name} (%)")
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


def _word(value: object) -> str:
    return NONE if value is None else str(value)


def _are_numbers(positions: Mapping[str, float]) -> bool:
    return all(word == str(position) for word, position in positions.items())


def _draw_ticks(axes: Axes, positions: Mapping[str, float], *, is_batch: bool) -> None:
    """Mark every position; logarithmically for batches, and for numbers of about one order of magnitude or more."""
    ticks = sorted(positions.values())
    if is_batch or (0 < 8 * ticks[0] <= ticks[-1] and _are_numbers(positions)):
        log_ticks(axes, ticks, base=2 if is_batch else 10)
    else:
        axes.set_xticks(list(positions.values()), [drawable(word) for word in positions])
    axes.tick_params(axis="x", labelsize=9 if len(ticks) > 8 else 10)


def clear_noise(curve: Sequence[Point]) -> tuple[int, Measured] | None:
    """Return the first batch whose noise scale exceeds its standard error, and that noise scale; None without one."""
    for point in curve:
        noise: Measured | None = point["noise_scale"]
        if noise and noise.value is not None and noise.value > (noise.error or 0.0):
            return point["global_batch"], noise
    return None


def _draw_curve(axes: Axes, i: int, name: str, points: Sequence[Point], key: str) -> int | None:
    """Draw the measure `key` of curve i and its noise scale; return the batch at which this was measured."""
    curve = sorted((point for point in points if point["curve"] == name), key=lambda point: point["position"])
    batches = finite(point["position"] for point in curve)
    measured = finite(point[key] for point in curve)
    error_of = f"{key}_std" if has_repeats(points) else "checkpoints_std"
    bars = finite(point[error_of] for point in curve)
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
    value = noise.value or 0.0
    error = noise.error or 0.0
    colour = series(i)["color"]
    if error:
        axes.axvspan(value - error, value + error, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(value, color=colour, linestyle=":", linewidth=1.4, label=f"noise scale{title}: {noise.text}")
    return batch


def _caption(
    rows: Sequence[SweepRow], done: Sequence[SweepRow], points: Sequence[Point], measured_at: Sequence[int]
) -> str:
    bars = "Bars: one standard deviation (n - 1) over the last checkpoints."
    if has_repeats(points):
        fewest = min(point["done"] for point in points)
        most = max(point["done"] for point in points)
        what = "seed" if points[0]["folds"] == 0 else "run"
        runs = counted(most, what) if fewest == most else f"{fewest} to {most} {what}s"
        folds = f"the folds, from {runs} in all" if points[0]["folds"] else runs
        bars = f"Mean and standard deviation (n - 1) over {folds}."
    missing = f" {len(rows) - len(done)} of {len(rows)} runs are not done and not shown." if done != rows else ""
    lines = [bars + missing]
    if measured_at:
        clips = f"Noise scale measured at {listed(measured_at, most=4)} clips"
        lines.append(f"{clips}: below it larger batches save steps, above it they cost clips.")
    machines = "; ".join(dict.fromkeys(row.machine for row in done if row.machine))
    lines.append(f"Machine: {machines}" if machines else "")
    return "\n".join(line if len(line) < 110 else f"{line[:108]}\N{HORIZONTAL ELLIPSIS}" for line in lines)
