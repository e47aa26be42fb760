"""The classes of a data set: their names in `classes.txt`, the clips of each, and classes that only one side has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from summit_train.data.manifest.quarantine import Kept
from summit_train.data.manifest.reading import Manifest, read_classes
from summit_train.data.manifest.tables import CLASSES_FILE, ManifestError
from summit_train.files import write_text

_NAMED = 5


def write_classes(folder: Path, classes: Iterable[str]) -> None:
    """Write the names of the classes, label 0 first, into a folder's classes.txt."""
    write_text(folder / CLASSES_FILE, "".join(f"{name}\n" for name in classes))


def classes_beside(manifest: Path) -> tuple[str, ...] | None:
    """Return the class names that a new manifest at this path will be read with.

    Raises ManifestError where its folder is missing.
    """
    if not manifest.parent.is_dir():
        raise ManifestError(f"{manifest.parent}: no such folder; make it first")
    return read_classes(manifest.parent / CLASSES_FILE)


def check_beside(manifest: Path, classes: tuple[str, ...] | None, source: Path) -> None:
    """Raise ManifestError where a new manifest of these classes would be misread, or its folder is missing."""
    if classes_beside(manifest) not in (None, classes):
        raise ManifestError(
            f"{manifest.parent / CLASSES_FILE}: has other classes than {source}; write to another folder"
        )


def class_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of a manifest's classes, label by label: numbers where it has no names."""
    return manifest.classes or tuple(map(str, range(manifest.num_classes)))


def clips_per_class(manifest: Manifest, kept: Kept | None = None) -> dict[str, int]:
    """Return the number of (kept) clips of each class, label by label."""
    labels = manifest.labels if kept is None else np.delete(manifest.labels, kept.excluded)
    names = class_names(manifest)
    return dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True))


def class_warnings(train: Manifest, val: Manifest) -> list[str]:
    """Return a line for each way in which training and validation differ in their classes, and for empty folders."""
    sides = {"data.train": clips_per_class(train), "data.val": clips_per_class(val)}
    present = {side: {name: None for name, count in counts.items() if count} for side, counts in sides.items()}
    lines = [
        f"{_named(only)} in {other} and not in {side}"
        for side, other in (("data.train", "data.val"), ("data.val", "data.train"))
        if (only := [name for name in present[other] if name not in present[side]])
    ]
    for side, manifest in (("data.train", train), ("data.val", val)):
        empty = [name for name, count in sides[side].items() if not count]
        if manifest.folder and empty:
            lines.append(f"{_named(empty)} without a video in {side}: the class folders in {manifest.source} are empty")
    return lines


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} class{'es' if len(names) > 1 else ''} ({', '.join(names[:_NAMED])}{more})"
