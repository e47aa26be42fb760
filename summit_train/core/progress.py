"""The progress of long work on stderr, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from summit_train.core.result import tell

if TYPE_CHECKING:
    from summit_train.core.comm import World
    from summit_train.core.watch import Watchdog

Item = TypeVar("Item")
Show = Callable[[int, int], None]  # (done, of how many)
_PLAIN_EVERY_SECONDS = 10.0


def followed(
    items: Iterable[Item], total: int, what: str, world: World | None = None, *, in_logs: bool = False
) -> Iterator[Item]:
    """Yield the `total` items and show progress as `shown` does."""
    with shown(what, world, in_logs=in_logs) as show:
        show(0, total)
        for done, item in enumerate(items, 1):
            yield item
            show(done, total)


@contextmanager
def watched(what: str, doing: str, world: World, watchdog: Watchdog) -> Iterator[Show]:
    """Show progress as `shown` does, and tell the watchdog of each item: `doing` 2 of 8."""
    with shown(what, world) as show:

        def progress(done: int, total: int) -> None:
            watchdog.at(f"{doing} {done} of {total}", waits=done == total)
            show(done, total)

        yield progress


@contextmanager
def shown(what: str, world: World | None = None, *, in_logs: bool = False) -> Iterator[Show]:
    """Show progress within the block where stderr is a terminal: a bar. Of several ranks, rank 0 shows its own.

    Yield what is to be called after each item. in_logs: elsewhere print a line every ten seconds, for work of hours.
    """
    if world is not None and world.size > 1:
        what = f"{what} of rank 0 of {world.size}"
    console = Console(stderr=True)
    is_first = world is None or world.rank == 0
    if is_first and console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    elif is_first and in_logs:
        start = last = time.monotonic()

        def print_line(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done and now - last >= _PLAIN_EVERY_SECONDS:
                last = now
                left = (now - start) / done * (total - done)
                tell(f"{done}/{total} {what}, {left:.0f} s left")

        yield print_line
    else:
        yield lambda done, total: None
