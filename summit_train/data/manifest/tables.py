"""From a list (CSV, header-less lines or class folders) to columns of numbers; errors name file and line."""

from __future__ import annotations

import csv
import difflib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import regular
from summit_train.data.video.pictures import is_picture
from summit_train.data.video.region import Region
from summit_train.data.video.span import TO_THE_END, Span

VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
CLASSES_FILE = "classes.txt"
_INT32_MAX = 2**31 - 1
# int() and float() also take `nan`, `1_0` and the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}

# The rows of a list: their line numbers (0 in class folders), and their cells, column by column.
Table = tuple[Sequence[int], Mapping[str, Sequence[str]]]

# Columns.


def parse_number(text: str) -> float:
    """Parse a finite decimal number. Raises ValueError."""
    if not _NUMBER.fullmatch(text.strip()) or not math.isfinite(float(text)):
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def parse_integer(text: str) -> int:
    """Parse an integer. Raises ValueError."""
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


@dataclass(frozen=True)
class Column:
    """A column whose cells may be empty.

    default: the value of an empty cell, and of each clip of a list without the column. parse: turns another cell into
    a value, or raises ValueError. check: whether that is a right one. expected: a right cell, for the message.
    """

    dtype: DTypeLike
    default: Any
    parse: Callable[[str], Any]
    check: Callable[[Any], bool]
    expected: str

    def value(self, name: str, text: str) -> Any:
        """Return the value of a cell. Raises ValueError."""
        word = text.strip()
        if not word:
            return self.default
        with suppress(ValueError):
            value = self.parse(word)
            if self.check(value):
                return value
        raise ValueError(f"{name} must be {self.expected}, got {text!r}")


FLAG = Column(np.bool_, False, lambda word: _FLAGS.get(word.lower()), lambda flag: flag is not None, "0 or 1")
_COUNT = Column(
    np.int32, -1, parse_integer, lambda count: count == -1 or 0 < count <= _INT32_MAX, "a positive integer, or empty"
)
_START = Column(
    np.int32, 0, parse_integer, lambda frame: 0 <= frame <= _INT32_MAX, "the number of a frame, 0 or more, or empty"
)
_SHA256 = Column("V32", bytes(32), bytes.fromhex, lambda digest: len(digest) == 32, "64 hexadecimal digits, or empty")
# The optional columns that commands read, by name.
OPTIONAL_COLUMNS = {
    "num_frames": _COUNT,
    "sha256": _SHA256,
    "reversed": FLAG,
    "start_frame": _START,
    "end_frame": replace(_START, default=TO_THE_END),
}
READ_COLUMNS = ("path", "label", "group", *OPTIONAL_COLUMNS)
_KNOWN = (*READ_COLUMNS, "fps", "width", "height")

# The columns with a row for each clip, see `reading.Manifest`.
DTYPES: dict[str, DTypeLike] = {
    "labels": np.int32, "frame_counts": np.int32, "reversed_flags": np.bool_, "lines": np.int32, "digests": "V32",
    "spans": [("start", "<i4"), ("end", "<i4")], "more_labels": [("clip", "<i4"), ("label", "<i4")],
    "regions": [(name, "<i4") for name in Region._fields], "groups": np.int32,
}  # fmt: skip
# Empty where no clip needs them; more_labels has rows for some clips only.
OPTIONAL = ("spans", "more_labels", "regions", "groups")


# From text to tables.


