"""Early recognition: accuracy against the observed part of each video, as in Figures 7 and 8 of the TSM paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from summit_train.core.text import counted, numbered
from summit_train.report import figures
from summit_train.report.figures import Picture
from summit_train.report.records import RunRecord
from summit_train.report.results import Observed

_X = "observed part of each video (%)"
_Y = "top-1 (%)"
CLIP: dict[str, Any] = {"linestyle": "-", "markersize": 5}
STREAM: dict[str, Any] = {"linestyle": "--", "markersize": 5, "markerfacecolor": "white"}


def draw_observed(path: Path, runs: Sequence[Observed]) -> None:
    """Draw the curves of several runs, numbered where several have one name."""
    curves = dict(zip(numbered([run.name for run in runs], "{} ({})"), runs, strict=True))
    with figures.drawn(path, figures.wrapped(_observed_caption(runs)), (10.0, 5.0)) as figure:
        figures.add_legend(figure, [*_draw_observed(figure, curves), *_kinds(runs)], "outside right upper")


def observed_picture(runs: Sequence[RunRecord]) -> Picture | None:
    """Draw the runs that have curves of early recognition. None if no run has any."""
    found = {run.label: run.observed for run in runs}
    curves = [curve for curve in found.values() if curve]
    if not curves:
        return None
    figure = Figure(figsize=(figures.WIDTH, figures.HEIGHT), layout="constrained")
    names = _draw_observed(figure, found)
    entries = [*(names if len(runs) > 1 else []), *_kinds(curves)]
    figure.set_size_inches(figures.WIDTH, figures.HEIGHT + figures.LEGEND_LINE * len(entries))
    figures.add_legend(figure, entries, "outside lower left")
    alt = f"Early recognition, {_Y} by {_X}: {', '.join(label for label in found if found[label])}"
    return Picture("Early recognition", _observed_caption(curves), alt, figures.image(figure), third=False)


def _draw_observed(figure: Figure, runs: Mapping[str, Observed | None]) -> list[tuple[Line2D, str]]:
    """Draw the runs that have curves; return their names. Run i has its colour also if those before it have none."""
    axes = figure.subplots()
    names = list[tuple[Line2D, str]]()
    for i, (label, run) in enumerate(runs.items()):
        if run is None:
            continue
        names.append((Line2D([], [], markersize=5, **figures.series(i)), label))
        for curve, style in ((run.observed, CLIP), (run.anytime, STREAM)):
            percents = [100 * point.fraction for point in curve]
            axes.plot(percents, figures.finite(point.of("top1") for point in curve), **style, **figures.series(i))
    axes.set(xlabel=_X, ylabel=_Y, xlim=(0, 103))
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(103.0, high))
    return names


def _kinds(runs: Sequence[Observed]) -> list[tuple[Line2D, str]]:
    """Return the legend's entries for the two kinds of curves, if there are both."""
    if not any(run.anytime for run in runs):
        return []
    clip = Line2D([], [], color=figures.GREY, marker="o", markersize=5)
    return [
        (clip, "a clip of the part"),
        (Line2D([], [], color=figures.GREY, marker="o", **STREAM), "the stream so far"),
    ]


def _observed_caption(runs: Sequence[Observed]) -> str:
    """Describe the curves, as exactly as the runs agree on them."""
    frames, videos = ({getattr(run, key) for run in runs} for key in ("frames", "videos"))
    of = f"{frames.pop()}" if len(frames) == 1 else "T"
    count = f" {counted(videos.pop(), 'video')}." if len(videos) == 1 and None not in videos else ""
    streams = any(run.anytime for run in runs)
    stream = " Dashed: the average of a stream's logits over the frames of the part." if streams else ""
    what = "Early recognition, as in Figures 7 and 8 of the TSM paper (journal version)."
    return f"{what} Solid: {of} frames, taken uniformly from the observed part.{stream}{count}"
