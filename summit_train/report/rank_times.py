"""The picture of a run's ranks against time: which of them were slow, and when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from summit_train.report.curves import Canvas
from summit_train.report.figures import PALETTE, Floats, Picture, house_style
from summit_train.report.records import RunRecord

_MOST_CELLS = 300  # of an axis; of more, each cell shows the slowest of several
_MOST_NAMED = 6
_DARKEST = 2.0  # times the median
_MARK: dict[str, Any] = {"marker": ">", "markersize": 8, "markeredgecolor": "white", "linestyle": "none"}


def rank_times_picture(run: RunRecord) -> list[Picture]:
    """Draw each rank's own time over the median of the ranks, by window, and mark those that were named as slow.

    Empty for a run of fewer than three ranks, or of less than a window.
    """
    if not run.log.rank_times:
        return []
    with house_style():
        canvas = Canvas([run], "rank")
        num_ranks = _num_ranks(run)
        edges, ratios = _cells(run)
        colours = LinearSegmentedColormap.from_list("slow", ["#ffffff", PALETTE[1], "#5c2a00"])
        rows = np.linspace(-0.5, num_ranks - 0.5, len(ratios) + 1)
        x = canvas.positions(run, edges)
        mesh = canvas.axes.pcolormesh(x, rows, ratios, cmap=colours, vmin=1, vmax=_DARKEST, rasterized=True)
        canvas.figure.colorbar(mesh, ax=canvas.axes, extend="max", ticks=[1, 1.3, 1.6, 2]).set_label("times the median")
        named = {slow.rank: slow for slow in run.log.slow_ranks if slow.rank < num_ranks}  # again after a resume
        for slow in named.values():
            canvas.axes.plot(canvas.positions(run, [slow.step]), [slow.rank], clip_on=False, color=PALETTE[0], **_MARK)
        for slow in list(named.values())[:_MOST_NAMED]:
            label = f"rank {slow.rank} on {slow.host}: {slow.part.replace('_', ' ')}, named at step {slow.step:,}"
            canvas.entries.append((Line2D([], [], color=PALETTE[0], **_MARK), label))
        if (more := len(named) - _MOST_NAMED) > 0:
            canvas.entries.append((Line2D([], [], color=PALETTE[0], **_MARK), f"{more:,} more"))
        canvas.axes.grid(visible=False)
        canvas.axes.set_ylim(rows[0], rows[-1])
        canvas.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        own = "Own time of each rank: data wait, forward, backward and update, without the wait for others."
        return [canvas.picture("Ranks", own)]


def _num_ranks(run: RunRecord) -> int:
    return max(len(one.compute_s) for one in run.log.rank_times)


def _cells(run: RunRecord) -> tuple[list[int], Floats]:
    """Return the edges of the windows, in steps, and the ratios to the median, (ranks, windows)."""
    steps = [one.step for one in run.log.rank_times]
    num_ranks = _num_ranks(run)
    ratios = np.full((num_ranks, len(steps)), np.nan)  # a run that was resumed may have had fewer ranks
    for i, one in enumerate(run.log.rank_times):
        own = np.array([sum(parts) for parts in zip(one.compute_s, one.data_wait_s, strict=False)])
        if middle := np.median(own):
            ratios[: len(own), i] = own / middle
    length = min((b - a for a, b in pairwise(steps)), default=steps[0])
    starts = _starts(len(steps))
    ratios = np.fmax.reduceat(np.fmax.reduceat(ratios, starts, axis=1), _starts(num_ranks), axis=0)
    return [max(0, steps[0] - length), *(steps[start - 1] for start in starts[1:]), steps[-1]], ratios


def _starts(count: int) -> Sequence[int]:
    """Return the first index of each of at most _MOST_CELLS cells."""
    cells = min(count, _MOST_CELLS)
    return [cell * count // cells for cell in range(cells)]