@contextmanager
def opened(path: str | Path, what: str = "") -> Iterator[TextIO]:
    """Open a text file for the block. Raises UserError where it, `what` in the message, cannot be read.

    Also where it is rewritten in place meanwhile: the block may have read half of each version. A file that takes its
    place changes nothing. Bytes that are not UTF-8 become surrogates, because paths may hold any bytes.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape", opener=regular) as file:
            before = os.fstat(file.fileno())
            try:
                yield file
            finally:  # also after an error, which may be of a line that is half of each version
                after = os.fstat(file.fileno())
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    wrong = f"{path}: {what}must not change while it is read, got another version"
                    raise UserError(f"{wrong}; try again when nothing writes to it")
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: {what}cannot be read: {reason}") from error


def read_tables(
    source: Path, file: TextIO, line: int, head: str, *, block: int = 1 << 20, rows: int = 1 << 14
) -> Iterator[Table]:
    """Read the rest of a CSV with a header, or of header-less lines `path label` or `path num_frames label`.

    head: the first line that is not blank, whose number is `line`. Yields an empty table, and the rows in tables, since
    a list may have millions: `block` characters of a CSV or so, `rows` rows of the others. Raises UserError.
    """
    blocks = iter(lambda: file.read(block) + file.readline(), "")
    names = header_names(head)
    if {"path", "label"} & set(names):
        check_header(f"{source}:{line}", names, ("path", "label"), _KNOWN)
        tables = _csv_tables(source, blocks, line, names, rows)
    else:
        names = ["path", "num_frames", "label"]
        texts = enumerate(chain([head], _lines_of(blocks)), line)
        listed = ((line, *_list_row(f"{source}:{line}", text)) for line, text in texts if text.strip())
        tables = _tables(listed, names, rows)
    yield [], dict.fromkeys(names, ())
    yield from tables


def header_names(head: str) -> list[str]:
    return [name.strip().strip('"') for name in head.split(",")]


def check_header(place: str, names: Sequence[str], needed: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError where a header lacks a needed column, has it twice, or misspells a known one that it lacks.

    Other columns may have any name; a plural, such as groups, is one of the user's own.
    """
    for name in needed:
        if names.count(name) != 1:
            raise UserError(f"{place}: the header must have one column {name!r}, got {','.join(names)}")
    lacking = [column for column in known if column not in names]
    for name in set(names).difference(known):
        for column in lacking:
            if name != f"{column}s" and _is_one_edit(name, column):
                raise UserError(f"{place}: unknown column {name!r}: did you mean {column!r}?")


def _is_one_edit(name: str, other: str) -> bool:
    """Tell whether a letter more, a letter less, another one, or one at another place makes one name the other."""
    shorter, wanted = ({text[:place] + text[place + 1 :] for place in range(len(text))} for text in (name, other))
    return other in shorter or name in wanted or not shorter.isdisjoint(wanted)


def _lines_of(blocks: Iterable[str]) -> Iterator[str]:
    return chain.from_iterable(StringIO(block, newline="") for block in blocks)


def _tables(rows: Iterator[tuple[Any, ...]], names: Sequence[str], most: int) -> Iterator[Table]:
    while some := list(islice(rows, most)):
        lines, *cells = zip(*some, strict=True)
        yield lines, dict(zip(names, cells, strict=True))


