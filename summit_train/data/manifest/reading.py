"""A data set's list of clips, read from a CSV, a header-less list, class folders or a packed set, as compact columns.

A large file is parsed once, into columns on the disk that all processes of a node map (see `cache.py`). Ten million
clips then cost a process only the pages that it touches, and a loader worker receives the folder's name, not a copy.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.data.manifest.cache import cached_folder, file_key
from summit_train.data.manifest.columns import ColumnWriter, StoredBytes, StoredRows, map_column, pieces, spread
from summit_train.data.manifest.tables import (
    CLASSES_FILE,
    COLUMNS,
    Cells,
    ManifestError,
    Table,
    class_folders,
    count_rows,
    file_tables,
    folder_tables,
    open_text,
    parse_table,
)
from summit_train.files import write_json, write_text

# Each process parses a smaller file itself: that is quick and leaves nothing beside the file.
CACHED_BYTES = 8 << 20
# A packed set: its record, the columns of its manifest, and the folder that exists until it is finished.
PACK_FILE, PACKED_MANIFEST, PACKING_FOLDER = "pack.json", "manifest", ".packing"
_FORMAT = "columns 2"
_ABOUT = "columns.json"
# For people, not read back: lists from elsewhere may use these names for other things.
_ONLY_WRITTEN = ("duration", "codec")
_COLUMNS: dict[str, DTypeLike] = {
    "labels": np.int32, "frame_counts": np.int32, "reversed_flags": np.bool_, "lines": np.int32, "digests": "V32",
}  # fmt: skip


@dataclass(frozen=True)
class ManifestRow:
    """One clip as it is written. label: an integer or a class name. None becomes an empty cell."""

    path: str
    label: int | str
    num_frames: int | None = None
    fps: float | None = None
    width: int | None = None
    height: int | None = None
    group: str | None = None
    sha256: str | None = None
    reversed: bool = False
    duration: float | None = None
    codec: str | None = None


@dataclass(frozen=True, eq=False)
class Manifest:
    """The N clips of a data set, from `read_manifest`. A stored manifest is pickled as its folder's name.

    source: the file or folder it came from. folder: of class folders, to which the stored paths are relative ("" for
    lists, whose paths are relative to `data.root`). paths: all paths' bytes; path i is
    paths[offsets[i]:offsets[i + 1]]. offsets: uint32 or int64 (N + 1,). labels: int32 (N,). frame_counts: int32 (N,),
    -1 where unknown. reversed_flags: bool (N,). lines: int32 (N,), in the source, 0 in class folders. digests: V32
    (N,), the files' SHA-256, zeros where unknown, or (0,) where none is known. stored: the folder of these columns,
    None where they are in memory. pixels: what packing did to the pixels ("": nothing).
    """

    source: str
    folder: str
    classes: tuple[str, ...] | None
    paths: bytes | StoredBytes
    offsets: NDArray[np.uint32] | NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]
    digests: NDArray[np.void] | StoredRows
    stored: Path | None = None
    pixels: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Return a clip's path: absolute, or relative to `data.root`."""
        return os.path.join(self.folder, self.stored_path(index))

    def stored_path(self, index: int) -> str:
        """Return a clip's path as it enters the fingerprint: in class folders relative to them."""
        return self.paths[self.offsets[index] : self.offsets[index + 1]].decode("utf-8", "surrogateescape")

    @property
    def is_packed(self) -> bool:
        """Return whether its clips lie in shards, in the folder `source`."""
        return self.stored is not None and self.stored == Path(self.source) / PACKED_MANIFEST

    def label(self, index: int) -> int:
        """Return a clip's label."""
        return int(self.labels[index])

    def num_frames(self, index: int) -> int | None:
        """Return the video's frame count, or None where unknown."""
        count = int(self.frame_counts[index])
        return count if count > 0 else None

    def sha256(self, index: int) -> bytes | None:
        """Return the SHA-256 of the clip's file, 32 bytes, or None where unknown."""
        digest = self.digests[index : index + 1].tobytes()
        return digest if any(digest) else None

    def is_reversed(self, index: int) -> bool:
        """Return whether the clip is the video played backwards."""
        return bool(self.reversed_flags[index])

    @property
    def num_classes(self) -> int:
        """Return the number of named classes, or the largest label plus one where there are no names."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    def place(self, index: int) -> str:
        """Return a clip's place as file:line (in class folders, its path)."""
        line = int(self.lines[index])
        return f"{self.source}:{line}" if line else self.path(index)

    def check_labels(self, num_classes: int) -> None:
        """Raise ManifestError at the first label of `num_classes` or more."""
        bad = np.flatnonzero(self.labels >= num_classes)
        if len(bad):
            raise ManifestError(
                f"{self.place(bad[0])}: label {self.label(bad[0])} is out of range: model.num_classes is "
                f"{num_classes}, so labels go from 0 to {num_classes - 1}; this manifest needs "
                f"{max(self.num_classes, int(self.labels.max()) + 1)}"
            )

    def check_classes(self, other: Manifest) -> None:
        """Raise ManifestError where two manifests of one experiment number their classes differently."""
        if self.classes is None or other.classes is None or self.classes == other.classes:
            return
        differing = sorted(set(self.classes) ^ set(other.classes)) or ["only in their order"]
        raise ManifestError(
            f"{self.source} and {other.source} do not have the same classes, so their labels mean different "
            f"things: they differ in {', '.join(map(repr, differing[:5]))}"
        )

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits of the clips' paths, labels and directions, in order.

        A set of packed bytes has the fingerprint of its videos; packing that changes the pixels changes it.
        """
        # Hashing ten million clips takes seconds, and every process would have to read all columns.
        known = "" if self.stored is None else _about(self.stored)["fingerprint"]
        return known or self._fingerprint()

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"manifest")
        for piece in chain(
            pieces(self.offsets, "<i8"),
            pieces(self.paths),
            pieces(self.labels, "<i4"),
            pieces(self.reversed_flags, "u1"),
            [self.pixels.encode()],
        ):
            digest.update(piece)
        return digest.hexdigest()

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.stored is None:
            return super().__reduce__()
        return _reopen, (self.stored, self.source, self.fingerprint())


def read_manifest(path: str | Path) -> Manifest:
    """Read a CSV with a header, a header-less list of `path label`, a folder of class folders, or a packed set.

    CSV: the columns `path,label` and optionally those of `ManifestRow`; others are ignored. A label is an integer or a
    name in `classes.txt` beside the file (one name a line, the first is label 0). An integer is always the label
    itself, also where a class has that name. List: the label follows the last blank; `path num_frames label` too, where
    path is a folder of pictures. Raises ManifestError, naming file and line.
    """
    source = Path(path)
    if _is_packed(source):
        return open_columns(source / PACKED_MANIFEST, str(source))
    if source.is_dir():
        return _in_memory(source, os.path.abspath(source), class_folders(source), folder_tables(source))
    if source.is_file() and source.stat().st_size >= CACHED_BYTES:
        columns = _cached(source)
        if columns is not None:
            return open_columns(columns, str(source))
    return _in_memory(source, "", read_classes(source.parent / CLASSES_FILE), file_tables(source))


def _in_memory(source: Path, folder: str, classes: tuple[str, ...] | None, tables: Iterable[Table]) -> Manifest:
    parts = [parse_table(source, table, classes) for table in tables]
    if not any(len(part.lengths) for part in parts):
        raise ManifestError(f"{source}: there is not one clip in it")
    paths = b"".join(part.paths for part in parts)
    offsets = spread(np.concatenate([part.lengths for part in parts]))
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return Manifest(str(source), folder, classes, paths, offsets, **arrays)


def _is_packed(source: Path) -> bool:
    """Return whether it is the folder of a packed set. Raises ManifestError for one that is not finished."""
    is_finished = (source / PACK_FILE).is_file()
    if not is_finished and (source / PACKING_FOLDER).is_dir():
        raise ManifestError(f"{source}: its packing was not finished; `data pack` goes on with it")
    return is_finished


def _cached(source: Path) -> Path | None:
    """Return the folder of a file's columns, made now if need be; None where none can be written."""
    classes_path = source.parent / CLASSES_FILE
    classes = read_classes(classes_path)

    def build(folder: Path) -> None:
        parts = (parse_table(source, table, classes) for table in file_tables(source))
        write_columns(folder, parts, classes, wide=source.stat().st_size >= 1 << 32)
        if not len(map_column(folder / "labels.npy", np.int32)):
            raise ManifestError(f"{source}: there is not one clip in it")
        if key != file_key(source, _FORMAT, *(classes or ())):
            raise ManifestError(f"{source}: is being written while it is read; wait for its writer")

    try:
        key = file_key(source, _FORMAT, *(classes or ()))
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error
    return cached_folder(source, key, build)


