"""From the text of a list (CSV, header-less list or class folders) to columns of numbers; errors name file and line."""

from __future__ import annotations

import csv
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from summit_train.errors import UserError

VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
COLUMNS = ("path", "label", "num_frames", "fps", "width", "height", "group", "sha256", "reversed")
CLASSES_FILE = "classes.txt"
_ROWS_AT_ONCE = 65536
_INT32_MAX = 2**31 - 1
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class ManifestError(UserError):
    """A manifest cannot be used; the message says where, what is wrong and what would be right."""


@dataclass(frozen=True)
class Table:
    """Some rows of a source: their line numbers (0 in class folders) and their cells, column by column."""

    lines: Sequence[int]
    cells: dict[str, Sequence[str]]


def open_text(path: str | Path) -> TextIO:
    """Open a text file for reading; bytes that are no UTF-8 survive as surrogates, because paths may hold any bytes."""
    return open(path, newline="", encoding="utf-8-sig", errors="surrogateescape")


def file_tables(source: Path) -> Iterator[Table]:
    """Yield a file's rows, of either form, some at a time. Raises ManifestError."""
    try:
        with open_text(source) as file:
            header, line = _header(source, file)
            yield from _csv_tables(source, file, header, line) if header else _list_tables(source, file)
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error


def count_rows(source: Path) -> int:
    """Count a file's rows; only the header is checked. Raises ManifestError."""
    try:
        with open_text(source) as file:
            _header(source, file)
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error


def class_folders(source: Path) -> tuple[str, ...]:
    """Return the names of a folder's class folders, sorted: their places are the labels. Raises ManifestError."""
    with os.scandir(source) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ManifestError(
            f"{source}: a folder without sub-folders; wanted a manifest file, or a sub-folder of videos for each class"
        )
    return tuple(names)


def folder_tables(source: Path) -> Iterator[Table]:
    """Yield the videos below each class folder, at any depth, sorted; their paths are relative to `source`."""
    for label, name in enumerate(class_folders(source)):
        paths = sorted(
            os.path.relpath(os.path.join(folder, file), source)
            for folder, _, files in os.walk(source / name)
            for file in files
            if _is_video(file) and not file.startswith(".")
        )
        if paths:
            yield Table([0] * len(paths), {"path": paths, "label": [str(label)] * len(paths)})


def _is_video(path: str) -> bool:
    return path.lower().endswith(VIDEO_EXTENSIONS)


def _header(source: Path, file: TextIO) -> tuple[list[str], int]:
    """Return the header's names and its line, with the file positioned after it; ([], 0) where there is none."""
    for line, text in enumerate(iter(file.readline, ""), 1):
        if text.strip():
            names = [name.strip().strip('"') for name in text.split(",")]
            if "path" in names or "label" in names:
                _check_header(f"{source}:{line}", names)
                return names, line
            break
    file.seek(0)
    return [], 0


def _check_header(where: str, header: list[str]) -> None:
    for name in ("path", "label"):
        if header.count(name) != 1:
            raise ManifestError(f"{where}: wanted one column {name!r} in the header; it has {', '.join(header)}")
    for name in header:
        near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.8)
        if near and near[0] != name:
            raise ManifestError(f"{where}: unknown column {name!r}: did you mean {near[0]!r}?")


def _csv_tables(source: Path, file: TextIO, header: list[str], line: int) -> Iterator[Table]:
    rows = csv.reader(file)
    while True:
        try:
            chunk = list(islice(rows, _ROWS_AT_ONCE))
        except csv.Error as error:
            raise ManifestError(f"{source}:{line + rows.line_num}: not a CSV: {error}") from error
        if not chunk:
            return
        # One row is one line, blank lines being empty rows, so a row's place is its line number.
        lines = range(line + 1, line + 1 + len(chunk))
        _check_rows(source, chunk, lines, len(header))
        line += len(chunk)
        yield _table(header, lines, chunk)


def _table(header: list[str], lines: Sequence[int], rows: Sequence[list[str]]) -> Table:
    """Transpose rows to columns, without the blank lines."""
    if [] in rows:
        lines = [line for line, row in zip(lines, rows, strict=True) if row]
        rows = [row for row in rows if row]
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return Table(lines, dict(zip(header, columns, strict=True)))


def _check_rows(source: Path, rows: list[list[str]], lines: Sequence[int], width: int) -> None:
    if set(map(len, rows)) <= {width, 0}:
        return
    for line, row in zip(lines, rows, strict=True):
        if any("\n" in cell for cell in row):
            raise ManifestError(f"{source}:{line}: a double quote is not closed on its line")
        if len(row) not in (width, 0):
            raise ManifestError(
                f"{source}:{line}: {len(row)} fields where the header has {width}; a path with a comma "
                'in it wants double quotes: "a, b.mp4",3'
            )


