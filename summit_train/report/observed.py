"""Early recognition: accuracy against the observed part of each video, as in Figures 7 and 8 of the TSM paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import ValidationError

from summit_train.core.errors import UserError
from summit_train.report.figures import (
    GREY,
    HEIGHT,
    LEGEND_LINE,
    WIDTH,
    Picture,
    add_legend,
    drawn,
    house_style,
    image,
    series,
    wrapped,
)
from summit_train.report.records import OBSERVED_FILE, Observed, Run

_X, _Y = "observed part of each video (%)", "top-1 (%)"
_CLIP: dict[str, Any] = {"linestyle": "-", "markersize": 5}
_STREAM: dict[str, Any] = {"linestyle": "--", "markersize": 5, "markerfacecolor": "white"}


def read_observed(run_path: Path) -> Observed:
    """Read a run's curves. Raises UserError where there are none."""
    path = run_path / OBSERVED_FILE
    try:
        return Observed.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        why = f"{path}: {error.strerror}; `summit-train eval SPEC --observed` writes it into the directory of its run"
        raise UserError(why) from error
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path}: is not what `summit-train eval SPEC --observed` writes") from error


def draw_observed(path: Path, runs: Sequence[Observed]) -> None:
    """Draw the curves of several runs."""
    curves = dict(zip(labels(runs), runs, strict=True))
    with drawn(path, wrapped(_caption(runs)), (10.0, 5.0)) as figure:
        add_legend(figure, [*_draw(figure, curves), *_kinds(runs)], "outside right upper")


def observed_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Return the figure of those of a report's runs that have curves, or no figure."""
    found = {run.label: run.observed for run in runs}
    curves = [curve for curve in found.values() if curve]
    if not curves:
        return []
    with house_style():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        names = _draw(figure, found)
        entries = [*(names if len(runs) > 1 else []), *_kinds(curves)]
        figure.set_size_inches(WIDTH, HEIGHT + LEGEND_LINE * len(entries))
        add_legend(figure, entries, "outside lower left")
        alt = f"Early recognition, {_Y} by {_X}: {', '.join(label for label in found if found[label])}"
        return [Picture("Early recognition", _caption(curves), alt, image(figure), third=False)]


def labels(runs: Sequence[Observed]) -> list[str]:
    """Return the runs' names, numbered where several have one."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _draw(figure: Figure, runs: Mapping[str, Observed | None]) -> list[tuple[Line2D, str]]:
    """Draw the runs that have curves; return their names. Run i has its colour also if those before it have none."""
    axes, names = figure.subplots(), list[tuple[Line2D, str]]()
    for i, (label, run) in enumerate(runs.items()):
        if run is None:
            continue
        names.append((Line2D([], [], markersize=5, **series(i)), label))
        for curve, style in ((run.observed, _CLIP), (run.anytime, _STREAM)):
            percents = [100 * point.fraction for point in curve]
            axes.plot(percents, [point.top1 for point in curve], **style, **series(i))
    axes.set_xlabel(_X)
    axes.set_ylabel(_Y)
    axes.set_xlim(0, 103)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(103.0, high))
    return names


def _kinds(runs: Sequence[Observed]) -> list[tuple[Line2D, str]]:
    """Return the legend's entries for the two kinds of curves, if there are both."""
    if not any(run.anytime for run in runs):
        return []
    clip = Line2D([], [], color=GREY, marker="o", markersize=5)
    return [(clip, "a clip of the part"), (Line2D([], [], color=GREY, marker="o", **_STREAM), "the stream so far")]


def _caption(runs: Sequence[Observed]) -> str:
    """Return what is drawn, as exactly as the runs agree on it."""
    frames, videos = ({getattr(run, key) for run in runs} for key in ("frames", "videos"))
    of = f"{frames.pop()}" if len(frames) == 1 else "T"
    count = f" {videos.pop():,} videos." if len(videos) == 1 and None not in videos else ""
    streams = any(run.anytime for run in runs)
    stream = " Dashed: the average of a stream's logits over the frames of the part." if streams else ""
    return (
        "Early recognition, as in Figures 7 and 8 of the TSM paper (journal version). Solid: "
        f"{of} frames, taken uniformly from the observed part.{stream}{count}"
    )
