"""Numbers, columns and machines as text, for what commands print and for captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from summit_train.report.tables import machine_of

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(rows: Sequence[Sequence[str]], indent: str = "  ", left: int = 1) -> str:
    """Align cells in columns: the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Write 1 clip, 2 clips."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def share(part: float) -> str:
    """Write 0.123 as 12.3 %."""
    return f"{100 * part:.1f} %"


def with_unit(value: float, unit: str) -> str:
    """Write 4 significant digits and a prefix by powers of 1000: 83.85 G multiply-adds/s."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.4g} {prefix}{'' if unit.startswith('B') else ' '}{unit}"
    return f"{value:.4g} {unit}"


def machine_text(environment: Mapping[str, Any]) -> str:
    """Write the machine for a caption: host, processor, cores, threads of a rank, torch."""
    threads = environment["threads_per_rank"]
    without = ", without kernels" if str(environment.get("kernels", "")).startswith("none") else ""
    return f"{machine_of(environment)}, {counted(threads, 'thread')} a rank, torch {environment['torch']}{without}"
