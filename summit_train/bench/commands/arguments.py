"""Options and output that the benches share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from summit_train.bench.measure import MeasureError, Turns
from summit_train.bench.steps import Experiment, Place
from summit_train.core.comm.launch import this_launch
from summit_train.core.files import figure_path, write_json
from summit_train.core.session import session
from summit_train.data.dataset import Dataset
from summit_train.plan import make_plan
from summit_train.spec import Spec
from summit_train.training.start import choose_device

Values = dict[str, Any]


def add_spec(parser: argparse.ArgumentParser, overrides_help: str = "spec keys to override") -> None:
    """Add the spec and its overrides."""
    parser.add_argument("spec", metavar="SPEC", help="experiment spec (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)


def add_turns(parser: argparse.ArgumentParser, steps: int = 2) -> None:
    """Add the options that say how long to measure."""
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measured turns [5]")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"steps of a turn, their mean [{steps}]")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="steps not counted [2]")


def turns_of(args: argparse.Namespace) -> Turns:
    """Return how long to measure."""
    return Turns(args.repeats, args.steps, args.warm_up)


def add_peak(parser: argparse.ArgumentParser) -> None:
    """Add the option that replaces the measurement of the peak."""
    parser.add_argument("--peak", type=float, metavar="X", help="multiply-adds/s of a rank at best; 0: no utilisation")


def add_output(parser: argparse.ArgumentParser, *, figure: bool = True) -> None:
    """Add the options that say where the result goes."""
    if figure:
        parser.add_argument("--out", metavar="FILE", help="draw it; the values go to FILE.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def show(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Values | None],
    as_text: Callable[[Values], str],
    draw: Callable[[Path, Values], None] | None = None,
) -> int:
    """Measure; draw if asked to, with the values as JSON beside the figure; print. Ranks without values are silent."""
    out = figure_path(args.out) if draw is not None and args.out is not None else None
    values = measure(args)
    if values is None:
        return 0
    if draw is not None and out is not None:
        draw(out, values)
        write_json(out.with_suffix(".json"), values)
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def experiment_of(spec: Spec, ranks: int, *, synthetic: bool) -> Experiment:
    """Read a spec's training manifest and plan it for so many ranks. Random clips (synthetic) fill one step.

    Raises UserError for a mistake in them.
    """
    if synthetic:
        return Experiment(spec, make_plan(spec, ranks, (spec.scale.gpus or ranks) * spec.scale.clips_per_gpu), None)
    dataset = Dataset.open(spec, "train")
    return Experiment(spec, make_plan(spec, ranks, len(dataset)), dataset)


@contextmanager
def open_place() -> Iterator[Place]:
    """Open the world of this launch for the block; rank 0 tells progress on stderr."""

    def tell(text: str) -> None:
        if world.rank == 0:
            print(text, file=sys.stderr, flush=True)

    with session(this_launch()) as world:
        yield Place(world, choose_device(world), tell)


def alone(why: str) -> None:
    """Raise MeasureError if several ranks were started."""
    if this_launch().size > 1:
        raise MeasureError(f"{this_launch().size} ranks were started: {why} alone")