def open_columns(folder: Path, source: str) -> Manifest:
    """Open the manifest in a folder that `write_columns` filled. Raises ManifestError where it is damaged."""
    try:
        about = _about(folder)
        offsets = map_column(folder / "offsets.npy", np.uint32, np.int64)
        arrays: dict[str, Any] = {name: map_column(folder / f"{name}.npy", dtype) for name, dtype in _COLUMNS.items()}
        if len(arrays["digests"]):
            arrays["digests"] = StoredRows(folder / "digests.npy", _COLUMNS["digests"])
        paths = StoredBytes(folder / "paths.npy")
        lengths = {len(array) for name, array in arrays.items() if name != "digests" or len(array)}
        if lengths != {len(offsets) - 1} or offsets[-1] != len(paths):
            raise ValueError(f"{folder}: its columns are not of one length")
        classes = None if about["classes"] is None else tuple(about["classes"])
        return Manifest(source, "", classes, paths, offsets, **arrays, stored=folder, pixels=about["pixels"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if folder == Path(source) / PACKED_MANIFEST:
            raise ManifestError(f"{source}: is damaged ({error}); `data verify` says what else is") from error
        raise ManifestError(f"{folder}: what was worked out from {source} is damaged ({error}); delete it") from error


def _reopen(folder: Path, source: str, fingerprint: str) -> Manifest:
    """Unpickle a stored manifest in a loader worker."""
    manifest = open_columns(folder, source)
    if manifest.fingerprint() != fingerprint:
        raise ManifestError(f"{folder}: was written anew while a run was using it; start the run again")
    return manifest


def _about(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return values


def write_columns(
    folder: Path, parts: Iterable[Cells], classes: tuple[str, ...] | None, *, wide: bool, pixels: str = ""
) -> None:
    """Write the columns that `open_columns` opens, with one part at a time in memory.

    wide: the paths may have more than 4 GiB together.
    """
    with ExitStack() as stack:
        written = {name: stack.enter_context(ColumnWriter(folder / f"{name}.npy", t)) for name, t in _COLUMNS.items()}
        paths = stack.enter_context(ColumnWriter(folder / "paths.npy", np.uint8))
        ends = stack.enter_context(ColumnWriter(folder / "offsets.npy", np.int64 if wide else np.uint32))
        end = 0
        ends.append(np.zeros(1, np.int64))
        for part in parts:
            paths.append(part.paths)
            ends.append(end + np.cumsum(part.lengths))
            end += len(part.paths)
            for name, writer in written.items():
                writer.append(getattr(part, name))
    about = {"classes": classes, "pixels": pixels, "fingerprint": ""}
    write_json(folder / _ABOUT, about)
    write_json(folder / _ABOUT, about | {"fingerprint": open_columns(folder, str(folder)).fingerprint()})


def num_clips(path: str | Path) -> int:
    """Count a manifest's clips without parsing them. Raises ManifestError where it cannot be read."""
    source = Path(path)
    if _is_packed(source):
        return len(open_columns(source / PACKED_MANIFEST, str(source)))
    count = sum(len(t.lines) for t in folder_tables(source)) if source.is_dir() else count_rows(source)
    if not count:
        raise ManifestError(f"{source}: there is not one clip in it")
    return count


def read_classes(path: str | Path) -> tuple[str, ...] | None:
    """Return the class names of a `classes.txt`, label 0 first, or None where there is none. Raises ManifestError."""
    try:
        with open_text(path) as file:
            names = tuple(line.strip() for line in file.read().rstrip().splitlines())
    except FileNotFoundError:
        return None
    first = dict(zip(reversed(names), range(len(names), 0, -1), strict=True))
    for line, name in enumerate(names, 1):
        if not name or first[name] < line:
            what = f"the class {name!r} stands there twice" if name else "an empty line among the classes"
            raise ManifestError(f"{path}:{line}: {what}; one name a line, each once")
    return names or None


def write_manifest(path: str | Path, rows: Iterable[ManifestRow]) -> None:
    """Write a manifest CSV, whole or not at all. Optional columns that no row fills are left out."""
    rows = list(rows)
    optional = [n for n in (*COLUMNS[2:], *_ONLY_WRITTEN) if any(getattr(row, n) not in (None, False) for row in rows)]
    names = [*COLUMNS[:2], *optional]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    cells = ([getattr(row, name) for name in names] for row in rows)
    writer.writerows([int(cell) if isinstance(cell, bool) else cell for cell in row] for row in cells)
    write_text(path, text.getvalue())
