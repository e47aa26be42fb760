"""`summit-train data compare A [B]`: the clips that two lists share, or that one has twice, by path and by SHA-256."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256
from summit_train.core.machine import num_cpus
from summit_train.core.progress import followed
from summit_train.core.result import Result, TextTable
from summit_train.core.session import check_single
from summit_train.core.text import counted
from summit_train.data.check import spread
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.overlap import shared_clips
from summit_train.data.video.source import DecodeError

_SHOWN = 20  # pairs on the screen; --json has them all
_HOW = {"path": "by path", "sha256": "by SHA-256"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    one = "A and B: manifests, or folders of class folders; A alone: find clips that it has twice"
    add("lists", metavar="LIST", nargs="+", help=one)
    add("--near", nargs="?", const="", help=argparse.SUPPRESS)  # of earlier versions
    add("--root", nargs="+", metavar="DIR", help="folder of the videos: one, or one for A and one for B [each list's]")
    add("--workers", type=int, metavar="N", help="processes that read [one per CPU]")
    add("--json", action="store_true", help="print JSON instead of text")


@dataclass
class _Side:
    """One of the lists. bad: the clips that cannot be read."""

    manifest: Manifest
    root: str
    workers: int
    bad: list[DecodeError] = field(default_factory=list)

    def hashed(self) -> Manifest:
        """Return the list with the SHA-256 of every file."""
        clips = range(len(self.manifest))
        paths = list(map(self.manifest.path, clips))
        known = list(map(self.manifest.sha256, clips))
        unknown = list(dict.fromkeys(path for path, sha256 in zip(paths, known, strict=True) if sha256 is None))
        hashes = spread(partial(_digest, self.root), unknown, min(self.workers, len(unknown)))
        found = dict[str, bytes]()
        for path, digest in zip(unknown, followed(hashes, len(unknown), "files", in_logs=True), strict=True):
            if isinstance(digest, DecodeError):
                self.bad.append(digest)
            else:
                found[path] = digest
        digests = [sha256 or found.get(path, bytes(32)) for path, sha256 in zip(paths, known, strict=True)]
        return replace(self.manifest, digests=np.array(digests, "V32"))


def _digest(root: str, path: str) -> bytes | DecodeError:
    """Return the SHA-256 of a file, zeros for a folder of pictures, or why the file cannot be read."""
    file = os.path.join(root, path)
    try:
        return bytes(32) if os.path.isdir(file) else bytes.fromhex(file_sha256(file))
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))


def run(args: argparse.Namespace) -> Result:
    """Compare the lists. The status is 0 even if pairs are found."""
    check_single("data compare")
    if args.near is not None:
        raise UserError("--near was removed: copies are found by path and by SHA-256; leave it out")
    roots: list[str | None] = [None] if args.root is None else args.root
    if len(args.lists) > 2:
        raise UserError(f"LIST must be one list or two, got {len(args.lists)}")
    if len(roots) not in (1, len(args.lists)):
        raise UserError(f"--root must be one folder, or one for A and one for B, got {len(roots)}")
    workers = num_cpus() if args.workers is None else max(0, args.workers)
    sides = dict[tuple[str, str], _Side]()
    for path, root in zip(args.lists, roots * (len(args.lists) // len(roots)), strict=True):
        manifest = read_manifest(path)
        if manifest.is_packed:
            raise UserError(f"{path}: must be a list, got a packed set; try the list that it was packed from")
        side = _Side(manifest, located_root(root, manifest), workers)
        sides[os.path.realpath(path), os.path.realpath(side.root)] = side
    return _compared(list(sides.values()))


def _compared(sides: Sequence[_Side]) -> Result:
    """Compare two lists, or the clips of one with each other."""
    is_one = len(sides) == 1
    hashed = [side.hashed() for side in sides]
    shared = shared_clips(hashed[0], hashed[-1], [sides[0].root, sides[-1].root])
    if is_one:
        shared = {(clip, other): how for (clip, other), how in shared.items() if clip < other}
    pairs = [_pair(sides, places, shared[places]) for places in sorted(shared, key=lambda pair: (shared[pair], pair))]
    bad = [error for side in sides for error in side.bad]
    values: dict[str, Any] = {"clips": [len(side.manifest) for side in sides], "pairs": pairs}
    values["unreadable"] = [{"path": error.path, "error": error.reason} for error in bad]
    text = _text(pairs)
    first = {clip for clip, _ in shared}
    second = {other for _, other in shared}
    counts = [first | second] if is_one else [first, second]
    wheres = ["here twice or more"] if is_one else ["also in B", "also in A"]
    for side, clips, where in zip(sides, counts, wheres, strict=True):
        text.append(f"{side.manifest.source}: {len(clips):,} of {counted(len(side.manifest), 'clip')} {where}")
    return Result([*text, *(f"not compared: {error}" for error in bad)], values=values)


def _pair(sides: Sequence[_Side], places: tuple[int, int], how: str) -> dict[str, Any]:
    """Return the JSON object of a pair."""
    pair: dict[str, Any] = {"by": how}
    for name, side, clip in zip("ab", (sides[0], sides[-1]), places, strict=True):
        listed = replace(side.manifest.clip(clip), path=side.manifest.path(clip))
        group = side.manifest.group(clip)
        pair[name] = listed.values() | ({"group": group} if group else {})
    return pair


def _text(pairs: Sequence[dict[str, Any]]) -> list[str | TextTable]:
    """Return the first pairs as a table, and the number of pairs of each kind."""
    rows = []
    for pair in pairs[:_SHOWN]:
        clips = [" ".join(map(str, pair[name].values())) for name in "ab"]
        rows.append(dict(zip(("A", "B", "by"), (*clips, pair["by"]), strict=True)))
    more = [f"... and {len(pairs) - _SHOWN:,} more; --json has them all"] if len(pairs) > _SHOWN else []
    kinds = Counter(pair["by"] for pair in pairs)
    how = [f"{kinds[name]:,} {words}" for name, words in _HOW.items() if kinds[name]]
    table: list[str | TextTable] = [TextTable.of_records(rows)] if rows else []
    return [*table, *more, f"{counted(len(pairs), 'pair')}: {', '.join(how)}" if how else "no pair"]
