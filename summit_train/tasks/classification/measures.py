"""The measures of scores: accuracy, and mean average precision where a clip has several classes. Needs no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.evaluation.measures import Measure
from summit_train.evaluation.scores import Scores


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
    return 100 * average_precisions(scores.labels, np.where(scores.is_read[:, None], scores.scores, np.nan))


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _accuracies(scores: Scores) -> NDArray[np.float64]:
    videos = scores.hot.sum(0)
    right = scores.hot[scores.right(1)].sum(0)
    return np.where(videos, 100 * right / np.maximum(videos, 1), np.nan)


def top(scores: NDArray[Any], labels: NDArray[np.int64], k: int = 1) -> float:
    """Return the top-k accuracy, percent, of (N, classes); an example of a measure as evaluate.measures takes it."""
    return Scores(np.arange(len(labels)), labels, scores, np.ones(len(labels), np.bool_)).top(k)


MEASURES = {
    "softmax": (
        Measure("top1", "top-1", lambda scores: scores.top(1), _accuracies, "top1"),
        Measure("top5", "top-5", lambda scores: scores.top(5), _accuracies, "top1", above=5),
    ),
    "binary": (Measure("map", "mAP", lambda scores: _mean(_precision(scores)), _precision, "ap"),),
}
