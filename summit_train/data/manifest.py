"""The clips of a data set: read from a CSV, a header-less list or class folders; kept in compact columns.

A clip costs its path's bytes and 21 more, so that ten million of them fit in every loader worker.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

__all__ = [
    "CLASSES_FILE", "COLUMNS", "Manifest", "ManifestError", "ManifestRow",
    "num_clips", "read_classes", "read_manifest", "write_manifest",
]  # fmt: skip

Array = NDArray[Any]
CLASSES_FILE = "classes.txt"
_INT32_MAX = 2**31 - 1
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


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


@dataclass(frozen=True, eq=False)
class Manifest:
    """The clips of a data set, N of them; made by `read_manifest`.

    source: the file or folder it came from; folder: what the stored paths are relative to ("" for files,
    whose paths are relative to `data.root`); paths: all paths' bytes, one after the other, path i being
    paths[offsets[i]:offsets[i + 1]]; labels int32 (N,); frame_counts int32 (N,), -1 where unknown;
    reversed_flags bool (N,); lines int32 (N,): where in the source a clip stands, 0 in class folders.
    """

    source: str
    folder: str
    classes: tuple[str, ...] | None
    paths: bytes
    offsets: NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """The path as the manifest has it: absolute, or relative to `data.root`."""
        stored = self.paths[self.offsets[index] : self.offsets[index + 1]].decode("utf-8", "surrogateescape")
        return os.path.join(self.folder, stored)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def num_frames(self, index: int) -> int | None:
        """The video's frame count, or None where the manifest does not say."""
        count = int(self.frame_counts[index])
        return count if count > 0 else None

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
        """32 hexadecimal digits of the clips' paths, labels and directions, in their order."""
        digest = hashlib.blake2b(digest_size=16, person=b"manifest")
        digest.update(self.offsets.astype("<i8").tobytes())
        digest.update(self.paths)
        digest.update(self.labels.astype("<i4").tobytes())
        digest.update(self.reversed_flags.astype("u1").tobytes())
        return digest.hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """Read a CSV with a header, a header-less list of `path label`, or a folder with a folder for each class.

    CSV: the columns `path,label` and optionally those of `ManifestRow`; others are not read. A label is an
    integer or a name that stands in `classes.txt` beside the file (one name a line, the first is label 0).
    An integer is always the label itself, also where a class is named so.
    List: the label is what follows the last blank; `path num_frames label` too where path is a video's.
    Raises ManifestError, naming file and line.
    """
    source = Path(path)
    classes: tuple[str, ...] | None
    if source.is_dir():
        folder, classes, tables = os.path.abspath(source), class_folders(source), folder_tables(source)
    else:
        folder, classes, tables = "", read_classes(source.parent / CLASSES_FILE), file_tables(source)
    parts = [_columns(source, table, classes) for table in tables]
    if not any(len(part[1]) for part in parts):
        raise ManifestError(f"{source}: there is not one clip in it")
    paths = b"".join(part[0] for part in parts)
    lengths, *arrays = (np.concatenate([part[column] for part in parts]) for column in range(1, 6))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Manifest(str(source), folder, classes, paths, offsets, *arrays)


def num_clips(path: str | Path) -> int:
    """Count a manifest's clips without looking at them. Raises ManifestError where it cannot be read."""
    source = Path(path)
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
    optional = [n for n in COLUMNS[2:] if any(getattr(row, n) not in (None, False) for row in rows)]
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


def _columns(
    source: Path, table: Table, classes: tuple[str, ...] | None
) -> tuple[bytes, Array, Array, Array, Array, Array]:
    """(paths' bytes, their lengths, labels, frame counts, reversed flags, lines) of a table."""
    count = len(table.lines)
    encoded = [path.encode("utf-8", "surrogateescape") for path in table.cells["path"]]
    if b"" in encoded:
        raise ManifestError(f"{source}:{table.lines[encoded.index(b'')]}: the path is empty")
    return (
        b"".join(encoded),
        np.fromiter(map(len, encoded), np.int64, count),
        _labels(source, table, classes),
        _frame_counts(source, table) if "num_frames" in table.cells else np.full(count, -1, np.int32),
        _flags(source, table) if "reversed" in table.cells else np.zeros(count, bool),
        np.array(table.lines, np.int32),
    )


def _labels(source: Path, table: Table, classes: tuple[str, ...] | None) -> NDArray[np.int32]:
    """The labels: integers as they are, names by their place among the classes."""
    texts = table.cells["label"]
    try:
        labels = np.fromiter(map(int, texts), np.int64, len(texts))
    except (ValueError, OverflowError):  # names, or something wrong: slower, one by one
        numbers = {name: number for number, name in enumerate(classes or ())}
        rows = zip(table.lines, texts, strict=True)
        labels = np.array([_label(f"{source}:{line}", text.strip(), numbers) for line, text in rows])
    limit = len(classes) if classes else _INT32_MAX
    for index in np.flatnonzero((labels < 0) | (labels >= limit)).tolist():
        what = f"{CLASSES_FILE} has {limit} classes" if classes else "labels start from 0"
        raise ManifestError(f"{source}:{table.lines[index]}: label {texts[index]} is out of range: {what}")
    return labels.astype(np.int32)


def _label(where: str, text: str, numbers: dict[str, int]) -> int:
    """The label that one cell means. Raises ManifestError: neither an integer nor a known class."""
    if _is_integer(text):
        return max(-1, min(int(text[:12]), _INT32_MAX))
    if text in numbers:
        return numbers[text]
    if not text:
        raise ManifestError(f"{where}: the label is empty")
    if not numbers:
        raise ManifestError(
            f"{where}: label {text!r} is a name, but there is no {CLASSES_FILE} beside the manifest: "
            "write the class names into it, one a line, or use integers"
        )
    near = difflib.get_close_matches(text, numbers, n=1)
    hint = f": did you mean {near[0]!r}?" if near else f" with its {len(numbers)} classes"
    raise ManifestError(f"{where}: the class {text!r} does not stand in {CLASSES_FILE}{hint}")


def _frame_counts(source: Path, table: Table) -> NDArray[np.int32]:
    """The frame counts; an empty cell and -1 mean unknown."""
    texts = table.cells["num_frames"]
    try:
        counts = np.fromiter((int(text) if text else -1 for text in texts), np.int64, len(texts))
    except (ValueError, OverflowError):
        counts = np.array([int(text) if _is_integer(text) and len(text) < 12 else 0 for text in texts])
    for index in np.flatnonzero((counts < -1) | (counts == 0) | (counts > _INT32_MAX)).tolist():
        raise ManifestError(
            f"{source}:{table.lines[index]}: num_frames is {texts[index]!r}: "
            "wanted a positive integer, or nothing"
        )
    return counts.astype(np.int32)


def _flags(source: Path, table: Table) -> NDArray[np.bool_]:
    """The reversed column: 0, 1, false, true, no, yes or empty."""
    texts = table.cells["reversed"]
    flags = [_FLAGS.get(text.strip().lower()) for text in texts]
    if None in flags:
        index = flags.index(None)
        raise ManifestError(f"{source}:{table.lines[index]}: reversed is {texts[index]!r}: wanted 0 or 1")
    return np.array(flags, bool)


def _is_integer(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()
