"""The clips of a manifest that are used: those that `data scan` did not find bad, by class."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import write_text
from summit_train.core.text import csv_text
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.data.manifest.reading import Manifest
from summit_train.data.manifest.tables import parse_regions, parse_spans, read_tables
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import WHOLE
from summit_train.spec import DataSpec

COLUMNS = ("path", "reason")
_NAMED = 5


@dataclass(frozen=True, eq=False)
class Kept:
    """The clips of a manifest that are used: all `total` without the `excluded` ones, int64 (E,), rising."""

    total: int
    excluded: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self.total - len(self.excluded)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the manifest's numbers of the clips at these places among the kept ones."""
        # e_j - j kept clips come before e_j, the j-th excluded one.
        kept_before = self.excluded - np.arange(len(self.excluded))
        return places + np.searchsorted(kept_before, places, side="right")

    def fingerprint(self) -> str | None:
        """Return 32 hexadecimal digits of the excluded clips, None where there is none."""
        digest = hashlib.blake2b(self.excluded.astype("<i8").tobytes(), digest_size=16, person=b"quarantine")
        return digest.hexdigest() if len(self.excluded) else None


def kept_clips(data: DataSpec, manifest: Manifest) -> Kept:
    """Return the clips without those in data.quarantine. Raises UserError if that is unreadable or names all clips."""
    excluded = [] if data.quarantine is None else list(_matches(read_quarantine(data.quarantine), manifest))
    if len(excluded) == len(manifest):
        raise UserError(f"{data.quarantine}: names every clip of {manifest.source}")
    return Kept(len(manifest), np.array(excluded, np.int64))


def _matches(errors: Iterable[DecodeError], manifest: Manifest) -> dict[int, list[DecodeError]]:
    """Return the clips of a manifest that errors name, rising, with these errors."""
    # A manifest may have a path more than once: in each direction, with several spans and regions.
    prefix = os.path.join(manifest.folder, "")
    bad = defaultdict[bytes, list[DecodeError]](list)
    for error in errors:
        bad[error.path.removeprefix(prefix).encode("utf-8", "surrogateescape")].append(error)
    # One conversion for all: a call for each of millions of clips takes long.
    paths, ends = manifest.paths.tobytes(), manifest.offsets.tolist()
    found = dict[int, list[DecodeError]]()
    for clip, listed in ((clip, bad[paths[a:b]]) for clip, (a, b) in enumerate(pairwise(ends)) if paths[a:b] in bad):
        parts = set(product((WHOLE, manifest.span(clip)), (WHOLE_FRAME, manifest.region(clip))))
        if named := [error for error in listed if (error.span, error.region) in parts]:
            found[clip] = named
    return found


def quarantine_warnings(data: DataSpec, train: Manifest, val: Manifest) -> list[str]:
    """Return a line where rows of data.quarantine name no clip of either list. Raises UserError where none names one.

    A list that was made at another place, of class folders or with another root, would exclude nothing.
    """
    if data.quarantine is None:
        return []
    errors = read_quarantine(data.quarantine)
    matched = {id(error) for one in (train, val) for named in _matches(errors, one).values() for error in named}
    if not (lone := [error for error in errors if id(error) not in matched]):
        return []
    count = "no row names a clip" if len(lone) == len(errors) else f"{len(lone):,} of {len(errors):,} rows name no clip"
    first = f"the first is {lone[0].path}, where the lists have {train.path(0)}"
    line = f"{data.quarantine} (data.quarantine): {count} of {train.source} or {val.source}: {first}"
    if len(lone) == len(errors):
        raise UserError(f"{line}; make it again with `summit-train data scan`")
    return [line]


def read_quarantine(path: str | Path) -> list[DecodeError]:
    """Read the errors as they were written, with paths as the manifest has them. Raises UserError."""
    errors = list[DecodeError]()
    for lines, cells in read_tables(Path(path), COLUMNS, "the quarantine list "):
        if "reason" not in cells:
            raise UserError(f"{path}:1: the header must be {','.join(COLUMNS)}, as `data scan` writes it")
        if not {"left", "top"} <= cells.keys():  # width and height alone are those of the frame
            cells |= dict.fromkeys(Region._fields, [""] * len(lines))
        spans = parse_spans(Path(path), (lines, cells), [-1] * len(lines))
        regions = map(Region._make, parse_regions(Path(path), (lines, cells)).tolist())
        errors += map(DecodeError, cells["path"], cells["reason"], spans, regions)
    return errors


def write_quarantine(path: str | Path, bad: Iterable[DecodeError]) -> None:
    """Write the list, with the errors' paths, whole or not at all. A bad part of a file is written with its numbers."""
    bad = list(bad)
    clips = clip_columns([Clip(error.path, error.span, region=error.region) for error in bad])
    reasons = ["reason", *(error.reason for error in bad)]
    rows = [(name, why, *part) for (name, *part), why in zip(clips, reasons, strict=True)]
    write_text(path, csv_text(rows, exact=True))


def clips_per_class(manifest: Manifest, kept: Kept | None = None) -> dict[str, int]:
    """Return the number of (kept) clips of each class, label by label. A clip of several classes counts in each."""
    clips, labels = manifest.label_pairs()
    names = manifest.class_names
    labels = labels if kept is None else labels[~np.isin(clips, kept.excluded)]
    return dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True))


def class_warnings(train: Manifest, val: Manifest) -> list[str]:
    """Return a line for each way in which training and validation differ in their classes, and for empty folders."""
    sides = (("data.train", train, clips_per_class(train)), ("data.val", val, clips_per_class(val)))
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
