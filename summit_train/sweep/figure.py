"""Write a sweep's folder: its table, its figure, and of a cross-validation the clips and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.core.errors import UserError
from summit_train.core.files import locked, replacing, write_json, write_text
from summit_train.core.text import NONE, counted, csv_text, listed, numbered
from summit_train.evaluation.confusion import Confusion
from summit_train.evaluation.fuse import RunScores, check_classes, read_run
from summit_train.evaluation.measures import interval
from summit_train.evaluation.scores import probabilities
from summit_train.report.confusion import Classes
from summit_train.report.figures import GREY, PALETTE, drawable, finite, house_style, image, log_ticks, series
from summit_train.report.noise import Measured
from summit_train.sweep import status
from summit_train.sweep.grid import Sweep, is_number, joined_name
from summit_train.sweep.status import Point, Row

_MOST_CLASSES = 1000  # of a matrix


def write_sweep(sweep: Sweep, jobs: Mapping[str, tuple[str, str]]) -> list[Row]:
    """Write tables, accuracy.png and .svg, and with folds clips.csv and `confusion_files`; return the rows."""
    # Runs that end together all do this. One lock covers reading and writing: no run writes older results over newer.
    with locked(sweep.folder / "lock"):
        rows = status.read_rows(sweep, jobs)
        drawn = dict[str, bytes]()
        if any(run.fold for run in sweep.runs):
            scored = read_folds(rows)
            write_text(sweep.folder / "clips.csv", csv_text(clip_table(sweep, scored)))
            drawn |= confusion_files(sweep, rows, scored)
        write_text(sweep.folder / "table.txt", status.tables(sweep, rows) + "\n")
        columns = dict.fromkeys(key for row in rows for key in row)  # another task has measures of its own
        write_text(sweep.folder / "table.csv", csv_text([columns, *(map(row.get, columns) for row in rows)]))
        write_json(sweep.folder / "table.json", status.as_values(sweep, rows))
        if (figure := draw_accuracy(sweep, rows) or draw_runs(sweep, rows)) is not None:
            with house_style():
                drawn |= {f"accuracy.{kind}": image(figure, kind) for kind in ("png", "svg")}
        for name, content in drawn.items():
            with replacing(sweep.folder / name) as file:
                file.write(content)
    return rows


def written(sweep: Sweep) -> str:
    kinds = ("table.*", "accuracy.*", "clips.*", "confusion*.*")
    return ", ".join(sorted(path.name for kind in kinds for path in sweep.folder.glob(kind)))


def read_folds(rows: Sequence[Row]) -> dict[str, RunScores]:
    """Return run name -> the scores of the last checkpoint of each run that is done, all with the classes' names.

    The note in `rows` says why the scores of a run are left out: they cannot be read, or their classes are not those
    of the other folds.
    """
    scored = dict[str, RunScores]()
    first: RunScores | None = None  # the first run whose classes have names, if any have
    for row in rows:
        if row["state"] != "done":
            continue
        try:
            run = read_run(row["run"])
            check_classes(first or run, run)
        except UserError as error:
            status.add_note(row, str(error))
            continue
        scored[row["name"]] = run
        if first is None or not first.class_names:
            first = run
    names = first.scores.names(first.class_names) if first else ()
    return {name: replace(run, class_names=names) for name, run in scored.items()}


def clip_table(sweep: Sweep, scored: Mapping[str, RunScores]) -> list[list[object]]:
    """Return a heading and a row for each clip of each run: its labels and the probability of each class.

    A clip that could not be read has no probabilities.
    """
    classes = next((run.class_names for run in scored.values()), ())
    table: list[list[object]] = [["run", "fold", "seed", "clip", "label", "predicted", *classes]]
    for run in sweep.runs:
        if run.name not in scored:
            continue
        scores = scored[run.name].scores
        likely = probabilities(scores.scores, scores.kind)
        hot = scores.hot
        for number, clip in enumerate(scored[run.name].clips):
            labels = ";".join(name for name, is_one in zip(classes, hot[number], strict=True) if is_one)
            prediction: list[object] = [""] * (1 + len(classes))
            if scores.is_read[number]:
                prediction = [classes[likely[number].argmax()], *(f"{share:.6f}" for share in likely[number])]
            table.append([run.name, run.fold, run.spec.seed, str(clip), labels, *prediction])
    return table


def confusion_files(sweep: Sweep, rows: Sequence[Row], scored: Mapping[str, RunScores]) -> dict[str, bytes]:
    """Return file name -> content of the matrix of each setting's folds together, of one class a video.

    confusion.csv: a row for each setting and true class, a column for each predicted one. A clip counts once for each
    seed.
    """
    groups = [[row for _, row in group] for group in status.by_setting(sweep, rows)]
    points = [(point["curve"], point["x"]) for point in status.sweep_points(sweep, rows)]
    labels = [joined_name([("", curve), (sweep.x or "batch", x)]).removeprefix("_") for curve, x in points]
    files = dict[str, bytes]()
    table: list[list[object]] = []
    for label, group in zip(numbered(labels, "{}_{}") if len(groups) > 1 else [""], groups, strict=True):
        runs = [scored[row["name"]] for row in group if row["name"] in scored]
        if not runs or runs[0].scores.kind != "softmax" or len(runs[0].class_names) > _MOST_CLASSES:
            continue
        names = runs[0].class_names
        confusion = Confusion.of([run.scores for run in runs])
        table = table or [["setting", "true", *names]]
        matrix = confusion.among(range(len(names))).tolist()
        table += [[label, name, *counts] for name, counts in zip(names, matrix, strict=True)]
        about = Classes(f"{len(runs)} of {counted(len(group), 'run')}", names, confusion)
        if about.most_confused():
            title = f"{sweep.name} {label}".rstrip() + f"\n{about.caption()}".replace(". ", ".\n")
            files[f"confusion_{label}.png".replace("_.", ".")] = about.image("png", title)
    return files | ({"confusion.csv": csv_text(table).encode("utf-8", "replace")} if table else {})


def draw_accuracy(sweep: Sweep, rows: Sequence[Row]) -> Figure | None:
    """Draw the main measure of the finished runs against the sweep's axis. None without two positions on it.

    Validation: the final evaluation, mean and standard deviation over the folds or the seeds; else over the last
    checkpoints. Training: the batches of the last epoch, of a single curve. Over batches, each curve has its noise
    scale at the smallest batch at which it is clear.
    """
    done = [row for row in rows if row["state"] == "done" and (sweep.x or row["global_batch"])]
    every = [point for point in status.sweep_points(sweep, rows) if sweep.x or point["global_batch"]]
    words = {_word(point["x"]): point["x"] for point in every}
    # A number has its own position on the axis, other values follow one another.
    is_numeric = all(map(is_number, words.values()))
    positions = words if is_numeric else {word: position for position, word in enumerate(words)}
    if not done or len(positions) < 2:
        return None
    points = [point | {"position": positions[_word(point["x"])]} for point in every if point["done"]]
    if sweep.x is not None:
        points = [point | {"noise_scale": None} for point in points]  # a position on the axis of batches alone
    names = list(dict.fromkeys(point["curve"] for point in points))
    with house_style():
        figure = Figure(figsize=(6.4, 4.2 + 0.2 * len(names)), layout="constrained")
        axes = figure.subplots()
        main = sweep.measures.main
        noise_at = {_draw_curve(axes, i, name, points, main.key) for i, name in enumerate(names)}
        shown = {_word(point["x"]): point["position"] for point in points}
        ticks = sorted(shown.values())
        # Logarithmically for batches, and for numbers of about one order of magnitude or more.
        if sweep.x is None or (is_numeric and 0 < 8 * ticks[0] <= ticks[-1]):
            log_ticks(axes, ticks, base=2 if sweep.x is None else 10)
        else:
            axes.set_xticks(list(shown.values()), [drawable(word) for word in shown])
        axes.tick_params(axis="x", labelsize=9 if len(ticks) > 8 else 10)
        if not is_numeric:
            for container in axes.containers:
                container.get_children()[0].set(linestyle="")  # nothing lies between two words
        axes.set(xlabel=drawable(sweep.x or "global batch (clips)"))
        title = f"{sweep.name}: accuracy against {sweep.x or 'batch size'}"
        _finish(sweep, axes, title, _caption(rows, done, points, sorted(filter(None, noise_at))))
    return figure


def draw_runs(sweep: Sweep, rows: Sequence[Row]) -> Figure | None:
    """Draw the main measure of each finished run of a sweep with one setting, by fold, else by seed. None without two.

    Bars: the 95 % interval of top-1. Line and band: mean and standard deviation over the folds, else over the seeds.
    """
    points = status.sweep_points(sweep, rows)
    main = sweep.measures.main
    done = [row for row in rows if row["state"] == "done" and row[main.key] is not None]
    if len(points) > 1 or len(done) < 2:
        return None
    [point] = points
    axis = "fold" if point["folds"] else "seed"
    ticks = list(dict.fromkeys(row[axis] for row in rows))
    seeds = list(dict.fromkeys(row["seed"] for row in done)) if point["folds"] else [None]
    apart = min(0.15, 0.7 / len(seeds))
    with house_style():
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        has_bars = False
        for i, seed in enumerate(seeds):
            of_seed = [row for row in done if seed in (None, row["seed"])]
            x = finite(ticks.index(row[axis]) + apart * (i - (len(seeds) - 1) / 2) for row in of_seed)
            y = finite(row[main.key] for row in of_seed)
            is_measured = main.key == "top1" and all(row["videos"] for row in of_seed)
            bounds = [interval(row["top1"], row["videos"]) for row in of_seed] if is_measured else []
            errors = abs(np.array(bounds).T - y) if is_measured else None
            label = "runs" if seed is None else f"seed {seed}"
            has_bars = has_bars or is_measured
            axes.errorbar(x, y, errors, **series(i), capsize=3, linestyle="", label=label)
            baselines = finite(row["baseline"] for row in of_seed)
            is_first = "baseline" not in axes.get_legend_handles_labels()[1]
            if not np.isnan(baselines).all():
                axes.plot(x, baselines, "_", color=GREY, markersize=14, label="baseline" if is_first else "")
        mean = point[main.key]
        std = point[f"{main.key}_std"]
        axes.axhline(mean, color=GREY, linewidth=1.0)
        if std is not None:
            axes.axhspan(mean - std, mean + std, color=GREY, alpha=0.15, linewidth=0)
        axes.set_xticks(range(len(ticks)), [drawable(str(tick)) for tick in ticks])
        axes.set(xlabel=axis, xlim=(-0.5, len(ticks) - 0.5))
        caption = ["Bars: 95 % interval of top-1 (Wilson), for independent clips."] if has_bars else []
        over = f"the {axis}s, each the mean over its seeds" if len(seeds) > 1 else f"the {axis}s"
        band = "" if std is None else " and band: mean and standard deviation (n - 1)"
        caption.append(f"Line{band or ': mean'} over {over}.")
        _finish(sweep, axes, f"{sweep.name}: accuracy of each {axis}", "\n".join(caption))
    return figure


def _finish(sweep: Sweep, axes: Axes, title: str, caption: str) -> None:
    """Add what all figures of a sweep have: title, limits within 0 and 100 %, legend, caption."""
    axes.set_title(drawable(title), loc="left", fontsize=12)
    axes.set(ylabel=f"{sweep.measures.main.name} (%)")
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(high, 102.0))
    figure = axes.figure
    for text in figure.legend(loc="outside lower left", ncols=2).get_texts():
        text.set_parse_math(False)
    below = axes.annotate(caption, (0, 0), (0, -44), "axes fraction", "offset points", fontsize=8, color=GREY, va="top")
    below.set_parse_math(False)


def _word(value: object) -> str:
    return NONE if value is None else str(value)


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
    error_of = f"{key}_std" if status.has_repeats(points) else "checkpoints_std"
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


def _caption(rows: Sequence[Row], done: Sequence[Row], points: Sequence[Point], measured_at: Sequence[int]) -> str:
    bars = "Bars: one standard deviation (n - 1) over the last checkpoints."
    if status.has_repeats(points):
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
    machines = "; ".join(dict.fromkeys(row["machine"] for row in done if row["machine"]))
    lines.append(f"Machine: {machines}" if machines else "")
    return "\n".join(line if len(line) < 110 else f"{line[:108]}\N{HORIZONTAL ELLIPSIS}" for line in lines)
