"""Which classes videos are taken for, and precision, recall and F1 of each class. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.text import NONE, without_nan
from summit_train.evaluation.scores import Scores

MOST_CLASSES = 30  # of a table with a row for each class; of more, it has the lowest
_LOWEST = 10


@dataclass(frozen=True)
class Confusion:
    """The numbers of videos of one class each by their true and their predicted class.

    videos (C,): of each true class, also those that could not be read, which are in no cell and count as wrong. cells
    (n, 3): true class, predicted class and number of each pair that occurs, in the order of the classes: of 20,000
    classes the whole matrix has 3 GB.
    """

    videos: NDArray[np.int64]
    cells: NDArray[np.int64]

    @classmethod
    def of(cls, sets: Sequence[Scores]) -> Confusion:
        """Count the highest scores of the videos of one set or of several, such as folds; of equal ones the first."""
        size = sets[0].scores.shape[1]
        labels = np.concatenate([scores.labels for scores in sets]).astype(np.int64)
        predicted = np.concatenate([scores.scores.argmax(1) for scores in sets])
        is_read = np.concatenate([scores.is_read for scores in sets])
        pairs, numbers = np.unique((labels * size + predicted)[is_read], return_counts=True)
        return cls(np.bincount(labels, minlength=size), np.stack([*np.divmod(pairs, size), numbers], 1))

    @cached_property
    def percents(self) -> dict[str, NDArray[np.float64]]:
        """Compute precision, f1 and recall of each class, (C,); NaN where there is nothing to divide by.

        precision: of the videos that are taken for the class. recall: of its videos, its top-1 accuracy. f1: their
        harmonic mean.
        """
        rows, columns, numbers = self.cells.T
        size = len(self.videos)
        right = np.bincount(rows, numbers * (rows == columns), size)
        predicted = np.bincount(columns, numbers, size)
        totals = {"precision": predicted, "f1": (predicted + self.videos) / 2, "recall": self.videos}
        with np.errstate(invalid="ignore"):
            return {key: np.asarray(100 * right / total) for key, total in totals.items()}

    def among(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        """Return the matrix of some classes: a row for each true one, a column for each predicted one."""
        counts = np.zeros((len(chosen), len(chosen)), np.int64)
        positions = np.full(len(self.videos), -1)
        positions[list(chosen)] = np.arange(len(chosen))
        rows, columns = positions[self.cells[:, :2]].T
        inside = (rows >= 0) & (columns >= 0)
        counts[rows[inside], columns[inside]] = self.cells[inside, 2]
        return counts


def class_values(
    names: Sequence[str], videos: NDArray[np.int64], columns: Mapping[str, NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """Return the object of each class for JSON: its name, its videos, and a value of each column; None for NaN."""
    values = zip(names, videos.tolist(), *(column.tolist() for column in columns.values()), strict=True)
    return [without_nan(dict(zip(("name", "videos", *columns), row, strict=True))) for row in values]


def class_rows(classes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of `class_values` of each class with videos, by the last one; of more than 30 classes, ten."""
    rows = [list(one.values()) for one in classes if one["videos"]]
    rows.sort(key=lambda row: float(row[-1]))
    if len(rows) > MOST_CLASSES:
        rows = rows[:_LOWEST]
    percents = [[NONE if value is None else f"{value:.1f} %" for value in row[2:]] for row in rows]
    return [(row[0], f"{row[1]:,}", *cells) for row, cells in zip(rows, percents, strict=True)]
