"""The clips of a data set: read from a CSV, a header-less list or class folders; kept in compact columns.

A large file is read once, into columns on the disk that all processes of a node map (`cache.py` says where they lie):
ten million clips then cost a process what it looks at, and a loader worker gets their place, not a copy.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.data.cache import cached_folder, file_key
from summit_train.data.cells import CLASSES_FILE, Cells, parse_table
from summit_train.data.columns import ColumnWriter, StoredBytes, StoredRows, map_column, pieces, spread
from summit_train.data.tables import (
    COLUMNS,
    ManifestError,
    Table,
    class_folders,
    count_rows,
    file_tables,
    folder_tables,
    open_text,
)
from summit_train.files import write_json

__all__ = [
    "CLASSES_FILE", "COLUMNS", "Manifest", "ManifestError", "ManifestRow",
    "num_clips", "read_classes", "read_manifest", "write_manifest",
]  # fmt: skip

Array = NDArray[Any]
# A smaller file is read by each process for itself: it takes a moment, and leaves nothing beside the file.
CACHED_BYTES = 8 << 20
# A packed set: its record, the columns of its manifest, and the folder that is there until it is finished.
PACK_FILE, PACKED_MANIFEST, PACKING_FOLDER = "pack.json", "manifest", ".packing"
_FORMAT = "columns 2"
_ABOUT = "columns.json"
# For people: they are not read, so that columns of such names in other lists are left alone.
_ONLY_WRITTEN = ("duration", "codec")
_COLUMNS: dict[str, DTypeLike] = {
    "labels": np.int32, "frame_counts": np.int32, "reversed_flags": np.bool_, "lines": np.int32, "digests": "V32",
}  # fmt: skip


@dataclass(frozen=True)
class ManifestRow:
    """One clip as it is written: `label` is an integer or a class name, None is left empty."""

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
    """The clips of a data set, N of them; made by `read_manifest`.

    source: the file or folder it came from; folder: what the stored paths are relative to ("" for files,
    whose paths are relative to `data.root`); paths: all paths' bytes, one after the other, path i being
    paths[offsets[i]:offsets[i + 1]]; offsets uint32 or int64 (N + 1,); labels int32 (N,); frame_counts int32 (N,),
    -1 where unknown; reversed_flags bool (N,); lines int32 (N,): where in the source a clip stands, 0 in class folders;
    digests V32 (N,): the files' SHA-256, zeros where unknown, or (0,) where none is known.
    stored: the folder whose columns these are, None where they are this process's own; pixels: what was done to the
    videos' pixels ("": nothing); pickled, a stored manifest is its folder's name.
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
        """The path as the manifest has it: absolute, or relative to `data.root`."""
        return os.path.join(self.folder, self.stored_path(index))

    def stored_path(self, index: int) -> str:
        """The path as it enters the fingerprint: in class folders relative to them."""
        return self.paths[self.offsets[index] : self.offsets[index + 1]].decode("utf-8", "surrogateescape")

    @property
    def is_packed(self) -> bool:
        """Whether its clips lie in shards, in the folder `source`."""
        return self.stored is not None and self.stored == Path(self.source) / PACKED_MANIFEST

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def num_frames(self, index: int) -> int | None:
        """The video's frame count, or None where the manifest does not say."""
        count = int(self.frame_counts[index])
        return count if count > 0 else None

    def sha256(self, index: int) -> bytes | None:
        """The SHA-256 of the clip's file, 32 bytes, or None where the manifest does not say."""
        digest = self.digests[index : index + 1].tobytes()
        return digest if any(digest) else None

    def is_reversed(self, index: int) -> bool:
        """Whether the clip is the video played backwards."""
        return bool(self.reversed_flags[index])

    @property
    def num_classes(self) -> int:
        """The number of classes named, or the largest label plus one where there are no names."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    def place(self, index: int) -> str:
        """Where a clip stands, as file:line (in class folders, its path)."""
        line = int(self.lines[index])
        return f"{self.source}:{line}" if line else self.path(index)

    def check_labels(self, num_classes: int) -> None:
        """Raise ManifestError at the first label that a model of `num_classes` classes does not have."""
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

    def num_duplicates(self) -> int:
        """How many clips repeat an earlier one's path and direction."""
        keys = (hash((self.path(index), self.is_reversed(index))) for index in range(len(self)))
        return len(self) - len(np.unique(np.fromiter(keys, np.int64, len(self))))

    def fingerprint(self) -> str:
        """32 hexadecimal digits of the clips' paths, labels and directions, in their order.

        The same for a list of videos and for the set that their bytes were packed into; another one where the pixels
        were changed on the way.
        """
        # In ten million clips it takes seconds, and every process would have to read all of the columns.
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
    """Read a CSV with a header, a header-less list of `path label`, a folder with a folder for each class, or a packed
    set's folder.

    CSV: the columns `path,label` and optionally those of `ManifestRow`; others are not read. A label is an
    integer or a name that stands in `classes.txt` beside the file (one name a line, the first is label 0).
    An integer is always the label itself, also where a class is named so.
    List: the label is what follows the last blank; `path num_frames label` too where path is a video's.
    Raises ManifestError, naming file and line.
    """
    source = Path(path)
    if _is_packed(source):
        return open_columns(source / PACKED_MANIFEST, str(source))
    if source.is_dir():
        return _in_memory(source, os.path.abspath(source), class_folders(source), folder_tables(source))
    if _is_large(source):
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
    """Whether it is the folder of a packed set. Raises ManifestError for one that is not finished."""
    is_finished = (source / PACK_FILE).is_file()
    if not is_finished and (source / PACKING_FOLDER).is_dir():
        raise ManifestError(f"{source}: its packing was not finished; `data pack` goes on with it")
    return is_finished


def _is_large(source: Path) -> bool:
    try:
        return source.stat().st_size >= CACHED_BYTES
    except OSError:
        return False  # whoever opens it says what is wrong


def _cached(source: Path) -> Path | None:
    """The folder with a file's columns, made now if need be; None where there is no place for one."""
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
    """The manifest in a folder that `write_columns` filled. Raises ManifestError where it is damaged."""
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
    """What a loader worker makes of the manifest that is sent to it."""
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
    """Write clips as the columns that `open_columns` opens, a part in memory at a time.

    wide: whether their paths may be more than 4 GiB together.
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
    """Count a manifest's clips without looking at them. Raises ManifestError where it cannot be read."""
    source = Path(path)
    if _is_packed(source):
        return len(open_columns(source / PACKED_MANIFEST, str(source)))
    count = sum(len(t.lines) for t in folder_tables(source)) if source.is_dir() else count_rows(source)
    if not count:
        raise ManifestError(f"{source}: there is not one clip in it")
    return count


def read_classes(path: str | Path) -> tuple[str, ...] | None:
    """The class names of a `classes.txt`, label 0 first, or None where there is no such file."""
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
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it readable by its owner alone
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _cell(value: object) -> object:
    return int(value) if isinstance(value, bool) else value
