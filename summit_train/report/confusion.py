"""Which classes a run takes for which, from the scores of its final evaluation: tables, and the matrix drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.evaluation.confusion import MOST_CLASSES, Confusion, class_rows, class_values
from summit_train.evaluation.fuse import RunScores, read_run
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import PREDICTIONS
from summit_train.report.figures import Picture, drawable, house_style, image
from summit_train.report.records import RunRecord

MOST_PAIRS = 10
MOST_SHOWN = 16  # classes of a matrix that lacks some


@dataclass(frozen=True)
class Classes:
    """The section of a page about the classes. source: what the counts are of, for captions. names: of the classes.

    examples: (true, predicted) -> the video of a mistake with the largest lead of the wrong class.
    """

    source: str
    names: Sequence[str]
    confusion: Confusion
    examples: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return class_rows(class_values(self.names, self.confusion.videos, self.confusion.percents))

    @property
    def _wrong(self) -> NDArray[np.int64]:
        """The cells of mistakes, the most frequent first."""
        cells = self.confusion.cells
        wrong = cells[cells[:, 0] != cells[:, 1]]
        return np.asarray(wrong[np.argsort(-wrong[:, 2], kind="stable")])

    def pairs(self) -> list[tuple[str, str, str, str, str]]:
        """Return (true class, predicted class, videos, share of the true class, a video) of the frequent mistakes."""
        pairs = []
        for true, predicted, n in self._wrong[:MOST_PAIRS].tolist():
            share = f"{100 * n / self.confusion.videos[true]:.1f} %"
            example = self.examples.get((true, predicted), "")
            pairs.append((self.names[true], self.names[predicted], str(n), share, example))
        return pairs

    def curve(self) -> Picture | None:
        """Draw the accuracies of more than 30 classes, the worst first. None for fewer, which have a table."""
        recall = self.confusion.percents["recall"]
        known = np.sort(recall[~np.isnan(recall)])
        if len(known) <= MOST_CLASSES:
            return None
        with house_style():
            figure = Figure(figsize=(5.6, 2.4), layout="constrained")
            axes = figure.subplots()
            axes.stairs(known, fill=True)
            axes.set(xlim=(0, len(known)), ylim=(0, 100), xlabel="classes, by their accuracy", ylabel="top-1 (%)")
            svg = image(figure)
        caption = f"The accuracies of all {len(known):,} classes with videos."
        return Picture("Accuracy per class", caption, caption, svg, third=False)

    def most_confused(self) -> list[int]:
        """Return all classes; of more than 30, in their order, the 16 that are in the most frequent mistakes."""
        if len(self.names) <= MOST_CLASSES:
            return list(range(len(self.names)))
        chosen = dict.fromkeys(self._wrong[:, :2].ravel().tolist())
        return sorted(list(chosen)[:MOST_SHOWN])

    def caption(self) -> str:
        shown = len(self.most_confused())
        unread = int(self.confusion.videos.sum() - self.confusion.cells[:, 2].sum())
        some = "" if shown == len(self.names) else f" The {shown} most confused of {len(self.names):,} classes."
        left_out = f" Left out, as they could not be read: {counted(unread, 'video')}." if unread else ""
        return f"Videos of {self.source}. Rows: true class, shaded by its share.{some}{left_out}"

    def picture(self) -> Picture | None:
        """Draw the matrix for a page. None without any mistake among more than 30 classes."""
        if not self.most_confused():
            return None
        alt = "Confusion matrix: true class by predicted class"
        return Picture("Confusion", self.caption(), alt, self.image("svg"), third=False)

    def image(self, kind: str, title: str = "") -> bytes:
        """Draw the matrix of `most_confused`, each row shaded by the share of its class, with the counts."""
        shown = self.most_confused()
        cell = min(0.42, 7.5 / len(shown))  # inches
        side = cell * len(shown)
        counts = self.confusion.among(shown)
        share = counts / np.maximum(1, self.confusion.videos[shown, None])
        labels = [drawable(self.names[one], 30) for one in shown]
        with house_style():
            figure = Figure(figsize=(2.2 + side, 1.8 + side), layout="constrained")
            axes = figure.subplots()
            axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
            axes.set(xlabel="predicted", ylabel="true")
            axes.grid(visible=False)
            turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
            axes.set_xticks(range(len(labels)), labels, parse_math=False, **turned)
            axes.set_yticks(range(len(labels)), labels, parse_math=False)
            for row, column in np.argwhere(counts).tolist():
                colour = "white" if share[row, column] > 0.5 else "black"
                middle: dict[str, Any] = {"ha": "center", "va": "center"}
                axes.text(column, row, str(counts[row, column]), **middle, color=colour, fontsize=22 * cell)
            if title:
                figure.suptitle(title, fontsize=9, wrap=True, parse_math=False)
            return image(figure, kind)


def read_classes(run: RunRecord) -> Classes | None:
    """Count the scores of the last evaluated checkpoint of a run with one class a video; None where there are none."""
    found = read_scores(run, "softmax")
    if found is None:
        return None
    scores = found.scores
    labels = scores.labels
    predicted = scores.scores.argmax(1)
    mistakes = np.flatnonzero(scores.is_read & (predicted != labels))
    lead = scores.scores[mistakes, predicted[mistakes]] - scores.scores[mistakes, labels[mistakes]]
    last = dict[tuple[int, int], int]()
    for video in mistakes[np.argsort(lead, kind="stable")].tolist():  # so the largest lead of a pair is the last
        last[int(labels[video]), int(predicted[video])] = video
    examples = {pair: str(found.clips[video]) for pair, video in last.items()}
    return Classes(found.path.stem, scores.names(found.class_names), Confusion.of([scores]), examples)


def read_precisions(run: RunRecord) -> tuple[list[tuple[str, ...]], int]:
    """Return (class, videos, average precision) of a run with several classes a video, and how many classes it has."""
    found = read_scores(run, "binary")
    if found is None:
        return [], 0
    names = found.scores.names(found.class_names)
    precisions = {"ap": run.measures.main.of_class(found.scores)}
    return class_rows(class_values(names, found.scores.labels.sum(0), precisions)), len(names)


def read_scores(run: RunRecord, kind: str) -> RunScores | None:
    """Return the scores of the checkpoint last evaluated in a run of this loss.kind; None without any.

    Scores that cannot be read are noted in the run.
    """
    if run.final is None or not run.final.checkpoints or run.measures.main != measures_of(kind).main:
        return None
    path = run.path / PREDICTIONS / f"{Path(run.final.checkpoints[-1].path).stem}.npz"
    if not path.is_file():
        return None
    try:
        found = read_run(str(path))
        if found.scores.kind != kind:
            raise UserError(f"{path}: must be of loss.kind {kind}, got {found.scores.kind}")
        return found
    except UserError as error:
        run.notes.append(str(error))
        return None
