"""`summit-train data scan`: every clip of a manifest decoded in full, and a list of those that are no good."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from summit_train.commands.data.ranks import surveyed
from summit_train.commands.ranks import session, this_launch
from summit_train.data.check.index import bad_clips
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.classes import classes_beside
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.quarantine import write_quarantine
from summit_train.data.video.source import DecodeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("manifest", metavar="MANIFEST", type=Path, help="manifest, or folder of class folders")
    parser.add_argument("--root", type=Path, help="where the manifest's paths start [its own folder]")
    parser.add_argument("--out", metavar="BAD.csv", type=Path, required=True, help="list for data.quarantine")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")


def run(args: argparse.Namespace) -> int:
    """Scan and write the list; 0 when done, whatever was found."""
    classes_beside(args.out)  # before the work: is there a folder to write to?
    manifest = read_manifest(args.manifest)
    root = located_root(None if args.root is None else str(args.root), manifest)
    paths = list(dict.fromkeys(manifest.path(clip) for clip in range(len(manifest))))
    with session(this_launch()) as world:
        found, journal = surveyed(world, root, paths, args.out, args.workers)
        if world.rank == 0:
            bad = bad_clips(manifest, found)
            write_quarantine(args.out, bad)
            journal.remove()
            _report(args.out, len(paths), bad)
    return 0


def _report(out: Path, num_paths: int, bad: list[DecodeError]) -> None:
    """Print how many are bad, and the reasons, the most frequent first."""
    print(f"{num_paths:,} clips decoded, {len(bad):,} bad")
    for reason, count in Counter(error.reason for error in bad).most_common(20):
        print(f"  {count:>6,}  {reason}")
    print(f"wrote {out}" + (f"; train without them: data.quarantine={out}" if bad else ""))
