"""`summit-train data stage`: a packed set copied to the disk of the node that this runs on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from summit_train.commands.data.progress import followed
from summit_train.commands.data.sizes import parse_size, size_text
from summit_train.data.packed.stage import Staging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("packed", metavar="OUT", type=Path, help="folder of a packed set")
    parser.add_argument(
        "dest", metavar="DEST", type=Path, help="folder on the node's disk; the copy gets one of its own in it"
    )
    parser.add_argument("--limit", type=parse_size, metavar="SIZE", help="take at most this [what the disk has]")


def run(args: argparse.Namespace) -> int:
    """Stage; return 0 also where a disk that is full or missing takes only a part, with one warning.

    Of several processes on a node the first copies and the others wait, by a lock on the disk.
    """
    staging = Staging(args.packed, args.dest, max_bytes=args.limit)
    for _ in followed(staging.work(), staging.num_files, "files"):
        pass
    done = staging.result
    print(f"{staging.folder}: {size_text(done.copied)} copied and checked, {size_text(done.present)} were there")
    if done.warning:
        print(f"warning: {done.warning}", file=sys.stderr)
    print(f"read it with data.stage={args.dest} data.train={args.packed}")
    return 0
