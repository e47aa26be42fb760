"""`summit-train data`: make the embedded data set, index a folder of videos, split a manifest."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from summit_train.data.decode import DecodeError
from summit_train.data.index import Listing, index_videos, list_videos
from summit_train.data.manifest import CLASSES_FILE, ManifestError, ManifestRow, read_classes, write_manifest
from summit_train.data.motion import KINDS, MotionSet, write_motion_set
from summit_train.data.split import split_manifest

Item = TypeVar("Item")
_PLAIN_EVERY_SECONDS = 10.0


class DiskError(RuntimeError):
    """The disk is full or broken: no fault of the input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    _add_motion(commands.add_parser("motion", help="write the embedded data set: the class is the motion"))
    _add_index(commands.add_parser("index", help="decode every video and write a manifest of the whole ones"))
    _add_split(commands.add_parser("split", help="cut a manifest into training and validation by groups"))


def run(args: argparse.Namespace) -> int:
    """Run the chosen part. Raises ValueError for what cannot be done, DiskError for a disk that gives up."""
    try:
        return int(args.run_part(args))
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise DiskError(message) from error
        raise ManifestError(message) from error


def _add_motion(parser: argparse.ArgumentParser) -> None:
    usual = MotionSet()
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder that gets videos/, train.csv and val.csv"
    )
    parser.add_argument("--train", type=int, metavar="N", required=True, help="training videos")
    parser.add_argument("--val", type=int, metavar="N", required=True, help="validation videos")
    parser.add_argument("--size", type=int, default=usual.size, help="pixels of a side [%(default)s]")
    parser.add_argument("--frames", type=int, default=usual.num_frames, help="frames a video [%(default)s]")
    parser.add_argument("--classes", type=int, default=usual.num_classes, help="how many [%(default)s]")
    parser.add_argument("--seed", type=int, default=usual.seed, help="[%(default)s]")
    parser.add_argument(
        "--kind", choices=KINDS, default=usual.kind, help="what tells the classes [%(default)s]"
    )
    parser.add_argument("--difficulty", type=float, default=usual.difficulty, help="0 to 1 [%(default)s]")
    parser.set_defaults(run_part=_motion)


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="ROOT",
        type=Path,
        help="folder with a folder for each class, folder of videos (one class), or a manifest",
    )
    parser.add_argument("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    parser.add_argument("--root", type=Path, help="where a manifest's paths start [its own folder]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that decode [one a CPU]")
    parser.set_defaults(run_part=_index)


def _add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that gets fold1 .. foldN")
    parser.add_argument(
        "--folds", type=int, metavar="N", required=True, help="fold k validates on part k of N"
    )
    parser.add_argument(
        "--group",
        metavar="REGEX",
        required=True,
        help="what it matches in a file's name (its first parenthesis, if any) is never on both sides",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CLASS", help="take these classes; labels stay"
    )
    parser.add_argument(
        "--both-directions",
        action="store_true",
        help="two classes instead: each clip as it is (forwards) and played backwards",
    )
    parser.set_defaults(run_part=_split)


def _motion(args: argparse.Namespace) -> int:
    videos = MotionSet(args.size, args.frames, args.classes, args.seed, args.kind, args.difficulty)
    total = args.train + args.val
    rows = list(_followed(write_motion_set(args.out, args.train, args.val, videos), total, "videos"))
    print(f"{len(rows)} videos of {videos.num_classes} classes: {', '.join(videos.classes)}")
    print(f"data.train={args.out / 'train.csv'} data.val={args.out / 'val.csv'} data.root={args.out}")
    return 0


def _index(args: argparse.Namespace) -> int:
    listing = list_videos(args.source, args.root)
    _check_classes(listing, args.out)
    workers = _num_cpus() if args.workers is None else max(0, args.workers)
    found = list(_followed(index_videos(listing, workers), len(listing.rows), "videos"))
    rows = [row for row in found if isinstance(row, ManifestRow)]
    _report(listing, rows, [error for error in found if isinstance(error, DecodeError)])
    if not rows:
        raise ManifestError(f"{args.source}: not one video in it can be used")
    if listing.classes is not None:
        (args.out.parent / CLASSES_FILE).write_text("".join(f"{name}\n" for name in listing.classes))
    write_manifest(args.out, rows)
    print(f"wrote {args.out}; its paths start at data.root={listing.root}")
    return 0


def _split(args: argparse.Namespace) -> int:
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
        raise ValueError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    for number, (train, val) in enumerate(sizes, 1):
        print(f"{args.out / f'fold{number}'}: {train:,} clips to train on, {val:,} to validate on")
    print(f"their paths start where those of {args.manifest} do: give data.root")
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


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _followed(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Pass items on and show on stderr how far it is: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _followed_plainly(items, total, what)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)


def _followed_plainly(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    start = last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= _PLAIN_EVERY_SECONDS:
            last = now
            left = (now - start) / count * (total - count)
            print(f"{count}/{total} {what}, {left:.0f} s left", file=sys.stderr, flush=True)
