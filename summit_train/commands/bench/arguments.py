"""What the benches share: options, numbers as text, the machine in a caption, the files of a figure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from summit_train.report.tables import machine_of
from summit_train.scaling.measure import MeasureError, Spread, positive

REPEATS, STEPS, WARM_UP = 5, 2, 2
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def add_repeats(parser: argparse.ArgumentParser) -> None:
    """The options that say how long to measure."""
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"measured turns [{REPEATS}]")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of a turn, their mean [{STEPS}]")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N", help=f"steps not counted [{WARM_UP}]")


def check_repeats(args: argparse.Namespace) -> None:
    """Raise MeasureError where one of these options is not above 0."""
    for option in ("repeats", "steps", "warm_up"):
        positive(getattr(args, option), f"--{option.replace('_', '-')}")


def add_peak(parser: argparse.ArgumentParser) -> None:
    """The option that takes the place of measuring the peak."""
    parser.add_argument("--peak", type=float, metavar="X", help="multiply-adds/s of a rank at best; 0: no utilisation")


def check_peak(args: argparse.Namespace) -> None:
    """Raise MeasureError for a peak that is no number of multiply-adds a second."""
    if args.peak is not None and not 0 <= args.peak < float("inf"):
        raise MeasureError(f"--peak {args.peak:g}: multiply-adds a second are wanted, or 0 for no utilisation")


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options that say where the result goes."""
    parser.add_argument("--out", metavar="FILE", help="draw it; the values go to FILE.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def machine_text(environment: Mapping[str, Any]) -> str:
    """The machine in a caption: host, processor, cores, threads of a rank, torch."""
    threads = environment["threads_per_rank"]
    without = ", without kernels" if str(environment.get("kernels", "")).startswith("none") else ""
    return f"{machine_of(environment)}, {counted(threads, 'thread')} a rank, torch {environment['torch']}{without}"


def as_spread(values: Mapping[str, float], form: str = ".3f") -> str:
    """A spread as it is in JSON, for people: median (min .. max)."""
    return Spread(**values).text(form)


def counted(number: int, noun: str) -> str:
    """1 clip, 2 clips."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def share(part: float) -> str:
    """0.123 as 12.3 %."""
    return f"{100 * part:.1f} %"


def with_unit(value: float, unit: str) -> str:
    """4 significant digits and a prefix by powers of 1000: 83.85 G multiply-adds/s."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.4g} {prefix}{'' if unit.startswith('B') else ' '}{unit}"
    return f"{value:.4g} {unit}"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Cells as columns: the first flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)
