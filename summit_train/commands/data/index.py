"""`summit-train data index`: every video decoded, the whole ones written to a manifest."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from summit_train.commands.data.progress import followed, num_cpus
from summit_train.data.index import Listing, index_videos, list_videos
from summit_train.data.manifest import CLASSES_FILE, ManifestError, ManifestRow, read_classes, write_manifest
from summit_train.data.video import DecodeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "source",
        metavar="ROOT",
        type=Path,
        help="folder with a folder for each class, folder of videos (one class), or a manifest",
    )
    parser.add_argument("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    parser.add_argument("--root", type=Path, help="where a manifest's paths start [its own folder]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that decode [one a CPU]")


def run(args: argparse.Namespace) -> int:
    """Index and report; 0 when done."""
    listing = list_videos(args.source, args.root)
    _check_classes(listing, args.out)
    workers = num_cpus() if args.workers is None else max(0, args.workers)
    found = list(followed(index_videos(listing, workers), len(listing.rows), "videos"))
    rows = [row for row in found if isinstance(row, ManifestRow)]
    _report(listing, rows, [error for error in found if isinstance(error, DecodeError)])
    if not rows:
        raise ManifestError(f"{args.source}: not one video in it can be used")
    if listing.classes is not None:
        (args.out.parent / CLASSES_FILE).write_text("".join(f"{name}\n" for name in listing.classes))
    write_manifest(args.out, rows)
    print(f"wrote {args.out}; its paths start at data.root={listing.root}")
    return 0


def _check_classes(listing: Listing, out: Path) -> None:
    """Raise before the work, not after it: where the manifest cannot be written or would be misread."""
    if not out.parent.is_dir():
        raise ManifestError(f"{out.parent}: no such folder; make it first")
    present = read_classes(out.parent / CLASSES_FILE)
    if present is not None and present != listing.classes:
        raise ManifestError(
            f"{out.parent / CLASSES_FILE}: has other classes than {listing.root}; write to another folder"
        )


def _report(listing: Listing, rows: list[ManifestRow], bad: list[DecodeError]) -> None:
    counts = Counter(int(row.label) for row in rows)
    names = listing.classes or tuple(map(str, range(max(counts, default=-1) + 1)))
    width = max(map(len, names), default=0)
    for label, name in enumerate(names):
        print(f"{label:>4} {name:<{width}} {counts[label]:>8,}")
    frames = sum(row.num_frames or 0 for row in rows)
    print(f"{len(rows):,} videos, {frames:,} frames, {len(names)} classes")
    if listing.skipped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(listing.skipped.items()))
        print(f"no videos by their names: {kinds}")
    if bad:
        print(f"left out, {len(bad)} that cannot be used:")
    for error in bad:
        print(f"  {error}")
