"""The section of a page about a detector's boxes: what detection/ found out, drawn. Gone with that folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from summit_train.core.errors import UserError
from summit_train.detection.section import RECALLS, Section, read_section
from summit_train.report.figures import GREY, HEIGHT, PALETTE, WIDTH, Picture, drawable, house_style, image
from summit_train.report.records import Run

NAMED = len(PALETTE) - 1  # classes with colours of their own; the last is the mean's


def read_found(run: Run) -> tuple[Section, list[Picture]] | None:
    """Return what the last evaluated checkpoint of a detector found, and its figures; None for other runs.

    What cannot be read is noted in the run.
    """
    if run.setting("loss", "kind") != "detection" or run.final is None or not run.final.checkpoints:
        return None
    try:
        found = read_section(run.path, run.spec, Path(run.final.checkpoints[-1].path).stem)
    except (UserError, KeyError, TypeError) as error:
        run.notes.append(f"detections: left out ({error})")
        return None
    with house_style():
        return found, [_curves(found), _motion(found)]


def _curves(found: Section) -> Picture:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip((name for name, _, _ in found.classes[:NAMED]), PALETTE, strict=False))
    for name, one in found.curves.items():
        recall, precision = np.concatenate([[0], one.recall]), np.concatenate([one.precision[:1], one.precision])
        colour, front = colours.get(name, "#cccccc"), 1 + (name in colours)
        axes.step(100 * recall[: len(precision)], 100 * precision, color=colour, linewidth=1.1, zorder=front)
    axes.plot(100 * RECALLS, 100 * found.precision, color=PALETTE[-1], linewidth=2.2, zorder=3)
    axes.set(xlabel="recall (%)", ylabel="precision (%)", xlim=(0, 100), ylim=(0, 103))
    for number, (name, colour) in enumerate([("mean", PALETTE[-1]), *colours.items()]):
        at = (1.02, 0.97 - 0.12 * number)
        axes.annotate(drawable(name, 20), at, xycoords="axes fraction", color=colour, va="top")
    grey = f" In colour the {NAMED} lowest, in grey the others." if len(found.curves) > NAMED else ""
    caption = f"Of each class at an IoU of 0.5, and their mean, over all boxes of {found.checkpoint}.{grey}"
    return Picture("Precision and recall", caption, "Precision by recall of each class", image(figure), third=False)


def _motion(found: Section) -> Picture:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    bars = {"MEGA": [row[2] for row in found.motion], "FGFA": [row[3] for row in found.motion]}
    for form, (name, values) in enumerate(bars.items()):
        middles = [number + 0.4 * (form - 0.5) for number in range(len(found.motion))]
        axes.bar(middles, values, width=0.38, color=PALETTE[form], label=name)
        for x, value in zip(middles, values, strict=True):
            axes.text(x, value + 1, f"{value:.1f}", ha="center", fontsize=9, color=GREY)
    axes.set_xticks(range(len(found.motion)), [f"{name}\n{count:,} boxes" for name, count, _, _ in found.motion])
    axes.set(ylabel="mAP (%)", ylim=(0, 108))
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper right", ncols=2)
    caption = (
        "By motion IoU, the mean IoU of a box with those of its object up to 10 frames away: slow above 0.9, fast "
        "below 0.7. Both published ways to count; do not compare figures of one with those of the other."
    )
    return Picture("mAP and motion", caption, "mAP of slow, medium and fast objects", image(figure), third=False)
