"""The measures of a run: which ones each kind of loss has, and how each is computed.

Whoever shows a figure takes its name and key from here: validation, evaluation, report, fuse, predict, sweep.
Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.text import listed, percent
from summit_train.evaluation.scores import Found, Scores
from summit_train.spec import MAIN_MEASURES


@dataclass(frozen=True)
class Measure:
    """A figure of what was found, in percent; NaN where the videos have nothing to measure it by.

    key: its name in JSON. of_class: the same of each class, (classes,), NaN for one without a video, and its key there.
    above: it says something if there are more classes than this.
    """

    key: str
    name: str
    of: Callable[[Any], float]
    of_class: Callable[[Any], NDArray[np.float64]]
    class_key: str
    above: float = 0


@dataclass(frozen=True)
class Measures:
    """The measures of a run, the main one first: all of them are recorded, people see those that say something."""

    every: tuple[Measure, ...]
    num_classes: float | None = None

    @property
    def main(self) -> Measure:
        return self.every[0]

    @property
    def shown(self) -> tuple[Measure, ...]:
        number = math.inf if self.num_classes is None else self.num_classes
        return tuple(one for one in self.every if number > one.above)

    def values(self, found: Found) -> dict[str, float | None]:
        """Return the measures under their keys, None for one that the videos say nothing about."""
        values = ((measure.key, measure.of(found)) for measure in self.every)
        return {key: None if math.isnan(value) else value for key, value in values}

    def text(self, values: Mapping[str, Any]) -> str:
        """Return `top-1 73.81 %  top-5 91.20 %`, of eval.json `top-1 73.81 +- 0.05 %  top-5 91.20 %`."""
        parts = []
        for measure in self.shown:
            value = values.get(measure.key, values.get(f"{measure.key}_mean"))
            std = values.get(f"{measure.key}_std") if measure == self.main else None
            parts.append(f"{measure.name} {percent(value) if std is None else f'{value:.2f} +- {std:.2f} %'}")
        return "  ".join(parts)


def measures_of(kind: object, num_classes: float | None = None) -> Measures:
    """Return the measures of a loss.kind, of softmax for runs that are older than the key."""
    return Measures(_OF_KIND.get(str(kind), _OF_KIND["softmax"]), num_classes)


def average_precisions(is_positive: NDArray[np.bool_], scores: NDArray[Any]) -> NDArray[np.float64]:
    """Return the average precision of each class, 0 to 1, of (V, classes); NaN for a class without a positive.

    sum_n (R_n - R_{n-1}) P_n over the distinct scores from the highest down, P_n and R_n precision and recall of the
    videos with that score or more: scikit-learn's average_precision_score. A video whose scores are NaN is never found.
    """
    found = np.where(is_positive.any(0), 0.0, np.nan)
    known = ~np.isnan(scores).any(1)
    for number in np.flatnonzero(is_positive[known].any(0)).tolist():
        own, hits = scores[known, number], is_positive[known, number]
        order = np.argsort(-own, kind="stable")
        # The last of those that share a score.
        ends = np.concatenate([np.flatnonzero(np.diff(own[order])), [len(own) - 1]])
        true = np.cumsum(hits[order])[ends]
        recall = true / is_positive[:, number].sum()
        found[number] = np.sum(np.diff(recall, prepend=0.0) * true / (ends + 1))
    return found


def _precision(scores: Scores) -> NDArray[np.float64]:
    readable = np.where(scores.is_read[:, None], scores.scores, np.nan)
    return 100 * average_precisions(scores.labels, readable)


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _accuracies(scores: Scores) -> NDArray[np.float64]:
    videos = scores.hot.sum(0)
    right = scores.hot[scores.right(1)].sum(0)
    return np.where(videos, 100 * right / np.maximum(videos, 1), np.nan)


_OF_BOXES = (
    ("map", "mAP"), ("map_slow", "slow"), ("map_medium", "medium"), ("map_fast", "fast"), ("map_hidden", "hidden"),
)  # fmt: skip
_OF_KIND = {
    "softmax": (
        Measure(MAIN_MEASURES["softmax"], "top-1", lambda scores: scores.top(1), _accuracies, "top1"),
        Measure("top5", "top-5", lambda scores: scores.top(5), _accuracies, "top1", above=5),
    ),
    "binary": (Measure(MAIN_MEASURES["binary"], "mAP", lambda s: _mean(_precision(s)), _precision, "ap"),),
    "detection": tuple(
        Measure(key, name, methodcaller("mean", key), methodcaller("of_class", key), "ap") for key, name in _OF_BOXES
    ),
}
EVERY = tuple(measure for kind in _OF_KIND.values() for measure in kind)


def left_out(found: Found, names: Sequence[str]) -> list[str]:
    """Return the names of the classes that mean average precision leaves out; none of other measures."""
    return [names[number] if number < len(names) else str(number) for number in found.left_out]


def say_left_out(classes: Sequence[str]) -> str:
    """Return a clause about `left_out` for people."""
    return f"mAP leaves out {len(classes):,} without ground truth: {listed(classes, 5)}" if classes else ""
