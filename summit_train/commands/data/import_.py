"""`summit-train data import KIND`: the files that a public data set comes with, read into a manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.commands.data.progress import followed
from summit_train.data.importers import hmdb51, kinetics, plain, twenty_bn, ucf101
from summit_train.data.importers.annotations import Annotations, locate
from summit_train.data.manifest import CLASSES_FILE, ManifestError, ManifestRow, read_classes, write_manifest
from summit_train.data.quarantine import write_quarantine
from summit_train.data.survey import MISSING
from summit_train.data.video import DecodeError
from summit_train.files import write_text

# KIND -> what SOURCE is
_KINDS = {
    "kinetics": "CSV of Kinetics-400, -600 or -700: label,youtube_id,time_start,time_end,split",
    "ucf101": "trainlist01.txt or testlist01.txt; --labels classInd.txt [beside it]",
    "hmdb51": "folder of CLASS_test_split1.txt; --split and --part",
    "something_v1": "CSV ID;label; --labels something-something-v1-labels.csv",
    "something_v2": "JSON; --labels something-something-v2-labels.json",
    "jester": "CSV ID;label; --labels jester-v1-labels.csv",
    "folders": "folder with a folder for each class, of videos or of folders of pictures",
    "list": "lines `path label` or `path num_frames label`",
}
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "SOURCE:\n" + "\n".join(f"  {kind:<13} {what}" for kind, what in _KINDS.items())
    parser.add_argument("kind", choices=_KINDS, metavar="KIND", help=", ".join(_KINDS))
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the list of one split, see below")
    parser.add_argument("--root", type=Path, help="folder of the videos or of the folders of pictures [SOURCE's own]")
    parser.add_argument("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="the data set's list of labels")
    parser.add_argument("--split", type=int, default=1, metavar="N", help="hmdb51: which split [%(default)s]")
    parser.add_argument("--part", choices=hmdb51.PARTS, help="hmdb51: which part of it")


def run(args: argparse.Namespace) -> int:
    """Import and report; 0 when done, also where clips are missing."""
    if not args.out.parent.is_dir():
        raise ManifestError(f"{args.out.parent}: no such folder; make it first")
    root = args.root or (args.source if args.source.is_dir() else args.source.parent)
    if not root.is_dir():
        raise ManifestError(f"{root}: no such folder")
    beside = read_classes(args.out.parent / CLASSES_FILE)
    annotations = _read(args, beside)
    if beside is not None and beside != annotations.classes:
        raise ManifestError(
            f"{args.out.parent / CLASSES_FILE}: has other classes than {args.source}; write to another folder"
        )
    found = list(followed(locate(annotations, str(root)), len(annotations.clips), "clips"))
    _write(args.out, root, annotations.classes, found)
    return 0


def _read(args: argparse.Namespace, beside: tuple[str, ...] | None) -> Annotations:
    """The source as its kind is read; `beside` are the classes of the other split, imported before."""
    match args.kind:
        case "kinetics":
            return kinetics.read(args.source, beside)
        case "ucf101":
            return ucf101.read(args.source, args.labels)
        case "hmdb51":
            if args.part is None:
                raise ManifestError(f"{args.source}: say --part train or --part test")
            return hmdb51.read(args.source, args.split, args.part)
        case "something_v2":
            return twenty_bn.read_json(args.source, args.labels)
        case "folders":
            return plain.read_folders(args.source)
        case "list":
            return plain.read_list(args.source, beside)
    return twenty_bn.read_csv(args.source, args.labels)


def _write(out: Path, root: Path, classes: tuple[str, ...], found: list[ManifestRow | DecodeError]) -> None:
    rows = [row for row in found if isinstance(row, ManifestRow)]
    left_out = [error for error in found if isinstance(error, DecodeError)]
    missing = sum(error.reason == MISSING for error in left_out)
    print(f"{len(found):,} clips listed, {len(classes):,} classes: {len(rows):,} found, {missing:,} missing")
    beside = out.with_name(f"{out.stem}.left_out.csv")
    beside.unlink(missing_ok=True)
    if left_out:
        for error in left_out[:_SHOWN]:
            print(f"  {error}")
        write_quarantine(beside, left_out)
        print(f"wrote {beside}: all {len(left_out):,} that are left out")
    if not rows:
        raise ManifestError(f"{root}: not one of the {len(found):,} clips is there: is --root right?")
    write_text(out.parent / CLASSES_FILE, "".join(f"{name}\n" for name in classes))
    write_manifest(out, rows)
    print(f"wrote {out}; its paths start at data.root={root}")
    print(f"next: summit-train data index {out} --root {root} --out INDEXED.csv")
