"""The scores of several networks on one validation set, added: two streams, or an ensemble of 8 and 16 frames.

Needs no torch. Scores are the logits of a video, averaged over its views. As in TSM's `test_models.py` each network's
are multiplied by its weight and added, after a softmax or as they are; the sum is divided by the sum of the weights
(there by the number of networks), which changes no order of classes. TSN's `eval_scores.py` adds logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.rng import key
from summit_train.core.text import counted
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.run_scores import RunScores
from summit_train.evaluation.scores import Scores

Floats = NDArray[np.float64]
Weights = tuple[float, ...]

_STEPS = 20  # of a weight from 0 to 1 in a search
_ALL_WEIGHTS = 3  # runs of which every mixture is tried: 231; of four there are 1,771
_MOST_SWEEPS = 20


@dataclass(frozen=True)
class Ensemble:
    """Runs that scored the same videos. parts: of each run what is added, (V, classes)."""

    runs: tuple[RunScores, ...]
    parts: tuple[Floats, ...]
    softmax: bool

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self.runs[0].clips)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, as far as a run knows them."""
        return next((run.class_names for run in self.runs if run.class_names), ())

    def fuse(self, weights: Weights) -> Scores:
        """Return sum_i w_i s_i / sum_i w_i of each video. A run of weight 0 adds nothing, not even its bad videos."""
        added = sum(weight * part for weight, part in zip(weights, self.parts, strict=True) if weight)
        are_read = [run.scores.is_read for run, weight in zip(self.runs, weights, strict=True) if weight]
        fused = np.asarray(added) / sum(weights)
        return replace(self.runs[0].scores, scores=fused, is_read=np.logical_and.reduce(are_read))

    def of(self, places: NDArray[np.int64]) -> Ensemble:
        """Return the ensemble of some of its videos."""
        runs, parts = (_of(run, places) for run in self.runs), (part[places] for part in self.parts)
        return Ensemble(tuple(runs), tuple(parts), self.softmax)

    def logits(self, fused: Scores) -> Scores:
        """Return fused scores as logits: as they are, or the logarithms of probabilities, whose softmax they are."""
        if not self.softmax:
            return fused
        with np.errstate(divide="ignore"):
            return replace(fused, scores=np.log(fused.scores))


def _of(run: RunScores, places: NDArray[np.int64]) -> RunScores:
    scores = run.scores
    taken = Scores(*(column[places] for column in (scores.videos, scores.labels, scores.scores, scores.is_read)))
    return replace(run, clips=tuple(run.clips[place] for place in places.tolist()), scores=taken)


def ensemble(runs: Sequence[RunScores], *, softmax: bool) -> Ensemble:
    """Return the runs as an ensemble. Raises UserError for fewer than two, or for other videos, classes or labels."""
    if len(runs) < 2:
        raise UserError(f"{len(runs)} run: two or more are wanted to be fused")
    for place, run in enumerate(runs):
        if any(run.path.samefile(other.path) for other in runs[:place]):
            raise UserError(f"{run.path}: is given twice; scores of two or more runs are wanted")
    for run in runs[1:]:
        _check_match(runs[0], run)
    parts = [run.scores.scores.astype(np.float64) for run in runs]
    return Ensemble(tuple(runs), tuple(map(probabilities, parts) if softmax else parts), softmax)


def probabilities(logits: Floats) -> Floats:
    """Return the softmax of each row, (V, classes)."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: Floats = powers / powers.sum(1, keepdims=True)
    return shares


def _check_match(one: RunScores, other: RunScores) -> None:
    """Raise UserError unless both runs scored the same videos of the same classes."""
    sizes = [run.scores.scores.shape[1] for run in (one, other)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{one.path} has {sizes[0]} classes and {other.path} has {sizes[1]}; the same are wanted")
    if one.class_names and other.class_names and one.class_names != other.class_names:
        differing = sorted(set(one.class_names) ^ set(other.class_names)) or ["only in their order"]
        named = ", ".join(map(repr, differing[:5]))
        raise UserError(f"{one.path} and {other.path} do not have the same classes: they differ in {named}")
    if one.clips != other.clips:
        both = set(one.clips) & set(other.clips)
        raise UserError(
            f"{one.path} and {other.path} are not of the same videos, by path, span and direction in their manifests: "
            f"of {len(one.clips):,} and {len(other.clips):,} videos {len(both):,} match; "
            f"{_example(one, both, other)}"
        )
    differs = np.flatnonzero(one.scores.labels != other.scores.labels)
    if len(differs):
        first = int(differs[0])
        labels = [int(run.scores.labels[first]) for run in (one, other)]
        raise UserError(
            f"{one.clips[first]}: is class {labels[0]} in {one.path} and {labels[1]} in {other.path}"
            f" ({len(differs):,} of {len(one.clips):,} videos differ); runs of one manifest are wanted"
        )


def _example(one: RunScores, both: set[Clip], other: RunScores) -> str:
    """Name a video that only one of two runs has."""
    run, lacking = (one, other) if len(one.clips) > len(both) else (other, one)
    missing = next(clip for clip in run.clips if clip not in both)
    return f"{lacking.name} lacks {missing}, and has {lacking.clips[0]}"


def parse_weights(text: str | None, num_runs: int) -> Weights:
    """Read '1,1.5'; None: equal weights. Raises UserError unless there is one for each run, none below 0, not all 0."""
    if text is None:
        return (1.0,) * num_runs
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--weights {text}: numbers with commas are wanted, such as 1,1.5") from None
    if len(weights) != num_runs:
        raise UserError(f"--weights {text}: {len(weights)} for {num_runs} runs; one for each is wanted, in their order")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(f"--weights {text}: finite weights of 0 or more are wanted, and one above 0")
    return weights


def halves(labels: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split videos at random into two halves, in number and in each class equal to within one; return their places."""
    order = key(seed, "fuse").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.sort(order[::2]), np.sort(order[1::2])


