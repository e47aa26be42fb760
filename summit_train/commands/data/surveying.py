"""What `data index` and `data scan` share: all files decoded by all ranks, with a journal to go on from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.commands.data.progress import followed, num_cpus
from summit_train.data.journal import Journal
from summit_train.data.survey import Found, survey

if TYPE_CHECKING:
    from summit_train.comm import World


def surveyed(
    world: World, root: str, paths: Sequence[str], out: Path, workers: int | None
) -> tuple[dict[str, Found], Journal]:
    """What was found at each path, on rank 0 (elsewhere nothing), and the journal, to be removed when `out` is written.

    Collective. workers: processes of each rank that decode; None: its share of the node's CPUs. What an earlier call
    for the same `out` found is taken over where the file has not changed since.
    """
    journal = Journal(out.with_name(f".{out.name}.journal"), root)
    left = world.broadcast(_left(journal, paths) if world.rank == 0 else [])
    mine = left[world.rank :: world.size]
    if workers is None:
        workers = max(1, num_cpus() // world.local_size)
    found = survey(root, mine, max(0, workers))
    with journal.part(world.rank) as part:
        for path, what in zip(mine, followed(found, len(mine), "videos") if world.rank == 0 else found, strict=True):
            part.add(path, what)
    world.barrier()
    return journal.read(paths) if world.rank == 0 else {}, journal


def _left(journal: Journal, paths: Sequence[str]) -> list[str]:
    known = journal.read(paths)
    if known:
        print(f"goes on: {len(known):,} of {len(paths):,} were done before", file=sys.stderr)
    return [path for path in paths if path not in known]
