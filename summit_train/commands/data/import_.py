"""`summit-train data import KIND`: the files that a public data set comes with, read into a manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.commands.data.progress import followed
from summit_train.commands.data.reporting import SHOWN, write_left_out
from summit_train.data.manifest import ManifestError, ManifestRow, write_manifest
from summit_train.data.manifest.classes import check_beside, classes_beside, write_classes
from summit_train.data.manifest.importers import HMDB51_PARTS, KINDS, locate, read_annotations
from summit_train.data.video.source import MISSING, DecodeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "SOURCE:\n" + "\n".join(f"  {kind:<13} {what}" for kind, what in KINDS.items())
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the list of one split, see below")
    parser.add_argument("--root", type=Path, help="folder of the videos or of the folders of pictures [SOURCE's own]")
    parser.add_argument("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="the data set's list of labels")
    parser.add_argument("--split", type=int, default=1, metavar="N", help="hmdb51: which split [%(default)s]")
    parser.add_argument("--part", choices=HMDB51_PARTS, help="hmdb51: which part of it")


def run(args: argparse.Namespace) -> int:
    """Import and report; 0 when done, also where clips are missing."""
    beside = classes_beside(args.out)
    root = args.root or (args.source if args.source.is_dir() else args.source.parent)
    if not root.is_dir():
        raise ManifestError(f"{root}: no such folder")
    annotations = read_annotations(args.kind, args.source, args.labels, beside, args.split, args.part)
    check_beside(args.out, annotations.classes, args.source)
    found = list(followed(locate(annotations, str(root)), len(annotations.clips), "clips"))
    rows = [row for row in found if isinstance(row, ManifestRow)]
    left_out = [error for error in found if isinstance(error, DecodeError)]
    missing = sum(error.reason == MISSING for error in left_out)
    classes = annotations.classes
    print(f"{len(found):,} clips listed, {len(classes):,} classes: {len(rows):,} found, {missing:,} missing")
    for error in left_out[:SHOWN]:
        print(f"  {error}")
    write_left_out(args.out, left_out)
    if not rows:
        raise ManifestError(f"{root}: not one of the {len(found):,} clips is there: is --root right?")
    write_classes(args.out.parent, classes)
    write_manifest(args.out, rows)
    print(f"wrote {args.out}; its paths start at data.root={root}")
    print(f"next: summit-train data index {args.out} --root {root} --out INDEXED.csv")
    return 0
