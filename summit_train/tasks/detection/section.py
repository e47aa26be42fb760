"""The section of a page about a detector's boxes: figures, classes, and the frames with most mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.augment import View, test_views
from summit_train.evaluation.scores import PREDICTIONS
from summit_train.report.figures import GREY, HEIGHT, PALETTE, WIDTH, Picture, drawable, house_style, image
from summit_train.report.films import Videos
from summit_train.report.records import RunRecord
from summit_train.tasks.detection.detections import RANGES, Detections, read_detections
from summit_train.tasks.detection.measures import BOX, FRAME, LABEL, SCORE, Curve, Floats

NAMED = len(PALETTE) - 1  # classes with colours of their own; the last is the mean's
MOST_FRAMES, SHORT_SIDE = 12, 240  # pixels of a picture
RECALLS = np.linspace(0, 1, 101)
FOUND, MISSED, RIGHT, WRONG = "found", "missed", "right", "wrong"


@dataclass(frozen=True)
class Marked:
    """A box on a picture. kind: FOUND or MISSED, of a detection RIGHT or WRONG. edges: in the stored frame."""

    kind: str
    edges: list[float]
    text: str


@dataclass(frozen=True)
class BadFrame:
    """A frame with mistakes, and its picture as a data URI, empty where `reason` says why. size: width, height."""

    video: str
    frame: int
    missed: int
    false: int
    boxes: list[Marked]
    picture: str
    size: tuple[int, int]
    reason: str


@dataclass(frozen=True)
class DetectionSection:
    """The detections of one checkpoint.

    motion: of each of RANGES that has boxes its name, boxes, and mean average precision. classes: name, boxes, average
    precision, and those of the ranges; the lowest first. precision: of the mean of the classes' curves at RECALLS. bad:
    the frame with most mistakes of each video.
    """

    motion: list[tuple[str, int, float]]
    classes: list[tuple[str, int, list[float]]]
    precision: Floats
    pictures: list[Picture]
    bad: list[BadFrame]
    template: str = "detection/section.html.j2"


def read_section(run: RunRecord) -> DetectionSection | None:
    """Read the results of the last evaluated checkpoint; None without one. An unreadable file is noted in the run."""
    if run.final is None or not run.final.checkpoints:
        return None
    checkpoint = Path(run.final.checkpoints[-1].path).stem
    try:
        num_classes = int(run.spec["model"]["num_classes"])
        found, videos, named = read_detections(run.path / PREDICTIONS / f"{checkpoint}.npz", num_classes)
    except (UserError, KeyError, TypeError) as error:
        run.notes.append(f"detections: left out ({error})")
        return None
    names = [*named, *map(str, range(len(named), num_classes))]
    keys = ["" if name == "all" else f"_{name}" for name in RANGES]
    motion = [
        (name, int(count), found.value(f"map{key}"))
        for name, key, count in zip(RANGES, keys, found.counted.sum(1), strict=True)
        if count
    ]
    every = found.curves()
    curves = {name: one for name, one in zip(names, every, strict=True) if one.positives}
    table = np.stack([found.of_class(f"map{key}") for key in keys], 1)
    order = [label for label in np.argsort(table[:, 0], kind="stable").tolist() if names[label] in curves]
    classes = [(names[label], curves[names[label]].positives, table[label].tolist()) for label in order]
    # At each of RECALLS, 0 where a curve does not reach it.
    found_at = [np.pad(one.precision, (0, 1))[np.searchsorted(one.recall, RECALLS - 1e-9)] for one in curves.values()]
    precision = np.mean(found_at or [np.zeros(len(RECALLS))], axis=0)
    with house_style():
        pictures = [_curves(curves, [names[label] for label in order], precision, checkpoint), _motion(motion)]
    scores = np.array([one.best_score for one in every])
    shown = found.rows[:, SCORE] >= scores[found.rows[:, LABEL].astype(int)]
    return DetectionSection(motion, classes, precision, pictures, _bad_frames(found, shown, videos, names, Videos(run)))


def _bad_frames(
    found: Detections, shown: NDArray[np.bool_], paths: list[str], names: list[str], videos: Videos
) -> list[BadFrame]:
    """Return the frame with most missed and false boxes of up to 12 videos, the worst first. shown: what is counted."""
    truth, (places, wrong) = found.truth.rows, found.judged
    right = places >= 0
    is_found = np.zeros(len(truth), bool)
    is_found[places[right & shown]] = True
    is_false = shown & (wrong[0] > 0)
    is_missed = ~is_found & ~truth["ignored"]
    worst = []
    for video, (own, boxes) in enumerate(found.parts()):
        false = found.rows[own][is_false[own]]
        missed = truth[boxes][is_missed[boxes]]
        numbers, counts = np.unique([*false[:, FRAME].astype(int), *missed["frame"]], return_counts=True)
        if len(numbers):
            # The most mistakes, then the highest score of a false box, then the first video.
            rank = -int(counts.max()), -float(false[:, SCORE].max(initial=0)), video
            worst.append((rank, int(numbers[counts.argmax()]), own, boxes))
    bad = []
    for (_, _, video), frame, own, boxes in sorted(worst, key=lambda one: one[0])[:MOST_FRAMES]:
        marked = [
            Marked(FOUND if hit else MISSED, _rounded(row["box"]), names[row["label"]])
            for row, hit in zip(truth[boxes], is_found[boxes], strict=True)
            if row["frame"] == frame and not row["ignored"]
        ]
        marked += [
            Marked(RIGHT if hit else WRONG, _rounded(row[BOX]), f"{names[int(row[LABEL])]} {100 * row[SCORE]:.0f} %")
            for row, hit, is_shown in zip(found.rows[own], right[own], shown[own], strict=True)
            if row[FRAME] == frame and is_shown
        ]
        kinds = [one.kind for one in marked]
        picture = _picture(videos, int(found.videos[video]), paths[video], frame)
        bad.append(BadFrame(paths[video], frame, kinds.count(MISSED), kinds.count(WRONG), marked, *picture))
    return bad


def _rounded(edges: NDArray[np.float32]) -> list[float]:
    return list(np.round(edges.astype(float), 1).tolist())


def _picture(videos: Videos, place: int, path: str, frame: int) -> tuple[str, tuple[int, int], str]:
    """Return the picture of a frame, the size of the stored one, and the reason if there is none."""

    def crop(width: int, height: int) -> list[View]:
        return test_views(min(SHORT_SIDE, width, height), "full", width, height)

    film = videos.film(place, Clip(path), lambda _: np.array([[frame]]), crop)
    return film.uri, film.stored_size, film.reason


def _curves(curves: dict[str, Curve], lowest: list[str], mean: Floats, checkpoint: str) -> Picture:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(lowest[:NAMED], PALETTE, strict=False))
    for name, one in curves.items():
        recall, precision = np.concatenate([[0], one.recall]), np.concatenate([one.precision[:1], one.precision])
        colour, front = colours.get(name, "#cccccc"), 1 + (name in colours)
        axes.step(100 * recall[: len(precision)], 100 * precision, color=colour, linewidth=1.1, zorder=front)
    axes.plot(100 * RECALLS, 100 * mean, color=PALETTE[-1], linewidth=2.2, zorder=3)
    axes.set(xlabel="recall (%)", ylabel="precision (%)", xlim=(0, 100), ylim=(0, 103))
    for number, (name, colour) in enumerate([("mean", PALETTE[-1]), *colours.items()]):
        at = (1.02, 0.97 - 0.12 * number)
        axes.annotate(drawable(name, 20), at, xycoords="axes fraction", color=colour, va="top")
    grey = f" In colour the {NAMED} lowest, in grey the others." if len(curves) > NAMED else ""
    caption = f"Of each class at an IoU of 0.5, and their mean, over all boxes of {checkpoint}.{grey}"
    return Picture("Precision and recall", caption, "Precision by recall of each class", image(figure), third=False)


def _motion(motion: list[tuple[str, int, float]]) -> Picture:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(motion)), [value for _, _, value in motion], width=0.6, color=PALETTE[0])
    for x, (_, _, value) in enumerate(motion):
        axes.text(x, value + 1, f"{value:.1f}", ha="center", fontsize=9, color=GREY)
    axes.set_xticks(range(len(motion)), [f"{name}\n{count:,} boxes" for name, count, _ in motion])
    axes.set(ylabel="mAP (%)", ylim=(0, 108))
    axes.grid(visible=False, axis="x")
    caption = (
        "By motion IoU, the mean IoU of a box with those of its object up to 10 frames away: slow above 0.9, fast "
        "below 0.7."
    )
    return Picture("mAP and motion", caption, "mAP of slow, medium and fast objects", image(figure), third=False)
