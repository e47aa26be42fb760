"""How to measure on a machine that does other things too: repeats in turn, medians with spread, ratios by pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from summit_train.models.count import Count

T = TypeVar("T")


class MeasureError(ValueError):
    """What is to be measured makes no sense."""


@dataclass(frozen=True)
class Spread:
    """The lowest, the middle and the highest of some repeats."""

    min: float
    median: float
    max: float

    def values(self) -> dict[str, float]:
        """As a JSON object."""
        return asdict(self)

    def text(self, form: str = ".3g") -> str:
        """For people: 1.02 (1.01 .. 1.05)."""
        return f"{self.median:{form}} ({self.min:{form}} .. {self.max:{form}})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(min(values), statistics.median(values), max(values))


def pair_ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """values[i] / others[i]: each pair was measured side by side, so what slowed both cancels out."""
    return [value / other for value, other in zip(values, others, strict=True)]


def in_turn(measurements: Mapping[str, Callable[[], T]], repeats: int) -> Iterator[tuple[str, T]]:
    """Each measurement once a round, `repeats` rounds: (its name, what it gave), as they come.

    Every second round goes backwards (AB BA AB ...), so that a machine that slowly warms up or fills favours none.
    """
    for turn in range(repeats):
        names = list(measurements) if turn % 2 == 0 else list(measurements)[::-1]
        for name in names:
            yield name, measurements[name]()


def positive(value: int, option: str) -> int:
    """The value of an option that counts. Raises MeasureError below 1."""
    if value < 1:
        raise MeasureError(f"{option} {value}: a number above 0 is wanted")
    return value


def training_multiply_adds(network: Count) -> int:
    """Of one clip, forward and backward.

    The backward pass takes every forward multiply-add twice, for the weights' gradient and for the input's; the first
    convolution's input is the clip itself, whose gradient nobody computes.
    """
    return 3 * network.multiply_adds - network.layers[0].multiply_adds
