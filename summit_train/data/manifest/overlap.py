"""Find the clips of one list that share frames with clips of another, by the lists' columns: nothing is decoded."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from summit_train.core.text import counted
from summit_train.data.manifest.files import located_root
from summit_train.data.manifest.reading import Manifest
from summit_train.data.video.span import TO_THE_END

Pairs = dict[tuple[int, int], str]
_UNKNOWN = bytes(32)


def shared_clips(first: Manifest, second: Manifest, roots: Sequence[str | None]) -> Pairs:
    """Return (clip of the first list, clip of the second) -> "path" or "sha256": one file, in spans that overlap.

    roots: data.root of each list. A packed set stores paths without a root, so its paths are compared as they are
    stored, together with the numbers of frames where both lists have them.
    """
    pairs, lists = Pairs(), (first, second)
    as_stored = first.is_packed or second.is_packed
    places = [None if as_stored else located_root(root, one) for one, root in zip(lists, roots, strict=True)]
    paths = [_paths(one, place) for one, place in zip(lists, places, strict=True)]
    for how, (ours, theirs) in (("path", paths), ("sha256", [one.digests.tolist() for one in lists])):
        clips_of, both = defaultdict[bytes, list[int]](list), set(theirs) - {_UNKNOWN}
        for clip, key in enumerate(ours):
            if key in both:
                clips_of[key].append(clip)
        for other, key in enumerate(theirs):
            for clip in clips_of.get(key, ()):
                counts = {int(first.frame_counts[clip]), int(second.frame_counts[other])} - {-1, 0}
                if how == "path" and as_stored and len(counts) > 1:
                    continue  # two videos of one name
                (start, end), (begin, stop) = first.span(clip), second.span(other)
                if (end == TO_THE_END or begin < end) and (stop == TO_THE_END or start < stop):
                    pairs.setdefault((clip, other), how)
    return pairs


def overlap_warning(pairs: Pairs, val: Manifest) -> list[str]:
    """Return a line if clips of data.val are training clips, too, with the first of them."""
    if not pairs:
        return []
    (_, clip), how = next(iter(pairs.items()))
    name, count = val.clip(clip), counted(len({other for _, other in pairs}), "clip")
    found = f"{count} of data.val also in data.train, such as {name} (same {how})"
    return [f"{found}: the accuracy will be too high; `summit-train data compare` lists them all"]


def _paths(manifest: Manifest, root: str | None) -> list[bytes]:
    """Return every clip's absolute path; without a root as it is stored."""
    paths, ends = manifest.paths.tobytes(), pairwise(manifest.offsets.tolist())
    if root is None:
        return [paths[start:end] for start, end in ends]
    above = os.fsencode(os.path.join(os.path.abspath(root), manifest.folder, ""))
    # Not os.path.join, which takes as long again as all else for a million clips.
    return [one if one.startswith(b"/") else above + one for start, end in ends for one in [paths[start:end]]]
