"""The figure of a fusion: by how much each class gains over the best single run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from summit_train.core.text import counted
from summit_train.report.caption import drawn, wrapped
from summit_train.report.figures import GREY, PALETTE, drawable
from summit_train.report.tables import MOST_CLASSES

_ROW = 0.27  # inches of a class


def draw_gains(path: Path, values: Mapping[str, Any]) -> None:
    """Draw the gain of each class, the largest above; of more than 30 classes the 15 at either end.

    `values` are those of `fuse --json`.
    """
    every = sorted(values["classes"], key=lambda row: (-row["gain"], row["label"]))
    end = MOST_CLASSES // 2
    rows = every if len(every) <= MOST_CLASSES else every[:end] + every[-end:]
    with drawn(path, wrapped(_caption(values, len(every) - len(rows))), (10.0, 1.9 + _ROW * len(rows))) as figure:
        axes = figure.subplots()
        gains = [row["gain"] for row in rows]
        axes.barh(range(len(rows)), gains, 0.7, color=[PALETTE[0] if gain > 0 else PALETTE[1] for gain in gains])
        labels = [drawable(f"{row['name']} ({row['videos']})") for row in rows]
        axes.set_yticks(range(len(rows)), labels, parse_math=False)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("gain in top-1 (points)")
        axes.set_title(drawable(f"Fused scores over {values['best']}, the best single run"), parse_math=False)
        # Behind each bar: from which accuracy to which it leads.
        widest = max(1.0, *(abs(gain) for gain in gains))
        axes.set_xlim(-1.45 * widest, 1.45 * widest)
        for place, row in enumerate(rows):
            before, after = (f"{row[name]:.1f}" for name in ("best_top1", "top1"))
            text = f"{before} \N{RIGHTWARDS ARROW} {after} %" if row["gain"] else f"{after} %"
            side, align = (-1, "right") if row["gain"] < 0 else (1, "left")
            axes.annotate(text, (row["gain"], place), (4 * side, 0), textcoords="offset points", ha=align, va="center",
                          fontsize=8, color=GREY)  # fmt: skip


def _caption(values: Mapping[str, Any], left_out: int) -> str:
    weights = ", ".join(f"{run['name']} {run['top1']:.2f} % (weight {run['weight']:g})" for run in values["runs"])
    what = "softmax probabilities" if values["scores"] == "softmax" else "logits"
    between = f" Left out in the middle: {left_out:,} of {len(values['classes']):,} classes." if left_out else ""
    return (
        f"Top-1 of {counted(values['videos'], 'video')}: fused {values['top1']:.2f} %; {weights}. Weighted mean of "
        f"{what}. In brackets: videos of the class.{between}"
    )
