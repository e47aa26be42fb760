"""`summit-train data scan`: every clip of a manifest decoded in full, and a list of those that are no good."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from summit_train.commands.data.ranks import joined_ranks
from summit_train.commands.data.surveying import surveyed
from summit_train.data.index import compare
from summit_train.data.manifest import Manifest, ManifestError, read_manifest
from summit_train.data.quarantine import write_quarantine
from summit_train.data.store import located_root
from summit_train.data.survey import Found
from summit_train.data.video import DecodeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("manifest", metavar="MANIFEST", type=Path, help="manifest, or folder of class folders")
    parser.add_argument("--root", type=Path, help="where the manifest's paths start [its own folder]")
    parser.add_argument("--out", metavar="BAD.csv", type=Path, required=True, help="list for data.quarantine")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")


def run(args: argparse.Namespace) -> int:
    """Scan and write the list; 0 when done, whatever was found."""
    if not args.out.parent.is_dir():
        raise ManifestError(f"{args.out.parent}: no such folder; make it first")
    manifest = read_manifest(args.manifest)
    root = located_root(None if args.root is None else str(args.root), manifest)
    paths = list(dict.fromkeys(manifest.path(clip) for clip in range(len(manifest))))
    with joined_ranks() as world:
        found, journal = surveyed(world, root, paths, args.out, args.workers)
        if world.rank == 0:
            bad = _bad(manifest, found)
            write_quarantine(args.out, bad)
            journal.remove()
            _report(args.out, len(paths), bad)
    return 0


def _bad(manifest: Manifest, found: dict[str, Found]) -> list[DecodeError]:
    reasons = dict[str, DecodeError]()
    for clip in range(len(manifest)):
        error = compare(manifest, clip, found[manifest.path(clip)])
        if error is not None:
            reasons.setdefault(error.path, error)
    return list(reasons.values())


def _report(out: Path, num_paths: int, bad: list[DecodeError]) -> None:
    """How many are bad, and the reasons, the most frequent first."""
    print(f"{num_paths:,} clips decoded, {len(bad):,} bad")
    for reason, count in Counter(error.reason for error in bad).most_common(20):
        print(f"  {count:>6,}  {reason}")
    print(f"wrote {out}" + (f"; train without them: data.quarantine={out}" if bad else ""))
