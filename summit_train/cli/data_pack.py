"""The parts of `summit-train data` that make and check packed sets: pack, flow, verify, stage."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.machine import num_cpus
from summit_train.core.progress import followed, shown
from summit_train.core.result import Result, warn
from summit_train.core.session import session
from summit_train.core.text import counted, with_unit
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.format import OPTIONS, Packing, read_pack
from summit_train.data.packed.pack import PackJob, alone_in, begin, finish, missing_shards, pack_shards
from summit_train.data.packed.read import staged_folder, stray_files, verify_files
from summit_train.data.packed.stage import stage
from summit_train.data.video.flow import BOUND, METHODS, PRESET, PRESETS, flow_method

if TYPE_CHECKING:
    from summit_train.core.comm import World

FLOW_QUALITY = 95  # OpenCV's own, by which dense_flow and denseflow write their pictures
SHOWN = 20  # lines of each list on the screen
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def num_workers(asked: int | None, world: World) -> int:
    """Return the worker processes of each rank: as asked, or its share of the node's CPUs."""
    return max(1, num_cpus() // world.local_size) if asked is None else max(0, asked)


def parse_size(text: str) -> int:
    """Parse 1G, 256M, 1.5T or a plain number of bytes; each unit is 1024 of the one below it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match.group(1)) * _UNITS[match.group(2).upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 1G or 256M, got {text!r}")
    return size


def _packing_arguments(parser: argparse.ArgumentParser, shard_size: str) -> None:
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    add("out", metavar="OUT", type=Path, help="folder to fill: new, or with an unfinished packing to continue")
    add("--root", metavar="DIR", help="where the manifest's paths start [its own folder]")
    add("--shard-size", type=parse_size, default=shard_size, metavar="SIZE", help="of a shard, about [%(default)s]")
    add("--workers", type=int, metavar="N", help="processes of each rank [one a CPU]")
    add("--region", choices=("columns",), help="pack only the region in these columns; see data.region")


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    _packing_arguments(parser, "1G")
    add = parser.add_argument
    usual = Packing("jpeg")
    kinds = "bytes: the files unchanged; jpeg: each frame as a JPEG; video: small MPEG-4 videos that decode fast"
    add("--kind", choices=tuple(OPTIONS), required=True, help=kinds)
    scaled = f"jpeg, video: scale larger frames down to this [{usual.short_side}]"
    add("--short-side", type=int, metavar="PIXELS", help=scaled)
    add("--every", type=int, metavar="N", help=f"jpeg, video: pack every N-th frame [{usual.every}]")
    add("--quality", type=int, metavar="Q", help=f"jpeg: quality, 1 to 95 (best) [{usual.quality}]")
    add("--gop", type=int, metavar="N", help=f"video: a key frame every N frames [{usual.gop}]")
    add("--qscale", type=int, metavar="Q", help=f"video: compression, 1 (best, largest) to 31 [{usual.qscale}]")
    bound = "bytes: the clips are folders of optical flow, whose values 0 and 255 mean this many pixels"
    add("--bound", type=float, metavar="PIXELS", help=bound)


def run_pack(args: argparse.Namespace) -> Result:
    asked = {name: getattr(args, name) for name in sorted(set().union(*OPTIONS.values()))}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in sorted(given.keys() - OPTIONS[args.kind]):
        kinds = " or ".join(f"--kind {kind}" for kind, names in OPTIONS.items() if name in names)
        raise UserError(f"--{name.replace('_', '-')} must be used with {kinds}, got --kind {args.kind}")
    if args.bound is not None and args.kind != "bytes":
        right = "pictures of flow are packed as they are"
        raise UserError(f"--bound must be used with --kind bytes, got --kind {args.kind}; {right}")
    flow = {} if args.bound is None else {"modality": "flow", "bound": args.bound}
    return _work(args, Packing(args.kind, **given, **flow))


def add_flow_arguments(parser: argparse.ArgumentParser) -> None:
    _packing_arguments(parser, "32M")
    add = parser.add_argument
    side = Packing("jpeg").short_side
    add("--method", choices=METHODS, required=True, help="tvl1: the usual one; dis: over 100 times as fast")
    add("--preset", choices=PRESETS, help=f"dis: how fine [{PRESET}]")
    add("--bound", type=float, default=BOUND, metavar="PIXELS", help="larger motions are cut [%(default)g]")
    add("--short-side", type=int, default=side, metavar="PIXELS", help="scale larger frames down first [%(default)s]")
    add("--quality", type=int, default=FLOW_QUALITY, metavar="Q", help="of the pictures, 1 to 95 [%(default)s]")


def run_flow(args: argparse.Namespace) -> Result:
    if args.preset and args.method != "dis":
        raise UserError(f"--preset must be used with --method dis, got --method {args.method}")
    preset = args.preset or (PRESET if args.method == "dis" else None)
    flow_method(args.method, preset or PRESET)  # before the work: is OpenCV there?
    how = {"modality": "flow", "bound": args.bound, "method": args.method, "preset": preset}
    return _work(args, Packing("jpeg", args.short_side, quality=args.quality, **how))


def _work(args: argparse.Namespace, packing: Packing) -> Result:
    manifest = read_manifest(args.manifest, args.region)
    packing = replace(packing, region=args.region)
    store = FileStore(manifest, located_root(args.root, manifest))
    with session(this_launch()) as world, ExitStack() as held:
        workers = num_workers(args.workers, world)
        world.from_first(lambda: held.enter_context(alone_in(args.out)))
        begun = world.from_first(lambda: _begin(store, args, packing, workers))
        text = [f"{args.out}: is packed already; `data verify` checks it"]
        if begun is not None:
            fingerprint, clips_per_shard = begun
            world.together(lambda: _check_same(manifest, fingerprint))
            job = PackJob(store, args.out, packing, clips_per_shard)
            shards = world.from_first(lambda: missing_shards(job))[world.rank :: world.size]
            clips = sum(len(job.clips(shard)) for shard in shards)
            done = followed(pack_shards(job, shards, workers), clips, "clips", world, in_logs=True)
            failed = world.gather([str(error) for error in done if error is not None])
            text = world.from_first(lambda: _finish(job, list(chain.from_iterable(failed or ()))))
        return Result([] if world.rank else text)


def _begin(store: FileStore, args: argparse.Namespace, packing: Packing, workers: int) -> tuple[str, int] | None:
    """Return the list's fingerprint and how many clips a shard gets; None if the set is packed already."""
    job = begin(store, args.out, packing, args.shard_size, workers)
    return None if job is None else (store.manifest.fingerprint(), job.clips_per_shard)


def _check_same(manifest: Manifest, fingerprint: str) -> None:
    """Raise UserError where this rank's list is another than rank 0's."""
    if manifest.fingerprint() != fingerprint:
        raise UserError(f"{manifest.source}: must be the same list as rank 0's; start all ranks with the same files")


def _finish(job: PackJob, failed: list[str]) -> list[str]:
    """Finish the set; return how to use it. Raises UserError where a clip could not be packed."""
    if failed:
        more = [f"and {len(failed) - SHOWN:,} more"] if len(failed) > SHOWN else []
        right = "leave them out of the manifest (`data index` does) and pack again into another folder"
        listed = (f"  {line}" for line in [*failed[:SHOWN], *more])
        raise UserError(f"{len(failed):,} clips cannot be packed; {right}:", *listed)
    pack = finish(job)
    size = with_unit(sum(shard.size for shard in pack.shards), "B")
    how = ", with data.modality=flow" if pack.packing.modality == "flow" else ""
    what = f"{job.folder}: {counted(pack.clips, 'clip')} in {counted(len(pack.shards), 'shard')}, {size}"
    return [what, f"name it in a spec as data.train or data.val: {job.folder}{how}"]


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of a packed set")
    parser.add_argument("--workers", type=int, metavar="N", help="files of each rank read at a time [one a CPU]")


def run_verify(args: argparse.Namespace) -> Result:
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
            what = f"{counted(len(found), 'file')} damaged, missing or not part of the set"
            raise RunFailed(f"{args.out}: {what}:", *found)
    size = f"{counted(len(files), 'file')}, {with_unit(sum(file.size for file in files), 'B')}"
    return Result([f"{args.out}: {counted(pack.clips, 'clip')} in {size}: all checksums match"])


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packed", metavar="OUT", type=Path, help="folder of a packed set")
    dest = "folder on the node's disk; the copy gets one of its own in it"
    parser.add_argument("dest", metavar="DEST", type=Path, help=dest)


def run_stage(args: argparse.Namespace) -> Result:
    folder = staged_folder(args.dest, args.packed)
    with shown("files", in_logs=True) as progress:
        done = stage(args.packed, args.dest, progress)
    if done.warning:
        warn(done.warning)
    what = f"{folder}: {with_unit(done.copied, 'B')} copied and checked, {with_unit(done.present, 'B')} were there"
    return Result([what, f"read it with data.stage={args.dest}, and {args.packed} as data.train or data.val"])
