"""`summit-train data WHAT`: make, import, index, split, check, show, pack and stage data sets."""

from __future__ import annotations

import argparse
import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.cli import compare, data_pack, data_show
from summit_train.cli.data_pack import SHOWN, num_workers
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, write_text
from summit_train.core.progress import followed
from summit_train.core.result import Result, TextTable, show, tell
from summit_train.core.session import session
from summit_train.core.text import counted, csv_text
from summit_train.data import check
from summit_train.data.manifest import ManifestRow, read_classes, write_manifest
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.importers import HMDB51_PARTS, KINDS, Request
from summit_train.data.manifest.reading import PACK_FILE, check_beside, write_classes
from summit_train.data.manifest.split import split_manifest
from summit_train.data.manifest.tables import CLASSES_FILE, skipped_text
from summit_train.data.motion import KINDS as MOTION_KINDS
from summit_train.data.motion import SPLITS, MotionSet, write_motion_set
from summit_train.data.video.source import MISSING, DecodeError
from summit_train.data.video.span import WHOLE

if TYPE_CHECKING:
    from summit_train.core.comm import World

Text = list[str | TextTable]
Findings = dict[str, check.Finding]  # by path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (add_part_arguments, run_part, help_text) in PARTS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_part_arguments(command)
        command.set_defaults(run_part=run_part)


def run(args: argparse.Namespace) -> Result:
    """Run the chosen part. Raises UserError for what cannot be done, RunFailed for a disk that is full or broken."""
    try:
        result: Result = args.run_part(args)
        return result
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise RunFailed(message) from error
        raise UserError(message) from error


# Lists of clips.


def _motion_arguments(parser: argparse.ArgumentParser) -> None:
    from summit_train.tasks.detection.moving_objects import MovingObjects

    add = parser.add_argument
    usual = MotionSet()
    add("out", metavar="OUT", type=Path, help="folder that gets videos/, train.csv and val.csv")
    add("--train", type=int, metavar="N", required=True, help="training videos")
    add("--val", type=int, metavar="N", required=True, help="validation videos")
    about = "for detection: moving shapes with their boxes and tracks"
    add("--boxes", dest="videos", action="store_const", const=MovingObjects, default=MotionSet, help=about)
    add("--size", type=int, help=f"pixels of a side [{usual.size}, with --boxes {MovingObjects.size}]")
    add("--frames", type=int, help=f"frames a video [{usual.num_frames}, with --boxes {MovingObjects.num_frames}]")
    add("--classes", type=int, default=usual.num_classes, help="how many [%(default)s]")
    add("--seed", type=int, default=usual.seed, help="[%(default)s]")
    add("--kind", choices=MOTION_KINDS, help=f"what tells the classes [{usual.kind}]")
    add("--difficulty", type=float, default=usual.difficulty, help="0 to 1 [%(default)s]")


