"""`summit-train data pack`: a manifest's clips packed into shards, by many processes and ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from summit_train.commands.data.progress import followed
from summit_train.commands.data.ranks import num_workers
from summit_train.commands.data.sizes import parse_size, size_text
from summit_train.commands.ranks import session, this_launch
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.format import PackError, Packing
from summit_train.data.packed.pack import Job, begin, finish, missing_shards, pack_shards
from summit_train.data.video.source import DecodeError

if TYPE_CHECKING:
    from summit_train.comm import World

_NAMED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    usual = Packing("jpeg")
    parser.add_argument("manifest", metavar="MANIFEST", help="manifest, or folder of class folders")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to fill: new, or of a packing to go on with")
    parser.add_argument("--root", metavar="DIR", help="where the manifest's paths start [its own folder]")
    parser.add_argument(
        "--kind", choices=("bytes", "jpeg"), required=True, help="the files as they are, or their frames as JPEG"
    )
    parser.add_argument("--short-side", type=int, metavar="PIXELS", help=f"jpeg: of a picture [{usual.short_side}]")
    parser.add_argument("--every", type=int, metavar="N", help=f"jpeg: pack every N-th frame [{usual.every}]")
    parser.add_argument("--quality", type=int, metavar="Q", help=f"jpeg: 1 to 95 [{usual.quality}]")
    parser.add_argument(
        "--shard-size", type=parse_size, default="1G", metavar="SIZE", help="about what a shard has [%(default)s]"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes of each rank [one a CPU]")


def run(args: argparse.Namespace) -> int:
    """Pack; return 0 when the set is finished."""
    packing = _packing(args)
    manifest = read_manifest(args.manifest)
    store = FileStore(manifest, located_root(args.root, manifest))
    with session(this_launch()) as world:
        workers = num_workers(args.workers, world, least=0)
        job = world.broadcast(begin(store, args.out, packing, args.shard_size, workers) if world.rank == 0 else None)
        bad = [] if job is None else _packed(job, world, workers)
        everyone = world.gather(bad)
        if job is None and world.rank == 0:
            print(f"{args.out}: is packed already; `data verify` checks it")
        elif job is not None and everyone is not None:
            _check([error for errors in everyone for error in errors])
            pack = finish(job)
            print(f"{job.folder}: {pack.clips:,} clips in {len(pack.shards):,} shards, {size_text(pack.shard_bytes)}")
            print(f"name it in a spec: data.train={job.folder}")
    return 0


def _packed(job: Job, world: World, workers: int) -> list[DecodeError]:
    """Pack this rank's share of the shards; the clips that cannot be packed."""
    mine = world.broadcast(missing_shards(job))[world.rank :: world.size]
    clips = sum(len(job.clips(shard)) for shard in mine)
    what = "clips" if world.size == 1 else f"clips of rank 0 of {world.size}"
    done = pack_shards(job, mine, workers)
    return [error for error in (followed(done, clips, what) if world.rank == 0 else done) if error is not None]


def _packing(args: argparse.Namespace) -> Packing:
    asked = {name: getattr(args, name) for name in ("short_side", "every", "quality")}
    given = {name: value for name, value in asked.items() if value is not None}
    if given and args.kind == "bytes":
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise PackError(f"{names}: for --kind jpeg; with bytes the files stay as they are")
    return Packing(args.kind, **given)


def _check(bad: list[DecodeError]) -> None:
    if bad:
        named = "\n".join(f"  {error}" for error in bad[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else ""
        raise PackError(
            f"{len(bad):,} clips cannot be packed; leave them out of the manifest (`data index` does) and pack again "
            f"into another folder:\n{named}{more}"
        )
