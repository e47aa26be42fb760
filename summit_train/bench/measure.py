"""How to measure on a machine that does other things too: repeats in turn, medians with spread, ratios by pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from summit_train.core.errors import UserError
from summit_train.models.count import Count

K = TypeVar("K")
T = TypeVar("T")


class MeasureError(UserError):
    """The options of a measurement make no sense."""


@dataclass(frozen=True)
class Turns:
    """How long to measure: `repeats` turns, each the mean over `steps` steps, after `warm_up` steps."""

    repeats: int
    steps: int
    warm_up: int


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return min, median and max of at least one value."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def spread_text(values: Mapping[str, float], form: str = ".3f", scale: float = 1) -> str:
    """Write a spread for people, times `scale`: 1.02 (1.01 .. 1.05)."""
    median, least, most = (f"{scale * values[name]:{form}}" for name in ("median", "min", "max"))
    return f"{median} ({least} .. {most})"


def pair_ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return values[i] / others[i]. Each pair is measured side by side, so what slows both cancels out."""
    return [value / other for value, other in zip(values, others, strict=True)]


def in_turn(measurements: Mapping[K, Callable[[], T]], repeats: int) -> Iterator[tuple[K, T]]:
    """Take each measurement once a round; yield its key and its result.

    Every second round runs backwards (AB BA AB ...), so that a machine that slowly warms up or fills favours none.
    """
    for turn in range(repeats):
        for key in list(measurements)[:: 1 if turn % 2 == 0 else -1]:
            yield key, measurements[key]()


def check_above_0(options: Mapping[str, float | None]) -> None:
    """Raise MeasureError unless every option, by its name in Python, is above 0 and finite, or not given."""
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise MeasureError(f"--{name.replace('_', '-')} {value:g}: a number above 0 is wanted")


def training_multiply_adds(network: Count) -> int:
    """Return the multiply-adds of one clip, forward and backward.

    The backward pass repeats every forward multiply-add twice: for the gradient of the weights and for that of the
    input. The first convolution's input is the clip, which needs no gradient.
    """
    return 3 * network.multiply_adds - network.layers[0].multiply_adds
