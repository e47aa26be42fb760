"""How to measure on a machine that does other things too: repeats in turn, medians with spread, ratios by pairs."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from summit_train.core.comm import World
from summit_train.core.comm.launch import this_launch
from summit_train.core.count import Count
from summit_train.core.device import choose_device
from summit_train.core.result import tell
from summit_train.core.session import session

K = TypeVar("K")
T = TypeVar("T")
Values = dict[str, Any]  # what a bench measured, as --json prints it


@dataclass(frozen=True)
class Turns:
    """How long to measure: `repeats` turns, each the mean over `steps` steps, after `warm_up` steps."""

    repeats: int
    steps: int
    warm_up: int


@dataclass(frozen=True)
class Context:
    """Where a bench runs: the ranks, this rank's device, and `tell`, which reports progress from rank 0."""

    world: World
    device: torch.device
    tell: Callable[[str], None]


@contextmanager
def open_context() -> Iterator[Context]:
    with session(this_launch()) as world:
        yield Context(world, choose_device(world), tell if world.rank == 0 else lambda text: None)


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


def training_multiply_adds(network: Count) -> int:
    """Return the multiply-adds of one clip, forward and backward.

    The backward pass repeats every forward multiply-add twice: for the gradient of the weights and for that of the
    input. The first convolution's input is the clip, which needs no gradient.
    """
    return 3 * network.multiply_adds - network.layers[0].multiply_adds


def add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def add_turns(parser: argparse.ArgumentParser, steps: int = 2) -> None:
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measured turns [5]")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"steps of a turn, their mean [{steps}]")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="steps not counted [2]")