def _motion(args: argparse.Namespace) -> Result:
    if args.videos is not MotionSet and args.kind is not None:
        raise UserError(f"--kind must be left out with --boxes, whose set has its own classes; got {args.kind}")
    given = {"size": args.size, "num_frames": args.frames, "num_classes": args.classes, "kind": args.kind}
    how = {name: value for name, value in given.items() if value is not None}
    how |= {"seed": args.seed, "difficulty": args.difficulty}
    videos = args.videos(**how)
    if there := [path for name in SPLITS if (path := args.out / f"{name}.csv").exists()]:
        raise UserError(f"{there[0]}: must not exist yet; make the set in another folder")
    total = args.train + args.val
    for _ in followed(write_motion_set(args.out, args.train, args.val, videos), total, "videos", in_logs=True):
        pass
    what = f"{counted(total, 'video')} of {videos.num_classes} classes: {', '.join(videos.classes)}"
    return Result([what, f"data.train={args.out / 'train.csv'} data.val={args.out / 'val.csv'} data.root={args.out}"])


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "SOURCE:\n" + "\n".join(f"  {kind:<13} {what}" for kind, (_, what) in KINDS.items())
    add = parser.add_argument
    add("kind", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    add("source", metavar="SOURCE", type=Path, help="the list of one split, see below")
    add("--root", type=Path, help="folder of the videos or of the folders of pictures [SOURCE's own]")
    add("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    add("--labels", type=Path, metavar="FILE", help="the data set's list of labels")
    add("--split", type=int, default=1, metavar="N", help="hmdb51: which split [%(default)s]")
    add("--part", choices=HMDB51_PARTS, help="hmdb51: which part of it")


def _import(args: argparse.Namespace) -> Result:
    for file in (args.out, _left_out_file(args.out)):
        check_output("--out", file, file, args.source, *filter(None, [args.labels]))
    request = Request(args.source, args.labels, read_classes(args.out.parent / CLASSES_FILE), args.split, args.part)
    root = args.root or (args.source if args.source.is_dir() else args.source.parent)
    if not root.is_dir():
        raise UserError(f"{root}: must be the folder of the videos, got no folder; try another --root")
    annotations = KINDS[args.kind][0](request)
    check_beside(args.out, annotations.classes, args.source)
    found = list(followed(annotations.located(str(root)), len(annotations.clips), "clips", in_logs=True))
    rows = [row for row in found if isinstance(row, ManifestRow)]
    left_out = [(None, error) for error in found if isinstance(error, DecodeError)]
    text: Text = [f"{counted(len(found), 'clip')} listed, {len(annotations.classes):,} classes: {len(rows):,} found"]
    nothing = f"{root}: must have the {len(found):,} clips, got none; try another --root"
    text = _write(args.out, root, rows, annotations.classes, left_out, text, nothing)
    return Result([*text, f"next: summit-train data index {args.out} --root {root} --out INDEXED.csv"])


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "folder with a folder for each class, or a manifest"
    add("source", metavar="SOURCE", type=Path, help=what)
    add("--out", metavar="MANIFEST.csv", type=Path, required=True, help="manifest to write")
    root = "only where SOURCE is a manifest: the folder where its paths start [its own folder]"
    add("--root", metavar="DIR", type=Path, help=root)
    add("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")
    parser.set_defaults(region=None)


def _indexed(listing: check.Listing, found: Findings) -> tuple[list[ManifestRow], list[check.LeftOut], Text]:
    rows, left_out = check.index_clips(listing.rows, found)
    counts = Counter(label for row in rows for label in row.labels)
    names = listing.manifest.classes or tuple(map(str, range(max(counts, default=-1) + 1)))
    table = [(f"{label:>4}", name, f"{counts[label]:,}") for label, name in enumerate(names)]
    lengths = {path: facts.num_frames for path, facts in found.items() if not isinstance(facts, DecodeError)}
    frames = sum(len(row.span.frames(row.path, lengths[row.path])) for row in rows)
    what = "clips" if any(row.span != WHOLE for row in rows) else "videos"
    text: Text = [TextTable(table, left=2)] if table else []
    text.append(f"{len(rows):,} {what}, {counted(frames, 'frame')}, {len(names)} classes")
    text += skipped_text(listing.manifest.skipped)
    copies = [f"{path} = {first}" for path, first in check.copies(rows)]
    return rows, left_out, [*text, *_first_lines("the same bytes as another", copies), *_remarks(found)]


def _scan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MANIFEST", type=Path, help="manifest, or folder of class folders")
    add("--root", metavar="DIR", type=Path, help="where the manifest's paths start [its own folder]")
    clean = "manifest to write, without the bad clips; CLEAN.left_out.csv has those, with reasons"
    add("--out", metavar="CLEAN.csv", type=Path, required=True, help=clean)
    add("--region", choices=("columns",), help="also check the regions in these columns; see data.region")
    add("--workers", type=int, metavar="N", help="processes of each rank that decode [one a CPU]")


def _scanned(listing: check.Listing, found: Findings) -> tuple[list[ManifestRow], list[check.LeftOut], Text]:
    if all(isinstance(facts, DecodeError) and facts.reason == MISSING for facts in found.values()):
        must = f"{listing.root}: must have the {counted(len(found), 'video')} of {listing.manifest.source}, got none"
        raise UserError(f"{must}; try another --root, the folder where its paths start")
    rows, left_out = check.scan_clips(listing, found)
    bad = check.reasons(left_out)
    decoded = sum(not isinstance(facts, DecodeError) for facts in found.values())
    clips = "" if len(found) == len(listing.rows) else f" for {counted(len(listing.rows), 'clip')}"
    summary = f"{decoded:,} of {counted(len(found), 'video')} decoded{clips}, {len(bad):,} bad"
    reasons = Counter(error.reason for error in bad).most_common(SHOWN)
    return rows, left_out, [summary, *(f"  {count:>6,}  {reason}" for reason, count in reasons), *_remarks(found)]


def _survey(
    judge: Callable[[check.Listing, Findings], tuple[list[ManifestRow], list[check.LeftOut], Text]],
    args: argparse.Namespace,
) -> Result:
    """Decode the files of a list by all ranks, and write the clips that are good and those that are left out.

    judge: returns both, and lines for people. Raises UserError.
    """
    if args.root is not None and args.source.is_dir():
        raise UserError(f"--root must be left out where SOURCE is a folder, as paths start there; got {args.root}")
    with session(this_launch()) as world:
        listing = world.together(lambda: None if world.rank else _listed(args))
        root = world.broadcast(str(listing.root) if listing else "")
        journal = check.Journal(args.out.with_name(f".{args.out.name}.journal"), root)
        found = _decoded(world, journal, [row.path for row in listing.rows] if listing else [], args.workers)
        if listing is None:
            return Result()
        try:
            rows, left_out, text = judge(listing, found)
        except UserError:
            shutil.rmtree(journal.folder, ignore_errors=True)  # to be decoded with another --root
            raise
        nothing = f"{args.source}: must have a video that can be used, got none"
        written = _write(args.out, listing.root, rows, listing.manifest.classes, left_out, text, nothing)
        shutil.rmtree(journal.folder, ignore_errors=True)
        return Result(written)


def _listed(args: argparse.Namespace) -> check.Listing:
    for file in (args.out, _left_out_file(args.out)):
        check_output("--out", file, file, args.source)
    if (args.source / PACK_FILE).is_file():
        right = f"check it with `summit-train data verify {args.source}`"
        raise UserError(f"{args.source}: must be a list or a folder, got a packed set; {right}")
    listing = check.list_videos(args.source, args.root, args.region)
    located_root(args.root and str(args.root), listing.manifest)
    check_beside(args.out, listing.manifest.classes, listing.root)
    return listing


def _decoded(world: World, journal: check.Journal, paths: Iterable[str], workers: int | None) -> Findings:
    """Decode all files by all ranks; return the findings on rank 0, elsewhere nothing. Collective.

    paths: rank 0's count. An interrupted survey with this journal is continued: files that have not changed since are
    not decoded again.
    """
    paths = list(dict.fromkeys(paths))
    known = journal.read(paths) if world.rank == 0 else {}
    if known:
        tell(f"resumes: {len(known):,} of {len(paths):,} are decoded already")
    share = world.broadcast([path for path in paths if path not in known])[world.rank :: world.size]
    seen = check.spread(partial(check.examine, journal.root), share, min(num_workers(workers, world), len(share)))
    for path, what in zip(share, followed(seen, len(share), "videos", world, in_logs=True), strict=True):
        journal.add(world.rank, path, what)
    world.barrier()
    return journal.read(paths) if world.rank == 0 else {}


def _remarks(found: Findings) -> list[str]:
    """Return lines about files that can be used, but are read slowly or in part."""
    facts = [(path, one) for path, one in found.items() if not isinstance(one, DecodeError)]
    slow = [f"{path} {note}" for path, one in facts for note in one.notes if not one.can_jump]
    others = [f"{path} {note}" for path, one in facts for note in one.notes if one.can_jump]
    return [*_first_lines("read from their start, as jumps give wrong frames", slow), *_first_lines("remarks", others)]


def _first_lines(title: str, lines: Sequence[object]) -> list[str]:
    """Return a heading with the number of lines and the first of them, or nothing."""
    more = [f"  ... and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    return [f"{title}: {len(lines):,}", *(f"  {line}" for line in lines[:SHOWN]), *more] if lines else []


def _left_out_file(out: Path) -> Path:
    return out.with_name(f"{out.stem}.left_out.csv")


def _split_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    add("out", metavar="OUT", type=Path, help="folder that gets fold1 .. foldN")
    add("--folds", type=int, metavar="N", required=True, help="fold k validates on part k of N")
    group = "what it matches in a file's name (its first parenthesis, if any) is never on both sides [column group]"
    add("--group", metavar="REGEX", help=group)
    add("--seed", type=int, default=0, help="of the shuffle [%(default)s]")
    add("--only", nargs="+", default=[], metavar="CLASS", help="take these classes; labels stay")
    both = "two classes instead: each clip as it is (forwards) and played backwards"
    add("--both-directions", action="store_true", help=both)


def _split(args: argparse.Namespace) -> Result:
    how = {"seed": args.seed, "only": args.only, "both_directions": args.both_directions}
    if there := sorted(args.out.glob("fold[0-9]*")):
        raise UserError(f"{there[0]}: must not exist yet; split into another folder, or delete the folds of this one")
    folds = split_manifest(args.manifest, args.out, args.folds, args.group, **how)
    rows = [["class", *(f"{fold.folder.name} train/val" for fold in folds)]]
    rows += [[name, *(f"{fold.train[name]:,}/{fold.val[name]:,}" for fold in folds)] for name in folds[0].train]
    text: Text = [TextTable(rows), folds[0].grouping]
    for fold in folds:
        train, val = fold.clips
        trained, validated = fold.groups
        clips = f"{counted(train, 'clip')} to train on, {val:,} to validate on"
        text.append(f"{fold.folder}: {clips}; groups: {trained:,} and {validated:,}")
    return Result([*text, f"set data.root to the folder that the paths of {args.manifest} are relative to"])


def _write(
    out: Path,
    root: Path,
    rows: Sequence[ManifestRow],
    classes: tuple[str, ...] | None,
    left_out: Sequence[check.LeftOut],
    text: Text,
    nothing: str,
) -> Text:
    """Write a manifest, its classes and MANIFEST.left_out.csv; return `text`, what was left out, and what was written.

    The latter has whole rows with a column `reason`; of clips without a row, path and reason. If no row is left, shows
    `text` and raises UserError(nothing).
    """
    # The list first: where the manifest exists, the list does too.
    path = _left_out_file(out)
    errors = check.reasons(left_out)
    path.unlink(missing_ok=True)
    written = _first_lines("left out", errors)
    if whole := [replace(row, others=(*row.others, ("reason", error.reason))) for row, error in left_out if row]:
        write_manifest(path, whole)
    elif left_out:
        write_text(path, csv_text([("path", "reason"), *((error.path, error.reason) for error in errors)], exact=True))
    if left_out:
        written.append(f"wrote {path}: all {len(left_out):,} that are left out")
    if not rows:
        show(Result([*text, *written]))
        raise UserError(nothing)
    if classes is not None:
        write_classes(out.parent, classes)
    write_manifest(out, rows)
    return [*text, *written, f"wrote {out}; set data.root={root}"]


PARTS = {
    "motion": (_motion_arguments, _motion, "generate videos whose class is their motion, or those of another task"),
    "import": (_import_arguments, _import, "write a manifest from the files that a public data set comes with"),
    "index": (
        _index_arguments,
        partial(_survey, _indexed),
        "decode every video and write a manifest of the intact ones",
    ),
    "scan": (
        _scan_arguments,
        partial(_survey, _scanned),
        "decode every clip of a manifest and write it without the bad ones",
    ),
    "split": (_split_arguments, _split, "split a manifest into training and validation folds by groups"),
    "compare": (compare.add_arguments, compare.run, "find the clips, or copies, that two lists share or one has twice"),
    "show": (data_show.add_arguments, data_show.run, "write a page of a list's clips as the network sees them"),
    "pack": (
        data_pack.add_pack_arguments,
        data_pack.run_pack,
        "pack clips into shards: tar files with an index and checksums",
    ),
    "flow": (
        data_pack.add_flow_arguments,
        data_pack.run_flow,
        "compute the optical flow of clips and pack it into shards",
    ),
    "verify": (data_pack.add_verify_arguments, data_pack.run_verify, "check every byte of a packed set"),
    "stage": (data_pack.add_stage_arguments, data_pack.run_stage, "copy a packed set to this node's own disk"),
}
