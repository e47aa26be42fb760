"""`summit-train data split`: a manifest cut into folds by groups."""

from __future__ import annotations

import argparse
from pathlib import Path

from summit_train.data.split import split_manifest
from summit_train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that gets fold1 .. foldN")
    parser.add_argument("--folds", type=int, metavar="N", required=True, help="fold k validates on part k of N")
    parser.add_argument(
        "--group",
        metavar="REGEX",
        required=True,
        help="what it matches in a file's name (its first parenthesis, if any) is never on both sides",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="CLASS", help="take these classes; labels stay")
    parser.add_argument(
        "--both-directions",
        action="store_true",
        help="two classes instead: each clip as it is (forwards) and played backwards",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folds; 0 when done."""
    try:
        sizes = split_manifest(
            args.manifest,
            args.out,
            folds=args.folds,
            group=args.group,
            only=args.only,
            both_directions=args.both_directions,
        )
    except OSError as error:
        raise UserError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    for number, (train, val) in enumerate(sizes, 1):
        print(f"{args.out / f'fold{number}'}: {train:,} clips to train on, {val:,} to validate on")
    print(f"their paths start where those of {args.manifest} do: give data.root")
    return 0
