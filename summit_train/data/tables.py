"""The text of a data set's list, CSV or list or class folders, as tables of cells with their line numbers."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from summit_train.errors import UserError

VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
COLUMNS = ("path", "label", "num_frames", "fps", "width", "height", "group", "sha256", "reversed")
_ROWS_AT_ONCE = 65536


class ManifestError(UserError, ValueError):
    """A manifest that cannot be used; the message says where, what is wrong and what would be right."""


@dataclass(frozen=True)
class Table:
    """Some rows of a source: their line numbers (0 in class folders) and their cells, column by column."""

    lines: Sequence[int]
    cells: dict[str, Sequence[str]]


def open_text(path: str | Path) -> TextIO:
    """Open a text file for reading; a path is bytes, and any of them come back as they were."""
    return open(path, newline="", encoding="utf-8-sig", errors="surrogateescape")


def file_tables(source: Path) -> Iterator[Table]:
    """A file's rows, of either form, some at a time. Raises ManifestError, naming file and line."""
    try:
        with open_text(source) as file:
            header, line = _header(source, file)
            yield from _csv_tables(source, file, header, line) if header else _list_tables(source, file)
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error


def count_rows(source: Path) -> int:
    """The number of a file's rows. Nothing but the header is checked; raises ManifestError."""
    try:
        with open_text(source) as file:
            _header(source, file)
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise ManifestError(f"{source}: the manifest cannot be read: {error.strerror}") from error


def class_folders(source: Path) -> tuple[str, ...]:
    """The classes of a folder of class folders, sorted: their places are the labels. Raises ManifestError."""
    with os.scandir(source) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ManifestError(
            f"{source}: a folder without sub-folders; wanted a manifest file, or a sub-folder of videos for each class"
        )
    return tuple(names)


def folder_tables(source: Path) -> Iterator[Table]:
    """The videos below each class folder, at any depth, sorted; their paths are relative to `source`."""
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
    """The header's names and its line, the file standing behind it; ([], 0) where there is none."""
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
    """The rows turned into columns, without the blank lines among them."""
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
    """Take a list's line apart: (path, num_frames or "", label); the path may have blanks in it."""
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
    # What has no video's name is a folder of pictures, and lists of those give their number of frames.
    return shorter, count[0], label[0]
