"""Progress of long work, on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
_PLAIN_EVERY_SECONDS = 10.0


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def followed(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield the items and show progress on stderr: a bar on a terminal, a line every ten seconds elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _followed_plainly(items, total, what)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)


def _followed_plainly(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    start = last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= _PLAIN_EVERY_SECONDS:
            last = now
            left = (now - start) / count * (total - count)
            print(f"{count}/{total} {what}, {left:.0f} s left", file=sys.stderr, flush=True)
