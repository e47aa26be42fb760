"""`summit-train data split`: a manifest cut into folds by groups."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.data.manifest import ManifestError
from summit_train.data.manifest.split import Splitting, split_manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that gets fold1 .. foldN")
    parser.add_argument("--folds", type=int, metavar="N", required=True, help="fold k validates on part k of N")
    parser.add_argument(
        "--group",
        metavar="REGEX",
        help="what it matches in a file's name (its first parenthesis, if any) is never on both sides [each file]",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle [%(default)s]")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLASS", help="take these classes; labels stay")
    parser.add_argument(
        "--both-directions",
        action="store_true",
        help="two classes instead: each clip as it is (forwards) and played backwards",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folds and print the clips of each class and part; 0 when done."""
    how = Splitting(args.folds, args.group, args.seed, tuple(args.only), args.both_directions)
    try:
        folds = split_manifest(args.manifest, args.out, how)
    except OSError as error:
        raise ManifestError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    columns = [f"{fold.folder.name} train/val" for fold in folds]
    width = max(map(len, ("class", *folds[0].train)))
    print(f"{'class':<{width}}  {'  '.join(columns)}")
    for name in folds[0].train:
        cells = (
            f"{f'{fold.train[name]:,}/{fold.val[name]:,}':>{len(c)}}" for fold, c in zip(folds, columns, strict=True)
        )
        print(f"{name:<{width}}  {'  '.join(cells)}")
    for fold in folds:
        train, val = sum(fold.train.values()), sum(fold.val.values())
        print(f"{fold.folder}: {train:,} clips to train on, {val:,} to validate on")
    print(f"their paths start where those of {args.manifest} do: give data.root")
    return 0
