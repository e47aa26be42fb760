"""A data set's list of clips, read from a CSV, a header-less list, class folders or a packed set, as compact columns.

A large file is parsed once, into columns on the disk that all processes of a node map (see `columns.py`). Ten million
clips then cost a process only the pages that it touches, and a loader worker receives the folder's name, not a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import write_json, write_text
from summit_train.data.manifest.columns import StoredRows, cached_folder, file_key, map_column, write_table
from summit_train.data.manifest.rows import ManifestRow
from summit_train.data.manifest.tables import (
    CLASSES_FILE,
    DTYPES,
    Columns,
    ManifestError,
    Table,
    class_folders,
    file_tables,
    folder_tables,
    opened,
    parse_table,
)
from summit_train.data.video.span import WHOLE, Span

# Each process parses a smaller file itself: that is quick and leaves nothing beside the file.
CACHED_BYTES = 8 << 20
# A packed set: its record, the columns of its manifest, and the folder that exists until it is finished.
PACK_FILE, PACKED_MANIFEST, PACKING_FOLDER = "pack.json", "manifest", ".packing"
# The columns of a list that `read_rows` parses; it copies the others.
_KNOWN = {"path", "label", "num_frames", "group", "sha256", "reversed", "start_frame", "end_frame"}
_FORMAT = "columns 3"
_ABOUT = "columns.json"
# Columns are hashed in pieces of this many rows, without a copy of the whole.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Manifest:
    """The N clips of a data set, from `read_manifest`. A stored manifest is pickled as its folder's name.

    source: the file or folder it came from. folder: of class folders, to which the stored paths are relative ("" for
    lists, whose paths are relative to `data.root`). paths: all paths' bytes, uint8; path i is
    paths[offsets[i]:offsets[i + 1]]. offsets: uint32 or int64 (N + 1,). labels: int32 (N,). frame_counts: int32 (N,),
    -1 where unknown. reversed_flags: bool (N,). lines: int32 (N,), in the source, 0 in class folders. digests: V32
    (N,), the files' SHA-256, zeros where unknown, or (0,) where none is known. spans: (N,), each clip's `start` and
    `end` in its video, see Span, or (0,) where all are whole videos. stored: the folder of these columns, None where
    they are in memory. stored_fingerprint: as noted there. pixels: what packing did to the pixels ("": nothing).
    """

    source: str
    folder: str
    classes: tuple[str, ...] | None
    paths: NDArray[np.uint8] | StoredRows
    offsets: NDArray[np.uint32] | NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]
    digests: NDArray[np.void] | StoredRows
    spans: NDArray[np.void]
    stored: Path | None = None
    stored_fingerprint: str = ""
    pixels: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Return a clip's path: absolute, or relative to `data.root`."""
        return os.path.join(self.folder, self.stored_path(index))

    def stored_path(self, index: int) -> str:
        """Return a clip's path as it enters the fingerprint: in class folders relative to them."""
        content = self.paths[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return content.decode("utf-8", "surrogateescape")

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

    def no_flow(self) -> str | None:
        """Return why the list can have no optical flow, with the place of the first such clip; None where it can."""
        if not self.reversed_flags.any():
            return None
        place = self.place(int(np.argmax(self.reversed_flags)))
        return f"{place}: this clip is played backwards, and its flow is not that of the video read backwards"

    def span(self, index: int) -> Span:
        """Return the clip's frames in its video."""
        return Span(*self.spans[index].item()) if len(self.spans) else WHOLE

    @property
    def has_spans(self) -> bool:
        """Return whether a clip is less than its whole video."""
        return bool(np.any(self.spans["start"] != WHOLE.start) or np.any(self.spans["end"] != WHOLE.end))

    def row(self, index: int) -> ManifestRow:
        """Return a clip's row without the columns that training does not read (see `read_rows`)."""
        path, label, num_frames, digest = (
            self.path(index),
            self.label(index),
            self.num_frames(index),
            self.sha256(index),
        )
        row = ManifestRow(path, label, num_frames, sha256=digest.hex() if digest else None)
        return replace(row, reversed=self.is_reversed(index)).with_span(self.span(index))

    @property
    def num_classes(self) -> int:
        """Return the number of named classes, or the largest label plus one where there are no names."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, label by label: numbers where there are no names."""
        return self.classes or tuple(map(str, range(self.num_classes)))

    def place(self, index: int) -> str:
        """Return a clip's place as file:line (in class folders, its path)."""
        line = int(self.lines[index])
        return f"{self.source}:{line}" if line else self.path(index)

    def check_labels(self, num_classes: int) -> None:
        """Raise ManifestError at the first label of `num_classes` or more, or if another number of classes is named."""
        bad = np.flatnonzero(self.labels >= num_classes)
        if len(bad):
            raise ManifestError(
                f"{self.place(bad[0])}: label {self.label(bad[0])} is out of range: model.num_classes is "
                f"{num_classes}, so labels go from 0 to {num_classes - 1}; this manifest needs "
                f"{max(self.num_classes, int(self.labels.max()) + 1)}"
            )
        if self.classes is not None and len(self.classes) != num_classes:
            named = f"{self.source} has {len(self.classes)} classes by its {'folders' if self.folder else CLASSES_FILE}"
            raise ManifestError(f"model.num_classes must be {len(self.classes)}, got {num_classes}: {named}")

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
        """Return 32 hexadecimal digits of the clips' paths, labels, directions and spans, in order.

        Whole videos have the same one with and without columns for spans. A set of packed bytes has the fingerprint of
        its videos; packing that changes the pixels changes it.
        """
        # Hashing ten million clips takes seconds, and every process would have to read all columns.
        if self.stored_fingerprint:
            return self.stored_fingerprint
        digest = hashlib.blake2b(digest_size=16, person=b"manifest")
        columns: list[tuple[Any, Any]] = [(self.offsets, "<i8"), (self.paths, "u1")]
        columns += [(self.labels, "<i4"), (self.reversed_flags, "u1")]
        columns += [(self.spans, DTYPES["spans"])] if self.has_spans else []
        for column, dtype in columns:
            for start in range(0, len(column), _AT_ONCE):
                digest.update(column[start : start + _AT_ONCE].astype(dtype).tobytes())
        digest.update(self.pixels.encode())
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
    if (source / PACK_FILE).is_file():
        return open_columns(source / PACKED_MANIFEST, str(source))
    if (source / PACKING_FOLDER).is_dir():
        raise ManifestError(f"{source}: its packing was not finished; `data pack` goes on with it")
    if source.is_dir():
        return _in_memory(source, os.path.abspath(source), class_folders(source), folder_tables(source))
    classes = read_classes(source.parent / CLASSES_FILE)
    if source.is_file() and source.stat().st_size >= CACHED_BYTES:
        columns = _cached(source, classes)
        if columns is not None:
            return open_columns(columns, str(source))
    return _in_memory(source, "", classes, file_tables(source))


def _in_memory(source: Path, folder: str, classes: tuple[str, ...] | None, tables: Iterable[Table]) -> Manifest:
    parts = list(_parsed(source, classes, tables))
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["offsets"] = np.concatenate([[0], columns["offsets"]])
    return Manifest(str(source), folder, classes, **columns)


def _parsed(source: Path, classes: tuple[str, ...] | None, tables: Iterable[Table]) -> Iterator[Columns]:
    """Yield the columns of each table; "offsets" are the ends of its paths. Raises ManifestError."""
    end = np.int64(0)
    for table in tables:
        columns = parse_table(source, table, classes)
        columns["offsets"] = end + np.cumsum(columns.pop("lengths"))
        end = columns["offsets"][-1]
        yield columns
    if not end:
        raise ManifestError(f"{source}: there is not one clip in it")


def _cached(source: Path, classes: tuple[str, ...] | None) -> Path | None:
    """Return the folder of a file's columns, made now if need be; None where none can be written."""

    def build(folder: Path) -> None:
        wide = source.stat().st_size >= 1 << 32
        write_columns(folder, _parsed(source, classes, file_tables(source)), classes, wide=wide)
        if key != file_key(source, _FORMAT, *(classes or ())):
            raise ManifestError(f"{source}: is being written while it is read; wait for its writer")

    try:
        key = file_key(source, _FORMAT, *(classes or ()))
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error
    return cached_folder(source, key, build)


def read_rows(manifest: Manifest) -> Iterator[ManifestRow]:
    """Yield every clip's row with all columns of its list. Raises ManifestError."""
    if manifest.is_packed or manifest.folder:
        yield from map(manifest.row, range(len(manifest)))
        return
    clips = count()
    for table in file_tables(Path(manifest.source)):
        groups = table.cells.get("group", [""] * len(table.lines))
        others = {name: cells for name, cells in table.cells.items() if name not in _KNOWN}
        for line, group in enumerate(groups):
            cells = tuple((name, column[line]) for name, column in others.items())
            yield replace(manifest.row(next(clips)), group=group or None, others=cells)


def open_columns(folder: Path, source: str) -> Manifest:
    """Open the manifest in a folder that `write_columns` filled. Raises ManifestError where it is damaged."""
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        classes = None if about["classes"] is None else tuple(about["classes"])
        more = {"stored": folder, "stored_fingerprint": about["fingerprint"], "pixels": about["pixels"]}
        return Manifest(source, "", classes, **_mapped(folder, about.get("spans", False)), **more)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if folder == Path(source) / PACKED_MANIFEST:
            raise ManifestError(f"{source}: is damaged ({error}); `data verify` says what else is") from error
        raise ManifestError(f"{folder}: what was worked out from {source} is damaged ({error}); delete it") from error


def _mapped(folder: Path, has_spans: bool) -> dict[str, Any]:
    """Map the columns of a folder. Raises ValueError where they do not fit together."""
    columns: dict[str, Any] = {
        name: map_column(folder / f"{name}.npy", dtype)
        for name, dtype in DTYPES.items()
        if name != "spans" or has_spans
    }
    lengths = {len(column) for name, column in columns.items() if name != "digests" or len(column)}
    columns.setdefault("spans", np.zeros(0, DTYPES["spans"]))
    if len(columns["digests"]):
        columns["digests"] = StoredRows(folder / "digests.npy", DTYPES["digests"])
    columns["offsets"] = map_column(folder / "offsets.npy", np.uint32, np.int64)
    columns["paths"] = StoredRows(folder / "paths.npy", np.uint8)
    if lengths != {len(columns["offsets"]) - 1} or columns["offsets"][-1] != len(columns["paths"]):
        raise ValueError(f"{folder}: its columns are not of one length")
    return columns


def _reopen(folder: Path, source: str, fingerprint: str) -> Manifest:
    """Unpickle a stored manifest in a loader worker."""
    manifest = open_columns(folder, source)
    if manifest.fingerprint() != fingerprint:
        raise ManifestError(f"{folder}: was written anew while a run was using it; start the run again")
    return manifest


def write_columns(
    folder: Path, parts: Iterable[Columns], classes: tuple[str, ...] | None, *, wide: bool, pixels: str = ""
) -> str:
    """Write the columns that `open_columns` opens, with one part at a time in memory; return their fingerprint.

    parts: their "offsets" are the ends of the paths. wide: the paths may have more than 4 GiB together.
    """
    dtypes = DTYPES | {"paths": np.uint8, "offsets": np.int64 if wide else np.uint32}
    write_table(folder, dtypes, chain([{"offsets": np.zeros(1, np.int64)}], parts))
    has_spans = len(map_column(folder / "spans.npy", DTYPES["spans"])) > 0
    if not has_spans:  # as in the folders of versions before spans
        (folder / "spans.npy").unlink()
    fingerprint = Manifest("", "", classes, **_mapped(folder, has_spans), pixels=pixels).fingerprint()
    about = {"classes": classes, "pixels": pixels, "fingerprint": fingerprint}
    write_json(folder / _ABOUT, about | {"spans": True} if has_spans else about)
    return fingerprint


def read_classes(path: str | Path) -> tuple[str, ...] | None:
    """Return the class names of a `classes.txt`, label 0 first, or None where there is none. Raises ManifestError."""
    if not Path(path).exists():
        return None
    with opened(path) as file:
        names = tuple(line.strip() for line in file.read().rstrip().splitlines())
    first = dict(zip(reversed(names), range(len(names), 0, -1), strict=True))
    for line, name in enumerate(names, 1):
        if not name or first[name] < line:
            what = f"the class {name!r} stands there twice" if name else "an empty line among the classes"
            raise ManifestError(f"{path}:{line}: {what}; one name a line, each once")
    return names or None


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
        names = manifest.parent / CLASSES_FILE
        raise ManifestError(f"{names}: has other classes than {source}; write to another folder")
