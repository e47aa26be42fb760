"""The measures of a run: what they are called, and how they are shown. Each loss.kind has its own.

Whatever shows a value takes its name and key from here: validation, evaluation, report, fuse, predict, sweep. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.own_parts import OwnPart
from summit_train.core.text import listed, percent
from summit_train.evaluation.confusion import Confusion, class_values
from summit_train.evaluation.scores import Scored, Scores
from summit_train.spec import Spec, own_parts

_TRIAL = 1_000_000  # scores that a measure is tried on
_MOST_CLASSES = 1000  # whose measures a validation records
_Z = 1.959964  # of the normal distribution, within which 95 % lie


@dataclass(frozen=True)
class OwnMeasure:
    """Calls a measure of the user's own with the scores (N, classes) and labels of the videos that were read.

    Labels: int64 (N,), with loss.kind binary bool (N, classes).
    """

    part: OwnPart
    call: Callable[..., Any]

    def __call__(self, scored: Scored) -> float:
        scores = scored.class_scores
        if scores is None or not scores.is_read.any():
            return math.nan
        value = self.call(scores.scores[scores.is_read], scores.labels[scores.is_read])
        if isinstance(value, bool) or not isinstance(value, Real) or math.isinf(value):
            raise self.part.wrong("a finite number, or NaN for unknown", f"{value!r:.60}, {type(value).__name__}")
        return float(value)


@dataclass(frozen=True)
class Measure:
    """A measure of the results on a set of videos.

    key: its name in JSON. class_key: the name of its value for each class. above: show it only with more classes than
    this. unit: for people; the main measure is in percent. own: computes a measure of the user's own.
    """

    key: str
    name: str
    class_key: str = ""
    above: float = 0
    unit: str = "%"
    own: OwnMeasure | None = None

    def of(self, scored: Scored) -> float:
        """Return the figure; NaN where the videos have nothing to measure it by."""
        return scored.value(self.key) if self.own is None else self.own(scored)

    def of_class(self, scored: Scored) -> NDArray[np.float64]:
        """Return the figure of each class, (classes,), NaN for one without a video; not of the user's own measures."""
        return scored.of_class(self.key)


# Of each loss.kind, the main one first: in percent, the more the better.
MEASURES = {
    "softmax": (Measure("top1", "top-1", "top1"), Measure("top5", "top-5", "top1", above=5)),
    "binary": (Measure("map", "mAP", "ap"),),
    # Of all boxes, and of those of slow, medium, fast and hidden objects.
    "detection": (
        Measure("map", "mAP", "ap"),
        Measure("map_slow", "slow", "ap"),
        Measure("map_medium", "medium", "ap"),
        Measure("map_fast", "fast", "ap"),
        Measure("map_hidden", "hidden", "ap"),
    ),
}


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
        return tuple(measure for measure in self.every if number > measure.above)

    def values(self, scored: Scored) -> dict[str, float | None]:
        """Return the measures under their keys, None for one that the videos say nothing about."""
        values = ((measure.key, measure.of(scored)) for measure in self.every)
        return {key: None if math.isnan(value) else value for key, value in values}

    def by_class(self, scored: Scored) -> list[float | None]:
        """Return the main measure of each class, rounded, None for one without a video; of more than 1,000, []."""
        if (self.num_classes or 0) > _MOST_CLASSES:
            return []
        values = self.main.of_class(scored).tolist()
        return [None if math.isnan(value) else round(value, 2) for value in values]

    def macro(self, scored: Scored) -> dict[str, float]:
        """Return the mean F1 of the classes of one class a video, percent, and of unequal classes their mean top-1.

        F1: over the classes that are true or predicted, as f1_score(average="macro") of scikit-learn.
        """
        scores = scored.class_scores
        if scores is None or scores.kind != "softmax":
            return {}
        confusion = Confusion.of([scores])
        known = confusion.videos[confusion.videos > 0]
        means = {key: float(np.nanmean(confusion.percents[key])) for key in ("recall", "f1")}
        macro = {} if (known == known[0]).all() else {"top1_macro": means["recall"]}
        return macro | {"top1_macro_f1": means["f1"]}

    def classes(self, scored: Scored, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return precision, F1 and recall of each class, of one class a video; of more than 1,000, []."""
        scores = scored.class_scores
        if scores is None or scores.kind != "softmax" or (self.num_classes or 0) > _MOST_CLASSES:
            return []
        confusion = Confusion.of([scores])
        return class_values(scores.names(names), confusion.videos, confusion.percents)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return `top-1 73.81 %  top-5 91.20 %`, of eval.json `top-1 73.81 +- 0.05 %  top-5 91.20 %`."""
        parts = []
        for measure in self.shown:
            value = values.get(measure.key, values.get(f"{measure.key}_mean"))
            std = values.get(f"{measure.key}_std") if measure == self.main else None
            text = percent(value, measure.unit) if std is None else f"{value:.2f} +- {std:.2f} %"
            parts.append(f"{measure.name} {text}")
        return "  ".join(parts)


def interval(top1: float, videos: int) -> tuple[float, float]:
    """Return the 95 % interval, percent, of an accuracy in percent over independent videos (Wilson, 1927)."""
    right = top1 / 100
    spread = _Z**2 / videos
    middle = right + spread / 2
    half = math.sqrt(spread * (right * (1 - right) + spread / 4))
    return max(0.0, 100 * (middle - half) / (1 + spread)), min(100.0, 100 * (middle + half) / (1 + spread))


def say_certainty(bounds: Sequence[float] | None, macro: float | None, macro_f1: float | None) -> list[str]:
    """Return lines for people about top-1: its interval, and means over the classes, as far as they are known."""
    lines = [] if bounds is None else ["95 % interval of top-1: {:.2f} to {:.2f} %".format(*bounds)]
    means = {"macro top-1": macro, "macro-F1": macro_f1}
    known = [f"{name}, the mean over the classes: {percent(mean)}" for name, mean in means.items() if mean is not None]
    return [*lines, *known]


def measures_of(kind: object, num_classes: float | None = None, own: Sequence[str] = ()) -> Measures:
    """Return the measures of a loss.kind, those of softmax for runs that are older than the key; then the user's own.

    own: the names of those, which are not computed here.
    """
    built_in = MEASURES.get(str(kind), MEASURES["softmax"])
    return Measures((*built_in, *(Measure(name, name, unit="") for name in own)), num_classes)


def open_measures(spec: Spec) -> Measures:
    """Return the measures of a spec, the user's own tried on videos with the right scores. Raises UserError."""
    classes = spec.model.num_classes
    own = list[Measure]()
    labels = np.arange(max(1, min(classes, _TRIAL // classes)))
    hot = labels[:, None] == np.arange(classes)
    right = Scores(labels, hot if spec.loss.base == "binary" else labels, hot.astype(np.float32), hot.any(1))
    for part, name in zip(own_parts(spec, "evaluate"), spec.evaluate.own_names, strict=True):
        own.append(Measure(name, name, unit="", own=OwnMeasure(part, part.make("scores", "labels"))))
        own[-1].of(right)
    return Measures((*measures_of(spec.loss.base).every, *own), classes)


def left_out(scored: Scored, names: Sequence[str]) -> list[str]:
    """Return the names of the classes that mean average precision leaves out; none of other measures."""
    return [names[number] if number < len(names) else str(number) for number in scored.left_out]


def say_left_out(classes: Sequence[str]) -> str:
    """Return a clause about `left_out` for people."""
    return f"mAP leaves out {len(classes):,} without ground truth: {listed(classes, 5)}" if classes else ""
