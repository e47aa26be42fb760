"""`summit-train data pack`, `flow`, `verify` and `stage`: make, check and copy packed sets."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.machine import num_cpus
from summit_train.core.progress import followed, shown
from summit_train.core.result import Result
from summit_train.core.session import session
from summit_train.core.text import counted
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import Job, alone_in, begin, finish, missing_shards, pack_shards
from summit_train.data.packed.read import staged_folder, stray_files, verify_files
from summit_train.data.packed.stage import stage
from summit_train.data.video.flow import BOUND, METHODS, PRESET, PRESETS, flow_method

if TYPE_CHECKING:
    from summit_train.core.comm import World

FLOW_QUALITY = 95  # OpenCV's own, by which dense_flow and denseflow write their pictures
_NAMED = 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Parse 1G, 256M, 1.5T or a plain number of bytes; each unit is 1024 of the one below it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match.group(1)) * _UNITS[match.group(2).upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 1G or 256M, got {text!r}")
    return size


def size_text(size: float) -> str:
    """Format bytes as 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def num_workers(asked: int | None, world: World) -> int:
    """Return the worker processes of each rank: as asked, or its share of the node's CPUs."""
    return max(1, num_cpus() // world.local_size) if asked is None else max(0, asked)


def _packing_arguments(parser: argparse.ArgumentParser, shard_size: str) -> None:
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    add("out", metavar="OUT", type=Path, help="folder to fill: new, or with an unfinished packing to continue")
    add("--root", metavar="DIR", help="where the manifest's paths start [its own folder]")
    add("--shard-size", type=parse_size, default=shard_size, metavar="SIZE", help="of a shard, about [%(default)s]")
    add("--workers", type=int, metavar="N", help="processes of each rank [one a CPU]")


def _pack_arguments(parser: argparse.ArgumentParser) -> None:
    _packing_arguments(parser, "1G")
    add, usual = parser.add_argument, Packing("jpeg")
    kind = "the files as they are, or their frames as JPEG"
    add("--kind", choices=("bytes", "jpeg"), required=True, help=kind)
    add("--short-side", type=int, metavar="PIXELS", help=f"jpeg: of a picture [{usual.short_side}]")
    add("--every", type=int, metavar="N", help=f"jpeg: pack every N-th frame [{usual.every}]")
    add("--quality", type=int, metavar="Q", help=f"jpeg: 1 to 95 [{usual.quality}]")
    bound = "bytes: the clips are folders of optical flow, whose values 0 and 255 stand for this many pixels"
    add("--bound", type=float, metavar="PIXELS", help=bound)


def _pack(args: argparse.Namespace) -> Result:
    asked = {name: getattr(args, name) for name in ("short_side", "every", "quality")}
    given = {name: value for name, value in asked.items() if value is not None}
    if given and args.kind == "bytes":
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{names}: for --kind jpeg; with bytes the files stay as they are")
    if args.bound is not None and args.kind == "jpeg":
        raise UserError("--bound: for --kind bytes; pictures of flow are packed as they are")
    flow = {} if args.bound is None else {"modality": "flow", "bound": args.bound}
    return _work(args, Packing(args.kind, **given, **flow))


def _flow_arguments(parser: argparse.ArgumentParser) -> None:
    _packing_arguments(parser, "32M")
    add, side = parser.add_argument, Packing("jpeg").short_side
    add("--method", choices=METHODS, required=True, help="tvl1: the usual one; dis: over 100 times as fast")
    add("--preset", choices=PRESETS, help=f"dis: how fine [{PRESET}]")
    add("--bound", type=float, default=BOUND, metavar="PIXELS", help="larger motions are cut [%(default)g]")
    add("--short-side", type=int, default=side, metavar="PIXELS", help="scale larger frames down first [%(default)s]")
    add("--quality", type=int, default=FLOW_QUALITY, metavar="Q", help="of the pictures, 1 to 95 [%(default)s]")


def _flow(args: argparse.Namespace) -> Result:
    if args.preset and args.method != "dis":
        raise UserError("--preset: is for --method dis")
    preset = args.preset or (PRESET if args.method == "dis" else None)
    flow_method(args.method, preset or PRESET)  # before the work: is OpenCV there?
    how = {"modality": "flow", "bound": args.bound, "method": args.method, "preset": preset}
    return _work(args, Packing("jpeg", args.short_side, quality=args.quality, **how))


def _work(args: argparse.Namespace, packing: Packing) -> Result:
    manifest = read_manifest(args.manifest)
    store = FileStore(manifest, located_root(args.root, manifest))
    with session(this_launch()) as world, ExitStack() as held:
        workers = num_workers(args.workers, world)
        world.from_first(lambda: held.enter_context(alone_in(args.out)))
        job = world.from_first(lambda: begin(store, args.out, packing, args.shard_size, workers))
        text = [f"{args.out}: is packed already; `data verify` checks it"]
        if job is not None:
            shards = world.from_first(lambda: missing_shards(job))[world.rank :: world.size]
            clips = sum(len(job.clips(shard)) for shard in shards)
            done = followed(pack_shards(job, shards, workers), clips, "clips", world, in_logs=True)
            failed = world.gather([str(error) for error in done if error is not None])
            text = world.from_first(lambda: _finish(job, list(chain.from_iterable(failed or ()))))
        return Result([] if world.rank else text)


def _finish(job: Job, failed: list[str]) -> list[str]:
    """Finish the set; return how to use it. Raises UserError where a clip could not be packed."""
    if failed:
        more = [f"and {len(failed) - _NAMED:,} more"] if len(failed) > _NAMED else []
        raise UserError(
            f"{len(failed):,} clips cannot be packed; leave them out of the manifest (`data index` does) and pack "
            "again into another folder:\n  " + "\n  ".join([*failed[:_NAMED], *more])
        )
    pack = finish(job)
    size = size_text(sum(shard.size for shard in pack.shards))
    how = ", with data.modality=flow" if pack.packing.modality == "flow" else ""
    what = f"{job.folder}: {counted(pack.clips, 'clip')} in {counted(len(pack.shards), 'shard')}, {size}"
    return [what, f"name it in a spec as data.train or data.val: {job.folder}{how}"]


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of a packed set")
    parser.add_argument("--workers", type=int, metavar="N", help="files of each rank read at a time [one a CPU]")


def _verify(args: argparse.Namespace) -> Result:
    """Verify. Raises RunFailed where a byte is not as it was packed."""
    if not args.out.is_dir():
        raise UserError(f"{args.out}: no such folder")
    try:
        pack = read_pack(args.out)
    except UserError as error:
        raise RunFailed(str(error)) from error
    files = pack.every_file
    with session(this_launch()) as world:
        share = files[world.rank :: world.size]
        complaints = verify_files(args.out, share, num_workers(args.workers, world))
        checked = followed(complaints, len(share), "files", world, in_logs=True)
        everyone = world.gather([line for line in checked if line is not None])
        if everyone is None:
            return Result()
        if found := [*chain.from_iterable(everyone), *stray_files(args.out, pack)]:
            named = "\n".join(found)
            raise RunFailed(f"{args.out}: {len(found)} of its files are not as they were packed:\n{named}")
    size = size_text(sum(file.size for file in files))
    return Result([f"{args.out}: {pack.clips:,} clips in {len(files):,} files, {size}: every byte is as it was packed"])


def _stage_arguments(parser: argparse.ArgumentParser) -> None:
    add, dest = parser.add_argument, "folder on the node's disk; the copy gets one of its own in it"
    add("packed", metavar="OUT", type=Path, help="folder of a packed set")
    add("dest", metavar="DEST", type=Path, help=dest)


def _stage(args: argparse.Namespace) -> Result:
    """Stage. A disk that is full or missing gives one warning.

    Of several processes on a node the first copies and the others wait, by a lock on the disk.
    """
    folder = staged_folder(args.dest, args.packed)
    with shown("files", in_logs=True) as show:
        done = stage(args.packed, args.dest, show)
    if done.warning:
        print(f"warning: {done.warning}", file=sys.stderr)
    what = f"{folder}: {size_text(done.copied)} copied and checked, {size_text(done.present)} were there"
    return Result([what, f"read it with data.stage={args.dest}, and {args.packed} as data.train or data.val"])


PARTS = {
    "pack": (_pack_arguments, _pack, "pack clips into shards: tar files with an index and checksums"),
    "flow": (_flow_arguments, _flow, "compute the optical flow of clips and pack it into shards"),
    "verify": (_verify_arguments, _verify, "check every byte of a packed set"),
    "stage": (_stage_arguments, _stage, "copy a packed set to this node's own disk"),
}
