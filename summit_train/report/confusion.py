"""Which classes a run takes for which: counted from the scores of its final evaluation."""

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
from summit_train.evaluation.fuse import RunScores, read_run
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import PREDICTIONS, Scores
from summit_train.report.figures import Picture, drawable, house_style, image
from summit_train.report.records import RunRecord
from summit_train.report.tables import MOST_CLASSES

MOST_PAIRS = 10
MOST_SHOWN = 16  # classes of a matrix that lacks some


@dataclass(frozen=True)
class Confusion:
    """The videos of each true class (row) by predicted class (column), of one checkpoint.

    names: of the classes. cells (n, 3): row, column and number of each that is not 0, in the order of the rows: of
    20,000 classes the whole matrix has 3 GB. unread: videos without a prediction, which are in no cell. examples: (row,
    column) -> the video of a cell with the largest lead of the wrong class, where the videos have names.
    """

    checkpoint: str
    names: tuple[str, ...]
    cells: NDArray[np.int64]
    unread: int
    examples: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def counts(self) -> NDArray[np.int64]:
        """The whole matrix."""
        return self._among(np.arange(len(self.names)))

    def _among(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the matrix of some classes, whose numbers rise."""
        counts = np.zeros((len(chosen), len(chosen)), np.int64)
        places = np.full(len(self.names), -1)
        places[chosen] = np.arange(len(chosen))
        rows, columns = places[self.cells[:, :2]].T
        inside = (rows >= 0) & (columns >= 0)
        counts[rows[inside], columns[inside]] = self.cells[inside, 2]
        return counts

    @property
    def _sums(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The videos of each class, and the percentage of them that is right; 0 without any."""
        rows, columns, numbers = self.cells.T
        videos, right = (np.bincount(rows, n, len(self.names)) for n in (numbers, numbers * (rows == columns)))
        return videos.astype(np.int64), 100 * right / np.maximum(1, videos)

    @property
    def _wrong(self) -> NDArray[np.int64]:
        """The cells of mistakes, the most frequent first."""
        wrong = self.cells[self.cells[:, 0] != self.cells[:, 1]]
        return np.asarray(wrong[np.argsort(-wrong[:, 2], kind="stable")])

    def classes(self) -> list[tuple[str, str, str]]:
        """Return (class, videos, accuracy) of each class with videos, the worst first; of more than 30, ten."""
        return class_rows(self.names, *self._sums)

    def pairs(self) -> list[tuple[str, str, str, str, str]]:
        """Return (true class, predicted class, videos, share of the true class, a video) of the frequent mistakes."""
        pairs = []
        videos, _ = self._sums
        for row, column, n in self._wrong[:MOST_PAIRS].tolist():
            example = self.examples.get((row, column), "")
            pairs.append((self.names[row], self.names[column], str(n), f"{100 * n / videos[row]:.1f} %", example))
        return pairs

    def curve(self) -> Picture | None:
        """Draw the accuracies of more than 30 classes, the worst first. None for fewer, which have a table."""
        videos, accuracies = self._sums
        known = np.flatnonzero(videos)
        if len(known) <= MOST_CLASSES:
            return None
        with house_style():
            figure = Figure(figsize=(5.6, 2.4), layout="constrained")
            axes = figure.subplots()
            axes.stairs(np.sort(accuracies[known]), fill=True)
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

    def picture(self) -> Picture | None:
        """Draw the matrix of `most_confused`, each row in percent of its class, with the counts. None without any."""
        if not (shown := self.most_confused()):
            return None
        cell = min(0.42, 7.5 / len(shown))  # inches
        side = cell * len(shown)
        counts = self._among(np.array(shown))
        share = counts / np.maximum(1, self._sums[0][shown, None])
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
            svg = image(figure)
        unread = f" Left out, as they could not be read: {counted(self.unread, 'video')}." if self.unread else ""
        some = f" The {len(shown)} most confused of {len(self.names):,} classes."
        part = "" if len(shown) == len(self.names) else some
        caption = f"Videos of {self.checkpoint}. Rows: true class, shaded by its share.{part}{unread}"
        return Picture("Confusion", caption, "Confusion matrix: true class by predicted class", svg, third=False)


def class_rows(names: Sequence[str], videos: NDArray[Any], percents: NDArray[Any]) -> list[tuple[str, str, str]]:
    """Return (class, videos, percent) of each class with videos, the lowest first; of more than 30, ten."""
    known = np.flatnonzero(videos)
    known = known[np.argsort(percents[known], kind="stable")]
    known = known[:MOST_PAIRS] if len(known) > MOST_CLASSES else known
    return [(names[i], f"{videos[i]:,}", f"{percents[i]:.1f} %") for i in known.tolist()]


def read_confusion(run: RunRecord) -> Confusion | None:
    """Count the scores of the last evaluated checkpoint of a run with one class a video; None where there are none."""
    found = read_scores(run, "softmax")
    if found is None:
        return None
    return confusion_of(found.path.stem, found.scores, found.class_names, [str(clip) for clip in found.clips])


def read_precisions(run: RunRecord) -> tuple[list[tuple[str, str, str]], int]:
    """Return (class, videos, average precision) of a run with several classes a video, and how many classes it has."""
    found = read_scores(run, "binary")
    if found is None:
        return [], 0
    names = all_names(found.class_names, found.scores.scores.shape[1])
    return class_rows(names, found.scores.labels.sum(0), run.measures.main.of_class(found.scores)), len(names)


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


def confusion_of(checkpoint: str, found: Scores, names: tuple[str, ...], videos: Sequence[str] = ()) -> Confusion:
    """Count the labels, one a video, against the highest scores of the videos that were read.

    names: of the first classes; the others are their numbers. Of equal scores the first class counts. videos: the names
    of the videos, for examples.
    """
    labels = found.labels.astype(np.int64)
    scores = found.scores
    read = np.flatnonzero(found.is_read)
    size = scores.shape[1]
    predicted = scores.argmax(1)[read]
    places, numbers = np.unique(labels[read] * size + predicted, return_counts=True)
    cells = np.stack([*np.divmod(places, size), numbers], 1)
    examples = dict[tuple[int, int], str]()
    if videos:
        lead = scores[read, predicted] - scores[read, labels[read]]
        for place in np.argsort(lead, kind="stable").tolist():  # so the largest lead of a cell is the last
            examples[int(labels[read[place]]), int(predicted[place])] = videos[read[place]]
    return Confusion(checkpoint, all_names(names, size), cells, found.num_bad, examples)


def all_names(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Return `size` names: those known, then numbers."""
    return (*names[:size], *map(str, range(len(names), size)))
