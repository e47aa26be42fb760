"""What every importer gives, and how the clips that it lists are found on the disk."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from summit_train.data.manifest import ManifestError, ManifestRow
from summit_train.data.pictures import list_pictures
from summit_train.data.survey import MISSING
from summit_train.data.tables import VIDEO_EXTENSIONS, open_text
from summit_train.data.video import DecodeError


@dataclass(frozen=True)
class Listed:
    """A clip as a data set's own files list it: names that it may have on the disk, the likeliest first; its class."""

    names: tuple[str, ...]
    label: str
    group: str | None = None


@dataclass(frozen=True)
class Annotations:
    """All clips of one list. classes: in the order of their labels; by_stem: names have no folder and no ending."""

    clips: tuple[Listed, ...]
    classes: tuple[str, ...]
    by_stem: bool = False


Find = Callable[[str], Sequence[str]]


def locate(annotations: Annotations, root: str) -> Iterator[ManifestRow | DecodeError]:
    """For each clip its row, with the path below `root`, or why it is left out (most often: it is not there).

    The frames of a folder are counted; videos are left for `data index`. Raises ManifestError for a class that the
    list of classes does not have.
    """
    labels = {name: number for number, name in enumerate(annotations.classes)}
    find = _by_stem(root) if annotations.by_stem else _by_path(root)
    for clip in annotations.clips:
        if clip.label not in labels:
            raise ManifestError(f"{clip.names[0]}: its class {clip.label!r} is not among the {len(labels)} classes")
        found = next((paths for name in clip.names if (paths := find(name))), ())
        if not found:
            yield DecodeError(clip.names[0], MISSING)
        elif len(found) > 1:
            yield DecodeError(clip.names[0], f"is there more than once: {', '.join(found[:5])}")
        else:
            yield _row(root, found[0], labels[clip.label], clip.group)


def _row(root: str, path: str, label: int, group: str | None) -> ManifestRow | DecodeError:
    full = os.path.join(root, path)
    if not os.path.isdir(full):
        return ManifestRow(path, label, group=group)
    try:
        return ManifestRow(path, label, len(list_pictures(full)), group=group)
    except DecodeError as error:
        return DecodeError(path, error.reason)


def _by_path(root: str) -> Find:
    return lambda name: (name,) if os.path.exists(os.path.join(root, name)) else ()


def _by_stem(root: str) -> Find:
    """Videos by their names without folder and ending; the folders are read once."""
    paths = defaultdict[str, list[str]](list)
    for folder, _, files in os.walk(root):
        for file in sorted(files):
            stem, ending = os.path.splitext(file)
            if ending.lower() in VIDEO_EXTENSIONS:
                paths[stem].append(os.path.relpath(os.path.join(folder, file), root))
    return lambda name: paths.get(name, ())


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of a file's lines that are not blank. Raises ManifestError."""
    try:
        with open_text(path) as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) of a CSV whose header has at least these columns. Raises ManifestError."""
    try:
        with open_text(path) as file:
            rows = csv.DictReader(file)
            lacking = [name for name in columns if name not in (rows.fieldnames or ())]
            if lacking:
                raise ManifestError(f"{path}:1: wanted the columns {', '.join(columns)}; {lacking[0]} is not there")
            for row in rows:
                if any(row[name] is None for name in columns):
                    raise ManifestError(f"{path}:{rows.line_num}: fewer fields than the header has")
                yield rows.line_num, row
    except (OSError, csv.Error) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
