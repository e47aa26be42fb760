"""Work that a data command shares among its ranks, and its progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from summit_train.data.check import Found, Journal, survey

if TYPE_CHECKING:
    from summit_train.comm import World

Item = TypeVar("Item")
_PLAIN_EVERY_SECONDS = 10.0


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def followed(items: Iterable[Item], total: int, what: str, world: World | None = None) -> Iterator[Item]:
    """Yield the items and show progress as `shown` does."""
    with shown(total, what, world) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def shown(total: int, what: str, world: World | None = None) -> Iterator[Callable[[], None]]:
    """Show progress on stderr within the block: a bar on a terminal, a line every ten seconds elsewhere.

    Yield what is to be called after each of the `total` items. Of several ranks, rank 0 shows its own progress.
    """
    if world is not None and world.size > 1:
        what = f"{what} of rank 0 of {world.size}"
    console = Console(stderr=True)
    if world is not None and world.rank:
        yield lambda: None
    elif console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)
    else:
        yield _Lines(total, what).advance


class _Lines:
    """Prints the number of items that are done and the seconds left, at most every ten seconds."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._count = total, what, 0
        self._start = self._last = time.monotonic()

    def advance(self) -> None:
        """Count one more."""
        self._count += 1
        now = time.monotonic()
        if now - self._last >= _PLAIN_EVERY_SECONDS:
            self._last = now
            left = (now - self._start) / self._count * (self._total - self._count)
            print(f"{self._count}/{self._total} {self._what}, {left:.0f} s left", file=sys.stderr, flush=True)


def num_workers(asked: int | None, world: World, least: int) -> int:
    """Return the worker processes of each rank: as asked, or its share of the node's CPUs."""
    return max(1, num_cpus() // world.local_size) if asked is None else max(least, asked)


def surveyed(
    world: World, root: str, paths: Sequence[str], out: Path, workers: int | None
) -> tuple[dict[str, Found], Journal]:
    """Decode all files by all ranks; return the findings on rank 0 (elsewhere nothing) and the journal.

    Collective. The journal is to be removed when `out` is written. An interrupted survey for the same `out` is
    continued: files that have not changed since are not decoded again.
    """
    journal = Journal(out.with_name(f".{out.name}.journal"), root)
    known = journal.read(paths) if world.rank == 0 else {}
    if known:
        print(f"goes on: {len(known):,} of {len(paths):,} were done before", file=sys.stderr)
    left = world.broadcast([path for path in paths if path not in known])
    mine = left[world.rank :: world.size]
    found = survey(root, mine, num_workers(workers, world, least=0))
    for path, what in zip(mine, followed(found, len(mine), "videos", world), strict=True):
        journal.add(world.rank, path, what)
    world.barrier()
    return journal.read(paths) if world.rank == 0 else {}, journal
