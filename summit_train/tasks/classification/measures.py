"""An example of a measure of the user's own (docs/own_parts.md). Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.evaluation.scores import Scores


def top(scores: NDArray[Any], labels: NDArray[np.int64], k: int = 1) -> float:
    """Return the top-k accuracy, percent, of (N, classes), as evaluate.measures takes it."""
    return Scores(np.arange(len(labels)), labels, scores, np.ones(len(labels), np.bool_)).top(k)
