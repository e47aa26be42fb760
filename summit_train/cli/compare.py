"""`summit-train data compare A [B]`: the clips that two lists share, or that one has twice, by path and by content."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.machine import num_cpus
from summit_train.core.progress import followed
from summit_train.core.result import Result, TextTable
from summit_train.core.session import check_single
from summit_train.core.text import counted
from summit_train.data.check import Answer, Item, spread
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.overlap import Pairs, shared_clips
from summit_train.data.manifest.reading import read_rows
from summit_train.data.signatures import NEAR, Near, Signature, digest, near_pairs, sign
from summit_train.data.video.source import DecodeError

Examined = Callable[[str, Item], Answer | DecodeError]
_SHOWN = 20  # pairs on the screen; --json has them all
_MOST_BITS = 16.0  # of 64; unrelated clips differ by 32 on average
_HOW = {"path": "by path", "sha256": "by SHA-256", "near": "by what they show"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    one = "A and B: manifests, or folders of class folders; A alone: find clips that it has twice"
    add("lists", metavar="LIST", nargs="+", help=one)
    near = f"also compare what clips show: list pairs that differ by up to N of 64 bits [{NEAR:g}]"
    add("--near", type=float, nargs="?", const=NEAR, metavar="N", help=near)
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

    def __post_init__(self) -> None:
        rows = list(read_rows(self.manifest))
        self.clips = [Clip(row.path, row.span, row.reversed) for row in rows]
        self.groups = [row.group for row in rows]

    def examined(self, examine: Examined[Item, Answer], items: Sequence[Item]) -> dict[Item, Answer]:
        """Return what is found of each item that can be read."""
        items = list(dict.fromkeys(items))
        found = spread(examine, self.root, items, min(self.workers, len(items)))
        pairs = list(zip(items, followed(found, len(items), "files", in_logs=True), strict=True))
        self.bad += [one for _, one in pairs if isinstance(one, DecodeError)]
        return {item: one for item, one in pairs if not isinstance(one, DecodeError)}

    def hashed(self) -> Manifest:
        """Return the list with the SHA-256 of every file."""
        known = [self.manifest.sha256(number) for number in range(len(self.clips))]
        found = self.examined(digest, [clip.path for clip, own in zip(self.clips, known, strict=True) if own is None])
        digests = [own or found.get(clip.path, bytes(32)) for clip, own in zip(self.clips, known, strict=True)]
        return replace(self.manifest, digests=np.array(digests, "V32"))

    def signatures(self) -> tuple[list[int], list[Signature]]:
        """Return the clips that can be read, and their signatures."""
        missing = {error.path for error in self.bad}
        found = self.examined(sign, [clip for clip in self.clips if clip.path not in missing])
        numbers = [number for number, clip in enumerate(self.clips) if clip in found]
        return numbers, [found[self.clips[number]] for number in numbers]


def run(args: argparse.Namespace) -> Result:
    """Compare the lists. The status is 0 even if pairs are found."""
    check_single("data compare")
    roots: list[str | None] = [None] if args.root is None else args.root
    if len(args.lists) > 2:
        raise UserError(f"data compare takes one list or two, got {len(args.lists)}")
    if len(roots) not in (1, len(args.lists)):
        raise UserError(f"--root must be one folder, or one for A and one for B, got {len(roots)}")
    if args.near is not None and not 0 <= args.near <= _MOST_BITS:
        raise UserError(f"--near must be 0 to {_MOST_BITS:g} bits, got {args.near:g}")
    workers = num_cpus() if args.workers is None else max(0, args.workers)
    sides = dict[tuple[str, str], _Side]()
    for path, root in zip(args.lists, roots * (len(args.lists) // len(roots)), strict=True):
        manifest = read_manifest(path)
        if manifest.is_packed:
            raise UserError(f"{path}: must be a list, got a packed set; try the list that it was packed from")
        side = _Side(manifest, located_root(root, manifest), workers)
        sides[os.path.realpath(path), os.path.realpath(side.root)] = side
    return _compared(list(sides.values()), args.near)


def _compared(sides: Sequence[_Side], limit: float | None) -> Result:
    """Compare two lists, or the clips of one with each other."""
    is_one = len(sides) == 1
    hashed = [side.hashed() for side in sides]
    shared = shared_clips(hashed[0], hashed[-1], [sides[0].root, sides[-1].root])
    if is_one:
        shared = {(clip, other): how for (clip, other), how in shared.items() if clip < other}
    near = list[Near]()
    others = None
    if limit is not None:
        signed = [side.signatures() for side in sides]
        ours, first = signed[0]
        theirs, second = signed[-1]
        near_ones, others = near_pairs(first, second, limit, rising=is_one)
        near = [replace(one, first=ours[one.first], second=theirs[one.second]) for one in near_ones]
    pairs = _pairs((sides[0], sides[-1]), shared, near)
    bad = [error for side in sides for error in side.bad]
    values: dict[str, Any] = {"clips": [len(side.clips) for side in sides], "pairs": pairs, "same_scene": others}
    values["unreadable"] = [{"path": error.path, "error": error.reason} for error in bad]
    text = _text(pairs)
    found = list(zip(*{*shared, *((one.first, one.second) for one in near)}, strict=True)) or [(), ()]
    counts = [{*found[0], *found[1]}] if is_one else map(set, found)
    wheres = ["here twice or more"] if is_one else ["also in B", "also in A"]
    for side, clips, where in zip(sides, counts, wheres, strict=True):
        text.append(f"{side.manifest.source}: {len(clips):,} of {counted(len(side.clips), 'clip')} {where}")
    text += [f"{counted(others, 'other pair')} with the same scene, other motion: same camera?"] if others else []
    return Result([*text, *(f"not compared: {error}" for error in bad)], values=values)


def _pairs(sides: Sequence[_Side], shared: Pairs, near: Sequence[Near]) -> list[dict[str, Any]]:
    """Return a JSON object for each pair: those by path, by SHA-256, then the nearest first."""
    known = {(one.first, one.second): one for one in near}
    pairs = []
    for places in dict.fromkeys([*sorted(shared, key=lambda places: (shared[places], places)), *known]):
        one = known.get(places)
        pair: dict[str, Any] = {"by": shared.get(places, "near"), "distance": one and round(one.distance, 2)}
        pair["mirrored"] = one is not None and one.mirrored
        for name, side, clip in zip("ab", sides, places, strict=True):
            pair[name] = side.clips[clip].values() | ({"group": group} if (group := side.groups[clip]) else {})
        pairs.append(pair)
    return pairs


def _text(pairs: Sequence[dict[str, Any]]) -> list[str | TextTable]:
    """Return the first pairs as a table, and the number of pairs of each kind."""
    rows = []
    for pair in pairs[:_SHOWN]:
        clips = [" ".join(map(str, pair[name].values())) for name in "ab"]
        bits = "" if pair["distance"] is None else f"{pair['distance']:.1f}"
        mirrored = "yes" if pair["mirrored"] else ""
        rows.append(dict(zip(("A", "B", "by", "bits", "mirrored"), (*clips, pair["by"], bits, mirrored), strict=True)))
    more = [f"... and {len(pairs) - _SHOWN:,} more; --json has them all"] if len(pairs) > _SHOWN else []
    kinds = Counter(pair["by"] for pair in pairs)
    mirrored_ones = sum(pair["mirrored"] for pair in pairs)
    how = [f"{kinds[name]:,} {words}" for name, words in _HOW.items() if kinds[name]]
    how += [f"{mirrored_ones:,} mirrored"] if mirrored_ones else []
    table: list[str | TextTable] = [TextTable.of_records(rows)] if rows else []
    return [*table, *more, f"{counted(len(pairs), 'pair')}: {', '.join(how)}" if how else "no pair"]
