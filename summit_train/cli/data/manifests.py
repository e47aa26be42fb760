"""`summit-train data motion`, `import`, `index`, `scan` and `split`: make and check lists of clips."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.cli.data.packs import num_workers
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import UserError
from summit_train.core.progress import followed
from summit_train.core.result import Result, TextTable, show
from summit_train.core.session import session
from summit_train.data.check import (
    Found,
    Journal,
    Listing,
    Summary,
    bad_clips,
    clip_frames,
    list_videos,
    summarise,
    survey,
    with_facts,
)
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.importers import HMDB51_PARTS, KINDS, Request, locate
from summit_train.data.manifest.quarantine import write_quarantine
from summit_train.data.manifest.reading import check_beside, classes_beside, write_classes
from summit_train.data.manifest.split import Splitting, split_manifest
from summit_train.data.motion import KINDS as MOTION_KINDS
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.data.video.source import MISSING, DecodeError
from summit_train.data.video.span import WHOLE

if TYPE_CHECKING:
    from summit_train.core.comm import World

_SHOWN = 20  # lines of each list on the screen; the file has them all


def _motion_arguments(parser: argparse.ArgumentParser) -> None:
    add, usual = parser.add_argument, MotionSet()
    add("out", metavar="OUT", type=Path, help="folder that gets videos/, train.csv and val.csv")
    add("--train", type=int, metavar="N", required=True, help="training videos")
    add("--val", type=int, metavar="N", required=True, help="validation videos")
    add("--size", type=int, default=usual.size, help="pixels of a side [%(default)s]")
    add("--frames", type=int, default=usual.num_frames, help="frames a video [%(default)s]")
    add("--classes", type=int, default=usual.num_classes, help="how many [%(default)s]")
    add("--seed", type=int, default=usual.seed, help="[%(default)s]")
    add("--kind", choices=MOTION_KINDS, default=usual.kind, help="what tells the classes [%(default)s]")
    add("--difficulty", type=float, default=usual.difficulty, help="0 to 1 [%(default)s]")


def _motion(args: argparse.Namespace) -> Result:
    videos = MotionSet(args.size, args.frames, args.classes, args.seed, args.kind, args.difficulty)
    total = args.train + args.val
    for _ in followed(write_motion_set(args.out, args.train, args.val, videos), total, "videos", in_logs=True):
        pass
    what = f"{total} videos of {videos.num_classes} classes: {', '.join(videos.classes)}"
    return Result([what, f"data.train={args.out / 'train.csv'} data.val={args.out / 'val.csv'} data.root={args.out}"])


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "SOURCE:\n" + "\n".join(f"  {kind:<13} {what}" for kind, (_, what) in KINDS.items())
    add = parser.add_argument
    add("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add("source", metavar="SOURCE", type=Path, help="the list of one split, see below")
    add("--root", type=Path, help="folder of the videos or of the folders of pictures [SOURCE's own]")
    add("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    add("--labels", type=Path, metavar="FILE", help="the data set's list of labels")
    add("--split", type=int, default=1, metavar="N", help="hmdb51: which split [%(default)s]")
    add("--part", choices=HMDB51_PARTS, help="hmdb51: which part of it")


def _import(args: argparse.Namespace) -> Result:
    request = Request(args.source, args.labels, classes_beside(args.out), args.split, args.part)
    root = args.root or (args.source if args.source.is_dir() else args.source.parent)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    annotations = KINDS[args.kind][0](request)
    check_beside(args.out, annotations.classes, args.source)
    found = list(followed(locate(annotations, str(root)), len(annotations.clips), "clips", in_logs=True))
    rows = [row for row in found if isinstance(row, ManifestRow)]
    left_out = [error for error in found if isinstance(error, DecodeError)]
    missing = sum(error.reason == MISSING for error in left_out)
    text = [
        f"{len(found):,} clips listed, {len(annotations.classes):,} classes: {len(rows):,} found, {missing:,} missing"
    ]
    text += [f"  {error}" for error in left_out[:_SHOWN]]
    nothing = f"{root}: contains none of the {len(found):,} clips; check --root"
    text += _write(args.out, rows, annotations.classes, root, left_out, text, nothing)
    return Result([*text, f"next: summit-train data index {args.out} --root {root} --out INDEXED.csv"])


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    add, what = parser.add_argument, "folder with a folder for each class, folder of videos (one class), or a manifest"
    add("source", metavar="SOURCE", type=Path, help=what)
    add("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    root = "only where SOURCE is a manifest: the folder where its paths start [its own folder]"
    add("--root", metavar="DIR", type=Path, help=root)
    add("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")
    add("--min-frames", type=int, default=1, metavar="N", help="leave out shorter ones [%(default)s]")


def _index(args: argparse.Namespace) -> Result:
    if args.root is not None and args.source.is_dir():
        raise UserError(f"--root must be left out where SOURCE is a folder, as paths start there; got {args.root}")
    with session(this_launch()) as world:
        listing = world.from_first(lambda: list_videos(args.source, args.root))
        # Before the work, not after it.
        world.from_first(lambda: check_beside(args.out, listing.classes, listing.root))
        paths = list(dict.fromkeys(row.path for row in listing.rows))
        found, journal = _survey(world, str(listing.root), paths, args.out, args.workers)
        if world.rank:
            return Result()
        summary = summarise([with_facts(row, found[row.path]) for row in listing.rows], args.min_frames)
        text = _index_text(listing, summary)
        nothing = f"{args.source}: contains no video that can be used"
        text += _write(args.out, summary.rows, listing.classes, listing.root, summary.left_out, text, nothing)
        journal.remove()
        return Result(text)


def _index_text(listing: Listing, summary: Summary) -> list[str | TextTable]:
    counts = Counter(int(row.label) for row in summary.rows)
    names = listing.classes or tuple(map(str, range(max(counts, default=-1) + 1)))
    rows = [(f"{label:>4}", name, f"{counts[label]:,}") for label, name in enumerate(names)]
    frames = sum(map(clip_frames, summary.rows))
    what = "clips" if any(row.span != WHOLE for row in summary.rows) else "videos"
    text: list[str | TextTable] = [TextTable(rows, left=2)] if rows else []
    text.append(f"{len(summary.rows):,} {what}, {frames:,} frames, {len(names)} classes")
    if listing.skipped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(listing.skipped.items()))
        text.append(f"no videos by their names: {kinds}")
    lists: dict[str, Sequence[object]] = {
        "missing": summary.missing,
        "left out, unreadable": summary.unreadable,
        "left out, too short": summary.short,
        "the same bytes as another": [f"{path} = {first}" for path, first in summary.copies],
    }
    for title, lines in lists.items():
        if lines:
            text += [f"{title}: {len(lines):,}", *(f"  {line}" for line in lines[:_SHOWN])]
        if len(lines) > _SHOWN:
            text.append(f"  ... and {len(lines) - _SHOWN:,} more")
    return text


def _survey(
    world: World, root: str, paths: Sequence[str], out: Path, workers: int | None
) -> tuple[dict[str, Found], Journal]:
    """Decode all files by all ranks; return the findings on rank 0 (elsewhere nothing) and the journal.

    Collective. Remove the journal once `out` is written. An interrupted survey for the same `out` is continued: files
    that have not changed since are not decoded again.
    """
    journal = Journal(out.with_name(f".{out.name}.journal"), root)
    known = journal.read(paths) if world.rank == 0 else {}
    if known:
        print(f"resumes: {len(known):,} of {len(paths):,} are decoded already", file=sys.stderr)
    left = world.broadcast([path for path in paths if path not in known])
    share = left[world.rank :: world.size]
    seen = followed(survey(root, share, num_workers(workers, world)), len(share), "videos", world, in_logs=True)
    for path, what in zip(share, seen, strict=True):
        journal.add(world.rank, path, what)
    world.barrier()
    return journal.read(paths) if world.rank == 0 else {}, journal


def _scan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", type=Path, help="manifest, or folder of class folders")
    add("--root", type=Path, help="where the manifest's paths start [its own folder]")
    add("--out", metavar="BAD.csv", type=Path, required=True, help="list for data.quarantine")
    add("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")


def _scan(args: argparse.Namespace) -> Result:
    classes_beside(args.out)  # before the work: is there a folder to write to?
    manifest = read_manifest(args.manifest)
    root = located_root(None if args.root is None else str(args.root), manifest)
    paths = list(dict.fromkeys(manifest.path(clip) for clip in range(len(manifest))))
    with session(this_launch()) as world:
        found, journal = _survey(world, root, paths, args.out, args.workers)
        if world.rank:
            return Result()
        bad = bad_clips(manifest, found)
        write_quarantine(args.out, bad)
        journal.remove()
    of = "" if len(paths) == len(manifest) else f" for {len(manifest):,} clips"
    text = [f"{len(paths):,} videos decoded{of}, {len(bad):,} bad"]
    for reason, count in Counter(error.reason for error in bad).most_common(_SHOWN):
        text.append(f"  {count:>6,}  {reason}")
    return Result([*text, f"wrote {args.out}" + (f"; train without them: data.quarantine={args.out}" if bad else "")])


def _split_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    add("out", metavar="OUT", type=Path, help="folder that gets fold1 .. foldN")
    add("--folds", type=int, metavar="N", required=True, help="fold k validates on part k of N")
    group = "what it matches in a file's name (its first parenthesis, if any) is never on both sides [each file]"
    add("--group", metavar="REGEX", help=group)
    add("--seed", type=int, default=0, help="of the shuffle [%(default)s]")
    add("--only", nargs="+", default=[], metavar="CLASS", help="take these classes; labels stay")
    both = "two classes instead: each clip as it is (forwards) and played backwards"
    add("--both-directions", action="store_true", help=both)


def _split(args: argparse.Namespace) -> Result:
    how = Splitting(args.folds, args.group, args.seed, tuple(args.only), args.both_directions)
    try:
        folds = split_manifest(args.manifest, args.out, how)
    except OSError as error:
        raise UserError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    rows = [["class", *(f"{fold.folder.name} train/val" for fold in folds)]]
    rows += [[name, *(f"{fold.train[name]:,}/{fold.val[name]:,}" for fold in folds)] for name in folds[0].train]
    text: list[str | TextTable] = [TextTable(rows)]
    for fold in folds:
        train, val = sum(fold.train.values()), sum(fold.val.values())
        text.append(f"{fold.folder}: {train:,} clips to train on, {val:,} to validate on")
    return Result([*text, f"their paths start where those of {args.manifest} do: give data.root"])


def _write(
    out: Path,
    rows: Sequence[ManifestRow],
    classes: tuple[str, ...] | None,
    root: Path,
    left_out: Sequence[DecodeError],
    text: Sequence[str | TextTable],
    nothing: str,
) -> list[str]:
    """Write a manifest, its classes and MANIFEST.left_out.csv; return what was written.

    If no row is left, shows `text` and raises UserError(nothing).
    """
    # The list first: where the manifest exists, the list does too.
    path = out.with_name(f"{out.stem}.left_out.csv")
    path.unlink(missing_ok=True)
    written = []
    if left_out:
        write_quarantine(path, left_out)
        written.append(f"wrote {path}: all {len(left_out):,} that are left out")
    if not rows:
        show(Result([*text, *written]))
        raise UserError(nothing)
    if classes is not None:
        write_classes(out.parent, classes)
    write_manifest(out, rows)
    return [*written, f"wrote {out}; its paths start at data.root={root}"]


PARTS = {
    "motion": (_motion_arguments, _motion, "write the embedded data set: the class is the motion"),
    "import": (_import_arguments, _import, "write a manifest from the files that a public data set comes with"),
    "index": (_index_arguments, _index, "decode every video and write a manifest of the whole ones"),
    "scan": (_scan_arguments, _scan, "decode every clip of a manifest and list the bad ones for data.quarantine"),
    "split": (_split_arguments, _split, "cut a manifest into training and validation by groups"),
}
