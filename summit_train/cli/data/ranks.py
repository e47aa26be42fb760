"""Work that a data command shares among its ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.machine import num_cpus
from summit_train.core.progress import followed
from summit_train.data.check import Found, Journal, survey

if TYPE_CHECKING:
    from summit_train.core.comm import World


def num_workers(asked: int | None, world: World) -> int:
    """Return the worker processes of each rank: as asked, or its share of the node's CPUs."""
    return max(1, num_cpus() // world.local_size) if asked is None else max(0, asked)


def surveyed(
    world: World, root: str, paths: Sequence[str], out: Path, workers: int | None
) -> tuple[dict[str, Found], Journal]:
    """Decode all files by all ranks; return the findings on rank 0 (elsewhere nothing) and the journal.

    Collective. Remove the journal once `out` is written. An interrupted survey for the same `out` is continued: files
    that have not changed since are not decoded again.
    """
    journal = Journal(out.with_name(f".{out.name}.journal"), root)
    known = journal.read(paths) if world.rank == 0 else {}
    if known:
        print(f"goes on: {len(known):,} of {len(paths):,} were done before", file=sys.stderr)
    left = world.broadcast([path for path in paths if path not in known])
    mine = left[world.rank :: world.size]
    seen = followed(survey(root, mine, num_workers(workers, world)), len(mine), "videos", world, in_logs=True)
    for path, what in zip(mine, seen, strict=True):
        journal.add(world.rank, path, what)
    world.barrier()
    return journal.read(paths) if world.rank == 0 else {}, journal