def _list_tables(source: Path, file: TextIO) -> Iterator[Table]:
    rows = ((n, *_split(f"{source}:{n}", text)) for n, text in enumerate(file, 1) if not text.isspace())
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        lines, paths, frame_counts, labels = zip(*chunk, strict=True)
        yield Table(lines, {"path": paths, "num_frames": frame_counts, "label": labels})


def _split(where: str, text: str) -> tuple[str, str, str]:
    """Split a list's line into (path, num_frames or "", label); the path may contain blanks."""
    path, *label = text.strip().rsplit(None, 1)
    if not label:
        raise ManifestError(
            f"{where}: {path[:80]!r} is neither `path label` nor below a header: begin the file with the "
            "line path,label or part path and label by a blank"
        )
    if _is_video(path):
        return path, "", label[0]
    shorter, *count = path.rsplit(None, 1)
    if not count or not count[0].isdecimal():
        return path, "", label[0]
    # A path without a video's extension is a folder of pictures, and lists of those give the number of frames.
    return shorter, count[0], label[0]


class Cells(NamedTuple):
    """Columns of n clips. paths: all paths' bytes, concatenated; lengths: of each path in bytes; frame_counts: -1 where
    unknown; lines: in the source; digests: the files' SHA-256, zeros where unknown, or (0,) where none is known."""

    paths: bytes
    lengths: NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]
    digests: NDArray[np.void] = np.zeros(0, "V32")


def parse_table(source: Path, table: Table, classes: tuple[str, ...] | None) -> Cells:
    """Parse a table. Raises ManifestError at the first bad cell."""
    count = len(table.lines)
    encoded = [path.encode("utf-8", "surrogateescape") for path in table.cells["path"]]
    if b"" in encoded:
        raise ManifestError(f"{source}:{table.lines[encoded.index(b'')]}: the path is empty")
    return Cells(
        b"".join(encoded),
        np.fromiter(map(len, encoded), np.int64, count),
        _labels(source, table, classes),
        _frame_counts(source, table) if "num_frames" in table.cells else np.full(count, -1, np.int32),
        _flags(source, table) if "reversed" in table.cells else np.zeros(count, bool),
        np.array(table.lines, np.int32),
        _digests(source, table) if "sha256" in table.cells else np.zeros(0, "V32"),
    )


def _labels(source: Path, table: Table, classes: tuple[str, ...] | None) -> NDArray[np.int32]:
    """Parse labels: integers as they are, names by their place among the classes."""
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
    """Parse one label. Raises ManifestError where it is neither an integer nor a known class."""
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
    """Parse frame counts; an empty cell and -1 mean unknown."""
    texts = table.cells["num_frames"]
    try:
        known = texts if "" not in texts else [text or "-1" for text in texts]
        counts = np.fromiter(map(int, known), np.int64, len(texts))
    except (ValueError, OverflowError):
        counts = np.array([int(text) if _is_integer(text) and len(text) < 12 else 0 for text in texts])
    for index in np.flatnonzero((counts < -1) | (counts == 0) | (counts > _INT32_MAX)).tolist():
        raise ManifestError(
            f"{source}:{table.lines[index]}: num_frames is {texts[index]!r}: wanted a positive integer, or nothing"
        )
    return counts.astype(np.int32)


def _flags(source: Path, table: Table) -> NDArray[np.bool_]:
    """Parse the reversed column: 0, 1, false, true, no, yes or empty."""
    texts = table.cells["reversed"]
    meaning = {text: _FLAGS.get(text.strip().lower()) for text in set(texts)}
    if None in meaning.values():
        index = next(index for index, text in enumerate(texts) if meaning[text] is None)
        raise ManifestError(f"{source}:{table.lines[index]}: reversed is {texts[index]!r}: wanted 0 or 1")
    return np.fromiter(map(meaning.__getitem__, texts), bool, len(texts))


def _digests(source: Path, table: Table) -> NDArray[np.void]:
    """Parse the sha256 column: 64 hexadecimal digits, or nothing."""
    texts = table.cells["sha256"]
    for line, text in zip(table.lines, texts, strict=True):
        if text and not _SHA256.fullmatch(text):
            raise ManifestError(f"{source}:{line}: sha256 is {text!r}: wanted 64 hexadecimal digits, or nothing")
    return np.frombuffer(b"".join(bytes.fromhex(text) if text else bytes(32) for text in texts), "V32")


def _is_integer(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()
