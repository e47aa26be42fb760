"""`summit-train data verify`: every byte of a packed set against its record."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from summit_train.commands.data.progress import followed
from summit_train.commands.data.ranks import num_workers
from summit_train.commands.data.sizes import size_text
from summit_train.commands.ranks import session, this_launch
from summit_train.data.packed.format import Pack, PackError, read_pack
from summit_train.data.packed.verify import stray_files, verify_files
from summit_train.errors import RunFailed


class DamagedError(RunFailed):
    """A packed set is not what was packed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of a packed set")
    parser.add_argument("--workers", type=int, metavar="N", help="files of each rank read at a time [one a CPU]")


def run(args: argparse.Namespace) -> int:
    """Verify; return 0 when every byte is as it was packed. Raises DamagedError where one is not."""
    if not args.out.is_dir():
        raise PackError(f"{args.out}: no such folder")
    try:
        pack = read_pack(args.out)
    except PackError as error:
        raise DamagedError(str(error)) from error
    files = pack.every_file
    with session(this_launch()) as world:
        workers = num_workers(args.workers, world, least=1)
        mine = files[world.rank :: world.size]
        checked = verify_files(args.out, pack, mine, workers)
        what = "files" if world.size == 1 else f"files of rank 0 of {world.size}"
        lines = list(chain.from_iterable(followed(checked, len(mine), what) if world.rank == 0 else checked))
        everyone = world.gather(lines)
        if everyone is not None:
            _report(args.out, pack, [*chain.from_iterable(everyone), *stray_files(args.out, pack)])
    return 0


def _report(folder: Path, pack: Pack, found: list[str]) -> None:
    if found:
        raise DamagedError("\n".join([f"{folder}: {len(found)} of its files are not as they were packed:", *found]))
    size = size_text(sum(file.size for file in pack.every_file))
    print(f"{folder}: {pack.clips:,} clips in {len(pack.every_file):,} files, {size}: every byte is as it was packed")
