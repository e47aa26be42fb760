"""Splitting an indexed data set by groups (persons, scenes), so that none is in both training and validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from summit_train.data.manifest import CLASSES_FILE, Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.errors import UserError


def split_manifest(
    manifest: str | Path,
    out: str | Path,
    *,
    folds: int,
    group: str,
    only: Sequence[str] = (),
    both_directions: bool = False,
) -> list[tuple[int, int]]:
    """Write out/fold1 .. out/foldN, each with train.csv, val.csv and classes.txt; their numbers of clips.

    group: a regular expression; what it matches first in a file's name (its first parenthesis, if it has one) is the
    clip's group. The sorted groups are cut into `folds` parts as equal as can be, and fold k validates on part k.
    only: the classes that are taken (all where empty). both_directions: the classes become forwards and backwards, and
    every clip is there twice, once played backwards; a network that cannot see time then cannot beat chance.
    Raises UserError where the expression is no good, there are fewer groups than folds, or both directions are
    wanted of clips of which some are reversed already.
    """
    source = read_manifest(manifest)
    rows = _chosen(source, only)
    backwards = next((row.path for row in rows if row.reversed), None)
    if both_directions and backwards is not None:
        raise UserError(f"{source.source}: {backwards} is reversed already; both directions want unreversed clips")
    groups = [_group_of(row.path, group) for row in rows]
    parts = _parts(sorted(set(groups)), folds)
    classes = ("forwards", "backwards") if both_directions else source.classes
    sizes = []
    for number, part in enumerate(parts, 1):
        folder = Path(out) / f"fold{number}"
        folder.mkdir(parents=True, exist_ok=True)
        splits: dict[str, list[ManifestRow]] = {"train": [], "val": []}
        for row, name in zip(rows, groups, strict=True):
            named = replace(row, group=name)
            both = [replace(named, label=0), replace(named, label=1, reversed=True)]
            splits["val" if name in part else "train"] += both if both_directions else [named]
        for split, clips in splits.items():
            write_manifest(folder / f"{split}.csv", clips)
        if classes is not None:
            (folder / CLASSES_FILE).write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
        sizes.append((len(splits["train"]), len(splits["val"])))
    return sizes


def _chosen(source: Manifest, only: Sequence[str]) -> list[ManifestRow]:
    names = source.classes or tuple(str(label) for label in range(source.num_classes))
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise UserError(f"{source.source}: there is no class {unknown[0]!r}; valid: {', '.join(names)}")
    return [
        ManifestRow(source.path(i), source.label(i), source.num_frames(i), reversed=source.is_reversed(i))
        for i in range(len(source))
        if not only or names[source.label(i)] in only
    ]


def _group_of(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).name)
    except re.error as error:
        raise UserError(f"the group {pattern!r} is no regular expression: {error}") from error
    if match is None:
        raise UserError(f"{path}: the group {pattern!r} matches nothing in the file's name")
    return match.group(1) if match.re.groups else match.group()


def _parts(groups: Sequence[str], folds: int) -> list[set[str]]:
    if not 2 <= folds <= len(groups):
        raise UserError(f"{folds} folds of {len(groups)} groups ({', '.join(groups[:12])}): 2 to that many are wanted")
    edges = [len(groups) * i // folds for i in range(folds + 1)]
    return [set(groups[low:high]) for low, high in pairwise(edges)]
