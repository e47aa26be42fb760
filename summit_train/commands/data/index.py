"""`summit-train data index`: every video decoded, the whole ones written to a manifest."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from summit_train.commands.data.ranks import surveyed
from summit_train.commands.data.reporting import show, write_left_out
from summit_train.commands.ranks import session, this_launch
from summit_train.data.check.index import Listing, Summary, list_videos, summarise, with_facts
from summit_train.data.manifest import ManifestError, write_manifest
from summit_train.data.manifest.classes import check_beside, write_classes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        metavar="ROOT",
        type=Path,
        help="folder with a folder for each class, folder of videos (one class), or a manifest",
    )
    parser.add_argument("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    parser.add_argument("--root", type=Path, help="where a manifest's paths start [its own folder]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")
    parser.add_argument("--min-frames", type=int, default=1, metavar="N", help="leave out shorter ones [%(default)s]")


def run(args: argparse.Namespace) -> int:
    """Index and report; 0 when done."""
    with session(this_launch()) as world:
        listing = world.broadcast(list_videos(args.source, args.root) if world.rank == 0 else None)
        assert listing is not None
        if world.rank == 0:
            check_beside(args.out, listing.classes, listing.root)  # before the work, not after it
        paths = list(dict.fromkeys(row.path for row in listing.rows))
        found, journal = surveyed(world, str(listing.root), paths, args.out, args.workers)
        if world.rank == 0:
            summary = summarise([with_facts(row, found[row.path]) for row in listing.rows], args.min_frames)
            _report(listing, summary)
            _write(args, listing, summary)
            journal.remove()
    return 0


def _write(args: argparse.Namespace, listing: Listing, summary: Summary) -> None:
    # The list of what is left out first: where the manifest exists, the list does too.
    write_left_out(args.out, summary.left_out)
    if not summary.rows:
        raise ManifestError(f"{args.source}: not one video in it can be used")
    if listing.classes is not None:
        write_classes(args.out.parent, listing.classes)
    write_manifest(args.out, summary.rows)
    print(f"wrote {args.out}; its paths start at data.root={listing.root}")


def _report(listing: Listing, summary: Summary) -> None:
    counts = Counter(int(row.label) for row in summary.rows)
    names = listing.classes or tuple(map(str, range(max(counts, default=-1) + 1)))
    width = max(map(len, names), default=0)
    for label, name in enumerate(names):
        print(f"{label:>4} {name:<{width}} {counts[label]:>8,}")
    frames = sum(row.num_frames or 0 for row in summary.rows)
    print(f"{len(summary.rows):,} videos, {frames:,} frames, {len(names)} classes")
    if listing.skipped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(listing.skipped.items()))
        print(f"no videos by their names: {kinds}")
    show("missing", summary.missing)
    show("left out, unreadable", summary.unreadable)
    show("left out, too short", summary.short)
    show("the same bytes as another", [f"{path} = {first}" for path, first in summary.copies])
