"""The measures of a run: what they are called, and how they are shown. A task has those of its kinds of loss.

Whoever shows a figure takes its name and key from here: validation, evaluation, report, fuse, predict, sweep.
Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.core.text import listed, percent
from summit_train.evaluation.scores import Found, Scores
from summit_train.spec import Spec, own_parts
from summit_train.tasks.task import every_part

_TRIAL = 1_000_000  # scores that a measure is tried on


@dataclass(frozen=True)
class Measure:
    """A figure of what was found; NaN where the videos have nothing to measure it by.

    key: its name in JSON. of_class: the same of each class, (classes,), NaN for one without a video, and its key there.
    above: it says something if there are more classes than this. unit: for people; a main measure is in percent.
    """

    key: str
    name: str
    of: Callable[[Any], float]
    of_class: Callable[[Any], NDArray[np.float64]]
    class_key: str
    above: float = 0
    unit: str = "%"


@dataclass(frozen=True)
class OwnMeasure:
    """A measure of the user's own (docs/own_parts.md), called with scores (N, classes) and labels of the videos read.

    Labels: int64 (N,), with loss.kind binary bool (N, classes).
    """

    part: OwnPart
    call: Callable[..., Any]

    def values(self, found: Scores) -> dict[str, float]:
        """Return its number under its name, or numbers under NAME.KEY; none where no video was read."""
        name, read = self.part.title, found.is_read
        if not read.any():
            return {}
        given = self.call(found.scores[read], found.labels[read])
        entries = given if isinstance(given, Mapping) else {"": given}
        right = "a finite number, or some of them by names"
        if not entries or not all(isinstance(key, str) and f"_{key}".isidentifier() for key in entries):
            raise self.part.wrong(right, f"{given!r:.60}")
        for value in entries.values():
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise self.part.wrong(right, f"{value!r:.60}, {type(value).__name__}")
        return {f"{name}.{key}" if key else name: float(value) for key, value in entries.items()}


@dataclass(frozen=True)
class Measures:
    """The measures of a run, the main one first: all of them are recorded, people see those that say something.

    own_names: of those of the user's own. own: themselves, where they are computed.
    """

    every: tuple[Measure, ...]
    num_classes: float | None = None
    own_names: tuple[str, ...] = ()
    own: tuple[OwnMeasure, ...] = ()

    def recorded(self, values: Mapping[str, Any]) -> Measures:
        """Return them with those of the user's own that a record has, in eval.json with _mean after their keys."""
        keys = list(values)
        if f"{self.main.key}_mean" in values:
            keys = [key.removesuffix("_mean") for key in keys if key.endswith("_mean")]
        own = dict.fromkeys(key for key in keys if key.partition(".")[0] in self.own_names)
        known = {measure.key for measure in self.every}
        return replace(self, every=(*self.every, *(_recorded(key) for key in own if key not in known)))

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
        own = {key: value for one in self.own for key, value in one.values(found).items()}
        return {key: None if math.isnan(value) else value for key, value in values} | own

    def text(self, values: Mapping[str, Any]) -> str:
        """Return `top-1 73.81 %  top-5 91.20 %`, of eval.json `top-1 73.81 +- 0.05 %  top-5 91.20 %`."""
        parts = []
        for measure in self.recorded(values).shown:
            value = values.get(measure.key, values.get(f"{measure.key}_mean"))
            std = values.get(f"{measure.key}_std") if measure == self.main else None
            text = percent(value, measure.unit) if std is None else f"{value:.2f} +- {std:.2f} %"
            parts.append(f"{measure.name} {text}")
        return "  ".join(parts)


def measures_of(kind: object, num_classes: float | None = None, own_names: tuple[str, ...] = ()) -> Measures:
    """Return the measures of a loss.kind, of the first one for runs that are older than the key."""
    known = every_measure()
    return Measures(known.get(str(kind)) or next(iter(known.values())), num_classes, own_names)


def open_measures(spec: Spec) -> Measures:
    """Return the measures of a spec with those of the user's own, each tried on videos with the right scores.

    Raises UserError where one does not return what it must, and where there is none of checkpoint.keep_best.
    """
    parts, classes = own_parts(spec, "evaluate"), spec.model.num_classes
    own = tuple(OwnMeasure(part, part.make("scores", "labels")) for part in parts)
    known = replace(measures_of(spec.loss.base, classes, spec.evaluate.own_names), own=own)
    if own:
        labels = np.arange(max(1, min(classes, _TRIAL // classes)))
        hot = labels[:, None] == np.arange(classes)
        trial = Scores(labels, hot if spec.loss.base == "binary" else labels, hot.astype(np.float32), hot.any(1))
        found, best = known.values(trial), spec.checkpoint.keep_best
        if best is not None and best not in found:
            raise UserError(f"checkpoint.keep_best: must be one of {', '.join(found)}, got {best}")
    return known


def _recorded(key: str) -> Measure:
    """Return a measure of the user's own as a record has it: a number without a unit, and not of classes."""
    return Measure(key, key, lambda _: math.nan, lambda _: np.zeros(0), "", unit="")


def every_measure() -> dict[str, tuple[Measure, ...]]:
    """Return the measures of each loss.kind of any task."""
    return dict(chain(*(part.items() for part in every_part("measures"))))


def left_out(found: Found, names: Sequence[str]) -> list[str]:
    """Return the names of the classes that mean average precision leaves out; none of other measures."""
    return [names[number] if number < len(names) else str(number) for number in found.left_out]


def say_left_out(classes: Sequence[str]) -> str:
    """Return a clause about `left_out` for people."""
    return f"mAP leaves out {len(classes):,} without ground truth: {listed(classes, 5)}" if classes else ""
