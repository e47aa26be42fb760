"""From videos to a manifest: every file is decoded in full, by many processes, and only whole ones get in."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from summit_train.data.decode import probe
from summit_train.data.manifest import ManifestError, ManifestRow, read_manifest
from summit_train.data.store import file_sha256
from summit_train.data.tables import VIDEO_EXTENSIONS, class_folders, file_tables, folder_tables
from summit_train.data.video import DecodeError, Encoded

Found = ManifestRow | DecodeError
Examine = Callable[[str, ManifestRow], Found]

_ROWS_PER_WORKER = 16


@dataclass(frozen=True)
class Listing:
    """The videos to look at: rows with a path relative to `root` and a label; nothing else is known yet.

    classes: their names, label by label, None where the labels come from a manifest. skipped: how many files
    of each extension are no videos by their name.
    """

    root: Path
    rows: tuple[ManifestRow, ...]
    classes: tuple[str, ...] | None
    skipped: Counter[str]


def list_videos(source: str | Path, root: str | Path | None = None) -> Listing:
    """What there is to index.

    source: a folder with a folder for each class; a folder of videos, which is one class with the folder's
    name; or a manifest, whose labels, groups and directions are kept and whose paths are relative to `root`
    (default: the manifest's folder). Raises ManifestError where there is no video, and for videos that stand
    beside class folders: nothing says which class they are.
    """
    source = Path(source)
    if not source.is_dir():
        return _listed_in_manifest(source, root)
    names = sorted(entry.name for entry in os.scandir(source) if entry.is_file())
    beside = tuple(ManifestRow(name, 0) for name in names if _is_video(name))
    rows = tuple(_in_class_folders(source))
    if rows and beside:
        raise ManifestError(
            f"{source / beside[0].path}: stands beside class folders; move it into the one of its class"
        )
    if not rows and not beside:
        raise ManifestError(f"{source}: no video in it, no name with {', '.join(VIDEO_EXTENSIONS)}")
    classes = class_folders(source) if rows else (source.resolve().name,)
    return Listing(source, rows or beside, classes, _no_videos(source))


def _listed_in_manifest(source: Path, root: str | Path | None) -> Listing:
    manifest = read_manifest(source)
    tables = file_tables(source)
    groups = [group for table in tables for group in table.cells.get("group", [""] * len(table.lines))]
    rows = tuple(
        ManifestRow(
            manifest.path(index),
            manifest.label(index),
            group=groups[index] or None,
            reversed=manifest.is_reversed(index),
        )
        for index in range(len(manifest))
    )
    return Listing(Path(root or source.parent), rows, manifest.classes, Counter())


def _in_class_folders(source: Path) -> Iterator[ManifestRow]:
    if not any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(source)):
        return
    for table in folder_tables(source):
        for path, label in zip(table.cells["path"], table.cells["label"], strict=True):
            yield ManifestRow(path, int(label))


def _no_videos(source: Path) -> Counter[str]:
    """How many files of each extension below a folder are no videos by their names."""
    files = (file for _, _, files in os.walk(source) for file in files if not _is_video(file))
    return Counter(os.path.splitext(file)[1].lower() or "none" for file in files)


def index_videos(listing: Listing, workers: int) -> Iterator[Found]:
    """For each listed video, in their order: its row with what was found in it, or why it cannot be used.

    workers: processes that decode; 0 decodes in this one. A file that brings its process down is named like
    any other bad one; it does not end the rest.
    """
    if workers:
        yield from _examined(_examine, str(listing.root), listing.rows, min(workers, len(listing.rows)))
    else:
        yield from (_examine(str(listing.root), row) for row in listing.rows)


def _examined(examine: Examine, root: str, rows: Iterable[ManifestRow], workers: int) -> Iterator[Found]:
    """Examine all rows, with a new pool where a file brought one down."""
    left = iter(rows)
    while batch := list(islice(left, workers * _ROWS_PER_WORKER)):
        with _pool(workers) as pool:
            while batch:
                num_found = 0
                try:
                    for found in pool.map(examine, [root] * len(batch), batch):
                        num_found += 1
                        yield found
                except BrokenProcessPool:
                    yield from (_examined_alone(examine, root, row) for row in batch[num_found:])
                    break
                batch = list(islice(left, workers * _ROWS_PER_WORKER))


def _examined_alone(examine: Examine, root: str, row: ManifestRow) -> Found:
    """Examine a video in a process of its own, which may die of it."""
    with _pool(1) as pool:
        try:
            return pool.submit(examine, root, row).result()
        except BrokenProcessPool:
            return DecodeError(row.path, "decoding it kills the process")


def _pool(workers: int) -> ProcessPoolExecutor:
    # Not fork: a child of a process with threads (MPI's, torch's) can hang.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def _examine(root: str, row: ManifestRow) -> Found:
    """Decode one video in full. The error names the path as it is listed."""
    path = os.path.join(root, row.path)
    try:
        info = probe(Encoded(path))
        digest = file_sha256(path)
    except DecodeError as error:
        return DecodeError(row.path, error.reason)
    except OSError as error:
        return DecodeError(row.path, error.strerror or str(error))
    fps = info.fps and round(info.fps, 6)
    return replace(
        row, num_frames=info.num_frames, fps=fps, width=info.width, height=info.height, sha256=digest
    )


def _is_video(name: str) -> bool:
    return name.lower().endswith(VIDEO_EXTENSIONS) and not name.startswith(".")