def _csv_tables(source: Path, blocks: Iterator[str], first: int, names: Sequence[str], most: int) -> Iterator[Table]:
    """Yield the rows of blocks of whole lines, which follow the first lines. Raises UserError."""
    for block in blocks:
        if cells := _plain_cells(block, len(names)):
            lines = range(first + 1, first + 1 + len(cells) // len(names))
            yield lines, {name: cells[place :: len(names)] for place, name in enumerate(names)}
            first += len(lines)
        else:  # cells in quotes may reach into the next block, so csv gets all that is left
            yield from _tables(csv_rows(source, _lines_of(chain([block], blocks)), first, len(names)), names, most)


def _plain_cells(block: str, width: int) -> list[str] | None:
    """Return all cells of a block if each of its lines has `width` and nothing is in quotes, else None."""
    text = block.replace("\r\n", "\n").removesuffix("\n")
    content = np.frombuffer(f"{text}\n".encode("utf-8", "surrogateescape"), np.uint8)
    is_last = content[(content == ord(",")) | (content == ord("\n"))] == ord("\n")
    is_plain = not len(is_last) % width and np.all(is_last.reshape(-1, width) == (np.arange(width) == width - 1))
    return text.replace("\n", ",").split(",") if is_plain and '"' not in text and "\r" not in text else None


def csv_rows(source: Path, texts: Iterable[str], first: int, width: int) -> Iterator[tuple[Any, ...]]:
    """Yield (line, cells) of the rows of texts that follow the first lines. Raises UserError."""
    rows = csv.reader(texts)
    line = first + 1
    try:
        for row in rows:
            if len(row) == width:
                yield line, *row
            elif any("\n" in cell for cell in row):
                raise UserError(f"{source}:{line}: a double quote must be closed on its line, got one that is not")
            elif row:
                right = 'put a path with a comma in double quotes: "a, b.mp4",3'
                raise UserError(f"{source}:{line}: must have {width} cells, as the header has, got {len(row)}; {right}")
            line = first + rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{source}:{first + rows.line_num}: must be a row of a CSV: {error}") from error


def _list_row(place: str, text: str) -> tuple[str, str, str]:
    """Return path, num_frames or "", and label of a header-less line; the path may contain blanks."""
    path, *label = text.strip().rsplit(None, 1)
    if not label or path.endswith(",") or label[0].startswith(","):
        right = "separate path and label by a blank, or begin the file with the line path,label"
        raise UserError(f"{place}: must be `path label` in a list without a header, got {text.strip()[:80]!r}; {right}")
    shorter, *frames = path.rsplit(None, 1)
    # A path without a video's extension is a folder of pictures, and lists of those give the number of frames.
    if path.lower().endswith(VIDEO_EXTENSIONS) or not frames or not frames[0].isdecimal():
        return path, "", label[0]
    return shorter, frames[0], label[0]


# Folders.


def is_video(name: str) -> bool:
    """Tell a video by its name. A hidden file is none."""
    return name.lower().endswith(VIDEO_EXTENSIONS) and not name.startswith(".")


def class_folders(source: Path) -> tuple[str, ...]:
    """Return the names of a folder's class folders, sorted: their places are the labels. Raises UserError."""
    names = tuple(entry.name for entry in folder_entries(str(source)) if entry.is_dir())
    if not names:
        raise UserError(f"{source}: must be a manifest, or have a sub-folder of videos for each class; has none")
    return names


def folder_table(source: Path, classes: Sequence[str], others: Counter[str]) -> Table:
    """List the clips below each class folder, at any depth, sorted; their paths are relative to `source`.

    classes: the class folders. others: of `clips_below`; pictures directly in a class folder count there, too.
    """
    others.update(_kind(entry.name) for entry in folder_entries(str(source)) if not entry.is_dir())
    paths = list[str]()
    labels = list[str]()
    for label, name in enumerate(classes):
        clips = clips_below(os.path.join(source, name), others, is_clip=False)
        paths += sorted(os.path.relpath(clip, source) for clip in clips)
        labels += [str(label)] * len(clips)
    return [0] * len(paths), {"path": paths, "label": labels}


def clips_below(
    folder: str, others: Counter[str], *, is_clip: bool = True, seen: dict[tuple[int, int], str] | None = None
) -> list[str]:
    """Return the paths of a folder's videos, then of the clips in its sub-folders, each sorted; links are followed.

    A folder of numbered pictures without a clip below it is a clip. Hidden entries are left out.

    others: counts the other files, by their extensions. is_clip: False if this folder is none, whatever it holds.
    seen: the folders so far. Raises UserError for a folder that cannot be read, a link to nothing, and a folder that
    links lead to twice, as in a loop: its clips would count twice.
    """
    entries = folder_entries(folder)
    status = os.stat(folder)
    seen = {} if seen is None else seen
    if (first := seen.setdefault((status.st_dev, status.st_ino), folder)) != folder:
        raise UserError(f"{folder}: leads to {first} once more, through a link; remove one of the two")
    files = [entry.name for entry in entries if not entry.is_dir()]
    clips = [os.path.join(folder, name) for name in files if is_video(name)]
    for entry in entries:
        if entry.is_dir():
            clips += clips_below(entry.path, others, seen=seen)
    if is_clip and not clips and any(map(is_picture, files)):
        clips = [folder]
        files = [name for name in files if not is_picture(name)]
    others.update(_kind(name) for name in files if not is_video(name))
    return clips


def skipped_text(others: Counter[str]) -> list[str]:
    """Return a line that counts the files that are not clips, if there are any."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(others.items()))
    return [f"no videos by their names: {kinds}"] if kinds else []


def _kind(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "without an extension"


def folder_entries(folder: str) -> list[os.DirEntry[str]]:
    """Return a folder's entries by name, without hidden ones. Raises UserError for a link to nothing."""
    try:
        with os.scandir(folder) as items:
            entries = sorted((entry for entry in items if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):  # a disk that is not mounted hides its clips
            target = os.readlink(entry.path)
            raise UserError(f"{entry.path}: is a link to {target}, which is not there; mount it, or remove the link")
    return entries


# From tables to columns.


def parse_tables(
    source: Path, tables: Iterable[Table], classes: Sequence[str] | None, region: str | None = None
) -> dict[str, Any]:
    """Return the columns of DTYPES, "paths", "offsets" and "group_names" (see `reading.Manifest`) of all tables.

    region: data.region. Raises UserError at the first bad cell of a table's column.
    """
    numbers = {name: number for number, name in enumerate(classes or ())}
    groups = {"": -1}
    clips = 0
    parts = list[dict[str, NDArray[Any]]]()
    for table in tables:
        part = _parse_table(source, table, numbers, groups)
        part["more_labels"]["clip"] += clips
        part["regions"] = np.zeros(0, DTYPES["regions"]) if region is None else _regions(source, table)
        parts.append(part)
        clips += len(table[0])
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in [*parts[0]]}
    columns["offsets"] = np.cumsum(np.concatenate([[0], columns.pop("lengths")]))
    columns["groups"] = columns["groups"][: clips if len(groups) > 1 else 0]
    return columns | {"group_names": tuple(groups)[1:]}


def _parse_table(
    source: Path, table: Table, numbers: dict[str, int], groups: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """Parse a table. groups: the number of each group so far, which gets those of this table too."""
    lines, cells = table
    paths = "".join(cells["path"]).encode("utf-8", "surrogateescape")
    each = cells["path"] if paths.isascii() else [path.encode("utf-8", "surrogateescape") for path in cells["path"]]
    if "" in cells["path"]:
        line = lines[cells["path"].index("")]
        raise UserError(f"{source}:{line}: path must name a video or a folder of pictures, got an empty cell")
    labels_of = cache(partial(_labels, numbers))
    more = ((clip, label) for clip, text in enumerate(cells["label"]) if ";" in text for label in labels_of(text)[1:])
    values = {
        name: _parsed(source, table, name, partial(column.value, name), column.dtype)
        for name, column in OPTIONAL_COLUMNS.items()
    }
    has_spans = bool(cells.keys() & {"start_frame", "end_frame"})
    return {
        "paths": np.frombuffer(paths, np.uint8),
        "lengths": np.fromiter(map(len, each), np.int64, len(each)),
        "labels": _parsed(source, table, "label", lambda text: (*labels_of(text), -1)[0], np.int32),
        "more_labels": np.array(list(more), DTYPES["more_labels"]),
        "frame_counts": values["num_frames"],
        "reversed_flags": values["reversed"],
        "lines": np.array(lines, np.int32),
        "digests": values["sha256"] if "sha256" in cells else np.zeros(0, "V32"),
        "spans": _spans(source, lines, values) if has_spans else np.zeros(0, DTYPES["spans"]),
        "groups": _parsed(
            source, table, "group", lambda name: groups.setdefault(name.strip(), len(groups) - 1), np.int32
        ),
    }


def _parsed(source: Path, table: Table, name: str, parse: Callable[[str], object], dtype: DTypeLike) -> NDArray[Any]:
    """Return the values of a column; a missing one has empty cells. Each different text is parsed once.

    Raises UserError at the first text of which `parse` raises ValueError.
    """
    lines, cells = table
    if name not in cells:
        return np.full(len(lines), parse(""), dtype)
    texts = cells[name]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    values = np.empty(len(places), dtype)
    for text, place in places.items():
        try:
            values[place] = parse(text)
        except ValueError as error:
            raise UserError(f"{source}:{lines[texts.index(text)]}: {error}") from None
    return values[np.fromiter(map(places.__getitem__, texts), np.int64, len(texts))]


def _spans(source: Path, lines: Sequence[int], values: dict[str, NDArray[Any]]) -> NDArray[np.void]:
    """Return each clip's span, which must be within its video's frames where these are known. Raises UserError."""
    spans = np.empty(len(lines), DTYPES["spans"])
    spans["start"] = values["start_frame"]
    spans["end"] = values["end_frame"]
    counts = values["num_frames"]
    ends = np.where(spans["end"] == TO_THE_END, np.where(counts > 0, counts, _INT32_MAX), spans["end"])
    bad = np.flatnonzero((spans["start"] >= ends) | ((counts > 0) & (ends > counts)))
    if len(bad):
        span = Span(*spans[bad[0]].item())
        wrong = f"end_frame must be after start_frame, got {span.start} to {span.end}"
        if span.end == TO_THE_END or span.start < span.end:
            wrong = f"the span must be within the video's {counts[bad[0]]} frames, got {span}"
        raise UserError(f"{source}:{lines[bad[0]]}: {wrong}")
    return spans


def _regions(source: Path, table: Table) -> NDArray[np.void]:
    """Return each clip's region by the columns of data.region. Raises UserError at the first bad one."""
    lines, cells = table
    if lacking := [name for name in Region._fields if name not in cells]:
        columns = ",".join(Region._fields)
        raise UserError(f"{source}: must have {columns} with data.region columns; lacks {', '.join(lacking)}")
    regions = []
    for line, *texts in zip(lines, *(cells[name] for name in Region._fields), strict=True):
        words = [text.strip() for text in texts]
        numbers = [int(word) if _INTEGER.fullmatch(word) else -1 for word in words]
        left, top, width, height = numbers
        if not any(words):
            numbers = [0] * len(words)
        elif min(numbers) < 0 or not width or not height or max(left + width, top + height) > _INT32_MAX:
            right = "whole pixels of the frame, width and height 1 or more, or all four cells empty"
            raise UserError(f"{source}:{line}: {','.join(Region._fields)} must be {right}, got {','.join(texts)}")
        regions.append(tuple(numbers))
    return np.array(regions, DTYPES["regions"])


def label_text(labels: Sequence[int]) -> int | str:
    """Return a label's cell: the number of one, `3;17` of several, `;` of none."""
    return labels[0] if len(labels) == 1 else ";".join(map(str, labels)) or ";"


def _labels(numbers: dict[str, int], text: str) -> tuple[int, ...]:
    """Parse what `label_text` writes, with names or integers, rising."""
    words = text.strip()
    if ";" not in words or words in numbers:  # a class may have a semicolon in its name
        return (parse_label(numbers, text),)
    labels = sorted(parse_label(numbers, word) for word in words.split(";")) if words != ";" else []
    if len(set(labels)) < len(labels):
        raise ValueError(f"label must name each class once, got {words!r}")
    return tuple(labels)


def parse_label(numbers: dict[str, int], text: str) -> int:
    """Parse a label: an integer as it is, a name by its place among the classes. Raises ValueError."""
    name = text.strip()
    if _INTEGER.fullmatch(name):
        highest = (len(numbers) or _INT32_MAX) - 1
        if 0 <= int(name) <= highest:
            return int(name)
        why = f", as {CLASSES_FILE} has {len(numbers)} classes" if numbers else ""
        raise ValueError(f"label must be from 0 to {highest}{why}, got {name}")
    if name in numbers:
        return numbers[name]
    if not numbers:
        right = "write the class names into it, one a line, or use integers"
        what = f"label must be an integer, as {CLASSES_FILE} is missing next to the manifest"
        raise ValueError(f"{what}, got {name!r}; {right}")
    near = difflib.get_close_matches(name, numbers, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    what = f"label must be one of the {len(numbers)} classes in {CLASSES_FILE}"
    raise ValueError(f"{what}, got {name!r}{hint}")
