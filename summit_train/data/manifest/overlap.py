"""Compare two lists by their columns: the clips that share frames, and the classes that one lacks."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter

from summit_train.core.text import counted
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.reading import Manifest
from summit_train.data.video.span import TO_THE_END

Pairs = dict[tuple[int, int], str]
_Spans = list[tuple[int, int, int]]
_UNKNOWN = bytes(32)
_BLOCK = 1 << 12  # paths that are objects at a time
_NO_END = 1 << 32  # behind every frame
_NAMED = 5  # classes in a message


def shared_clips(first: Manifest, second: Manifest, roots: Sequence[str | None]) -> Pairs:
    """Return (clip of the first list, clip of the second) -> "path" or "sha256": one file, in spans that overlap.

    roots: data.root of each list. A packed set stores paths without a root, so its paths are compared as they are
    stored, together with the numbers of frames where both lists have them.
    """
    pairs = Pairs()
    lists = (first, second)
    as_stored = first.is_packed or second.is_packed
    places = [None if as_stored else located_root(root, manifest) for manifest, root in zip(lists, roots, strict=True)]
    paths = [_paths(manifest, place) for manifest, place in zip(lists, places, strict=True)]
    for how, (blocks, others) in (("path", paths), ("sha256", map(_digests, lists))):
        keys = list(others)
        ours = _by_file(first, blocks, set(chain(*keys)) - {_UNKNOWN})
        theirs = _by_file(second, keys, ours.keys())
        shared = [pair for key, spans in ours.items() for pair in _overlapping(spans, theirs[key])]
        for clip, other in sorted(shared, key=itemgetter(1, 0)):
            counts = {int(first.frame_counts[clip]), int(second.frame_counts[other])} - {-1, 0}
            if how == "sha256" or not as_stored or len(counts) < 2:  # else two videos of one name
                pairs.setdefault((clip, other), how)
    return pairs


@dataclass(frozen=True)
class Leaks:
    """The clips that training and validation share, see `shared_clips`, and the names of shared groups, sorted."""

    clips: Pairs
    groups: Sequence[str] = ()

    def values(self) -> dict[str, int]:
        """Return the numbers for plan.json."""
        return {"shared_clips": len({other for _, other in self.clips}), "shared_groups": len(self.groups)}

    def warnings(self, val: Manifest) -> list[str]:
        """Return a line for clips of data.val that are training clips, too, with the first of them, and for groups."""
        lines = []
        high = "the accuracy will be too high; `summit-train data"
        if self.clips:
            (_, clip), how = next(iter(self.clips.items()))
            shared = f"{counted(self.values()['shared_clips'], 'clip')} with data.train"
            lines.append(
                f"data.val shares {shared}, such as {val.clip(clip)} (same {how}): {high} compare` lists them all"
            )
        if self.groups:
            shared = f"{counted(len(self.groups), 'group')} (column group) with data.train"
            names = ", ".join(self.groups[:3])
            lines.append(f"data.val shares {shared}, such as {names}: {high} split` keeps groups on one side")
        return lines


def _by_file(manifest: Manifest, blocks: Iterable[list[bytes]], among: Set[bytes]) -> dict[bytes, _Spans]:
    """Return the spans of each file among these, by start: (start, end, clip), the end exclusive."""
    spans_of = defaultdict[bytes, _Spans](list)
    first = 0
    for keys in blocks:
        for clip, key in enumerate(() if among.isdisjoint(keys) else keys, first):
            if key in among:
                start, end = manifest.clip(clip).span
                spans_of[key].append((start, _NO_END if end == TO_THE_END else end, clip))
        first += len(keys)
    return {key: sorted(spans) for key, spans in spans_of.items()}


def _overlapping(ours: _Spans, theirs: _Spans) -> Iterator[tuple[int, int]]:
    """Yield the pairs of clips whose spans overlap, each once: one of the two starts within the other."""
    starts, begins = ([start for start, _, _ in spans] for spans in (ours, theirs))
    for start, end, clip in ours:
        for place in range(bisect_left(begins, start), bisect_left(begins, end)):
            yield clip, theirs[place][2]
    for begin, stop, other in theirs:
        for place in range(bisect_right(starts, begin), bisect_left(starts, stop)):
            yield ours[place][2], other


def _paths(manifest: Manifest, root: str | None) -> Iterator[list[bytes]]:
    """Yield every clip's absolute path; without a root as it is stored."""
    above = b"" if root is None else os.fsencode(os.path.join(os.path.abspath(root), manifest.folder, ""))
    for start in range(0, len(manifest), _BLOCK):
        offsets = manifest.offsets[start : start + _BLOCK + 1]
        content = manifest.paths[offsets[0] : offsets[-1]].tobytes()
        paths = (content[start:end] for start, end in pairwise((offsets - offsets[0]).tolist()))
        # Not os.path.join, which takes as long again as all else for a million clips.
        yield [path if path.startswith(b"/") else above + path for path in paths]


def _digests(manifest: Manifest) -> Iterator[list[bytes]]:
    for start in range(0, len(manifest.digests), _BLOCK):
        yield manifest.digests[start : start + _BLOCK].tolist()


def class_warnings(train: Manifest, val: Manifest) -> list[str]:
    """Return a line for each way in which training and validation differ in their classes, and for empty folders."""
    sides = (("data.train", train, train.clips_per_class), ("data.val", val, val.clips_per_class))
    lines = []
    for (here, _, counts), (there, _, others) in (sides, sides[::-1]):
        only = [name for name, count in others.items() if count and not counts.get(name)]
        if only:
            lines.append(f"{_named(only)} in {there} and not in {here}")
    for side, manifest, counts in sides:
        empty = [name for name, count in counts.items() if not count]
        if manifest.folder and empty:
            lines.append(f"{_named(empty)} without a video in {side}: the class folders in {manifest.source} are empty")
    return lines


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} class{'es' if len(names) > 1 else ''} ({', '.join(names[:_NAMED])}{more})"