def search_on_half(mixed: Ensemble, seed: int) -> tuple[Ensemble, Weights, dict[str, Any]]:
    """Find weights on one half of the videos; return the other half to be scored, the weights, and the search.

    Raises UserError for a single video.
    """
    if len(mixed) < 2:
        raise UserError(f"--search: {counted(len(mixed), 'video')} cannot be halved; two or more are wanted")
    half, other = (mixed.of(places) for places in halves(mixed.runs[0].scores.labels, seed))
    weights, equal = search_weights(half), other.fuse((1.0,) * len(mixed.runs))
    search = {
        "seed": seed,
        "found_on": len(half),
        "scored_on": len(other),
        "found_top1": half.fuse(weights).top(1),
        "equal_weights": {"top1": equal.top(1), "top5": equal.top(5)},
    }
    return other, weights, search


def search_weights(found_on: Ensemble) -> Weights:
    """Return the weights, of sum 1, with the most videos right; of equally good ones those nearest to equal weights.

    Of two or three runs: the best of all weights in steps of 0.05. Of more: one weight at a time takes 0, 0.05, ..., 1,
    while the others keep their ratios, until none gets better, which may be a local optimum.
    """
    num_runs = len(found_on.runs)
    equal = (1 / num_runs,) * num_runs

    def rank(weights: Weights) -> tuple[int, float]:
        return int(found_on.fuse(weights).right(1).sum()), -round(math.dist(weights, equal), 6)

    if num_runs <= _ALL_WEIGHTS:
        return max((equal, *_mixtures(num_runs)), key=rank)
    best = equal
    for _ in range(_MOST_SWEEPS):
        before = best
        for place in range(num_runs):
            tries = (_with_share(best, place, step / _STEPS) for step in range(_STEPS + 1))
            best = max((best, *tries), key=rank)
        if best == before:
            break
    return best


def _mixtures(num_runs: int) -> Iterator[Weights]:
    """Yield all weights of sum 1 in steps of 0.05: the stretches between bars in a row of 20 steps."""
    end = _STEPS + num_runs - 1
    for bars in combinations(range(end), num_runs - 1):
        yield tuple((bar - before - 1) / _STEPS for before, bar in pairwise((-1, *bars, end)))


def _with_share(weights: Weights, place: int, share: float) -> Weights:
    """Return the weights, of sum 1, with this one changed to `share` and the others scaled to what is left."""
    rest = sum(weights) - weights[place]
    others = [weight / rest if rest > 0 else 1 / (len(weights) - 1) for weight in weights]
    return tuple(round(share if i == place else (1 - share) * other, 6) for i, other in enumerate(others))


def fused_values(mixed: Ensemble, weights: Weights) -> dict[str, Any]:
    """Return the accuracies of an ensemble and of each run, in percent, and by how much each class gains, in points.

    best: the run of the highest top-1, the first of equal ones; gains are those over it.
    """
    fused, runs = mixed.fuse(weights), mixed.runs
    best = max(runs, key=lambda run: run.scores.top(1))
    return {
        "top1": fused.top(1),
        "top5": fused.top(5),
        "videos": len(mixed),
        "bad_videos": fused.num_bad,
        "scores": "softmax" if mixed.softmax else "logits",
        "matched_by": "path, span and direction",
        "best": best.name,
        "gain": fused.top(1) - best.scores.top(1),
        "runs": [
            {"name": run.name, "predictions": str(run.path), "weight": weight}
            | {"top1": run.scores.top(1), "top5": run.scores.top(5), "bad_videos": run.scores.num_bad}
            for run, weight in zip(runs, weights, strict=True)
        ],
        "classes": _class_values(fused, best.scores, mixed.class_names),
    }


def _class_values(fused: Scores, best: Scores, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each class that has videos."""
    counts, by_fused, by_best = (
        np.bincount(fused.labels, weights=right, minlength=fused.scores.shape[1]).tolist()
        for right in (None, fused.right(1), best.right(1))
    )
    return [
        {"label": label, "name": names[label] if label < len(names) else str(label), "videos": int(count)}
        | {"top1": 100 * mine / count, "best_top1": 100 * his / count, "gain": 100 * (mine - his) / count}
        for label, (count, mine, his) in enumerate(zip(counts, by_fused, by_best, strict=True))
        if count
    ]
