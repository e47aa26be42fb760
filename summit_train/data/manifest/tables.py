"""From the text of a list (CSV, header-less list or class folders) to columns of numbers; errors name file and line."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from summit_train.data.video.region import Region
from summit_train.data.video.span import TO_THE_END, Span

VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
CLASSES_FILE = "classes.txt"
_BLOCK = 1 << 20  # characters that are read at once
_ROWS = 1 << 14  # of a table
_INT32_MAX = 2**31 - 1
# int() and float() also take `nan`, `1_0` and the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


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
COLUMNS = (*READ_COLUMNS, "fps", "width", "height")

# The columns with a row for each clip, see `reading.Manifest`.
DTYPES: dict[str, DTypeLike] = {
    "labels": np.int32, "frame_counts": np.int32, "reversed_flags": np.bool_, "lines": np.int32, "digests": "V32",
    "spans": [("start", "<i4"), ("end", "<i4")], "more_labels": [("clip", "<i4"), ("label", "<i4")],
    "regions": [(name, "<i4") for name in Region._fields], "groups": np.int32,
}  # fmt: skip
# Empty where no clip needs them; more_labels has rows for some clips only.
OPTIONAL = ("spans", "more_labels", "regions", "groups")
# The rows of a list: their line numbers (0 in class folders), and their cells, column by column.
Table = tuple[Sequence[int], dict[str, Sequence[str]]]


@contextmanager
def opened(path: str | Path, what: str = "") -> Iterator[TextIO]:
    """Open a text file for the block. Raises UserError where it, `what` in the message, cannot be read.

    Bytes that are not UTF-8 become surrogates, because paths may hold any bytes.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape", opener=regular) as file:
            yield file
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: {what}cannot be read: {reason}") from error


def read_tables(source: Path) -> Iterator[Table]:
    """Read a CSV with a header, or header-less lines `path label` or `path num_frames label`. Raises UserError.

    Yields an empty table, and the rows in tables of some thousand, since a list may have millions.
    """
    with opened(source, "the manifest ") as file:
        filled = ((line, text) for line, text in enumerate(iter(file.readline, ""), 1) if text.strip())
        line, head = next(filled, (1, ""))
        blocks = iter(lambda: file.read(_BLOCK) + file.readline(), "")
        names = [name.strip().strip('"') for name in head.split(",")]
        if {"path", "label"} & set(names):
            place = f"{source}:{line}"
            for name in ("path", "label"):
                if names.count(name) != 1:
                    raise UserError(f"{place}: the header must have one column {name!r}, got {', '.join(names)}")
            check_names(place, names, COLUMNS)
            found = _csv_tables(source, blocks, line, names)
        else:
            names = ["path", "num_frames", "label"]
            texts = enumerate(chain([head], _lines_of(blocks)), line)
            rows = ((line, *_list_row(f"{source}:{line}", text)) for line, text in texts if text.strip())
            found = _tables(rows, names)
        yield [], dict.fromkeys(names, ())
        yield from found


def _lines_of(blocks: Iterable[str]) -> Iterator[str]:
    return chain.from_iterable(StringIO(block, newline="") for block in blocks)


def _tables(rows: Iterator[tuple[Any, ...]], names: Sequence[str]) -> Iterator[Table]:
    while some := list(islice(rows, _ROWS)):
        lines, *cells = zip(*some, strict=True)
        yield lines, dict(zip(names, cells, strict=True))


def _csv_tables(source: Path, blocks: Iterator[str], first: int, names: Sequence[str]) -> Iterator[Table]:
    """Yield the rows of blocks of whole lines, which follow the first lines. Raises UserError."""
    for block in blocks:
        if cells := _plain_cells(block, len(names)):
            lines = range(first + 1, first + 1 + len(cells) // len(names))
            yield lines, {name: cells[place :: len(names)] for place, name in enumerate(names)}
            first += len(lines)
        else:  # cells in quotes may reach into the next block, so csv gets all that is left
            yield from _tables(csv_rows(source, _lines_of(chain([block], blocks)), first, len(names)), names)


def _plain_cells(block: str, width: int) -> list[str] | None:
    """Return all cells of a block if each of its lines has `width` and nothing is in quotes, else None."""
    text = block.replace("\r\n", "\n").removesuffix("\n")
    content = np.frombuffer(f"{text}\n".encode("utf-8", "surrogateescape"), np.uint8)
    is_last = content[(content == ord(",")) | (content == ord("\n"))] == ord("\n")
    is_plain = not len(is_last) % width and np.all(is_last.reshape(-1, width) == (np.arange(width) == width - 1))
    return text.replace("\n", ",").split(",") if is_plain and '"' not in text and "\r" not in text else None


def is_video(name: str) -> bool:
    """Return whether a file's name is a video's, and not hidden."""
    return name.lower().endswith(VIDEO_EXTENSIONS) and not name.startswith(".")


def check_names(place: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError for a column that is one edit from a known one which the list lacks; others may have any name.

    A plural is a name of the user's own: groups.
    """
    lacking = [column for column in known if column not in names]
    for name in set(names).difference(known):
        for column in lacking:
            if name != f"{column}s" and _is_one_edit(name, column):
                raise UserError(f"{place}: unknown column {name!r}: did you mean {column!r}?")


def _is_one_edit(name: str, other: str) -> bool:
    """Return whether a letter more, a letter less, another one, or one at another place makes one name the other."""
    shorter, wanted = ({text[:place] + text[place + 1 :] for place in range(len(text))} for text in (name, other))
    return other in shorter or name in wanted or not shorter.isdisjoint(wanted)


def check_classes(place: str | Path, classes: Iterable[str]) -> None:
    """Raise UserError for a class that classes.txt cannot hold. place: what names it, for the message."""
    if broken := next((name for name in classes if "\n" in name or name != name.strip()), None):
        what = f"a class must have a name of one line without a blank around it, got {broken!r}"
        raise UserError(f"{place}: {what}; rename it")


def csv_rows(source: Path, texts: Iterable[str], first: int, width: int) -> Iterator[tuple[Any, ...]]:
    """Yield (line, cells) of the rows of texts that follow the first lines. Raises UserError."""
    rows = csv.reader(texts)
    line = first + 1
    try:
        for row in rows:
            if len(row) == width:
                yield line, *row
            elif any("\n" in cell for cell in row):
                raise UserError(f"{source}:{line}: a double quote is not closed on its line")
            elif row:
                hint = 'put a path with a comma in double quotes: "a, b.mp4",3'
                raise UserError(f"{source}:{line}: {len(row)} fields where the header has {width}; {hint}")
            line = first + rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{source}:{first + rows.line_num}: not a CSV: {error}") from error


def _list_row(place: str, text: str) -> tuple[str, str, str]:
    """Return path, num_frames or "", and label of a header-less line; the path may contain blanks."""
    path, *label = text.strip().rsplit(None, 1)
    if not label or path.endswith(",") or label[0].startswith(","):
        right = "begin the file with the line path,label or separate path and label by a blank"
        raise UserError(f"{place}: {text.strip()[:80]!r} is neither `path label` nor below a header: {right}")
    shorter, *frames = path.rsplit(None, 1)
    # A path without a video's extension is a folder of pictures, and lists of those give the number of frames.
    if path.lower().endswith(VIDEO_EXTENSIONS) or not frames or not frames[0].isdecimal():
        return path, "", label[0]
    return shorter, frames[0], label[0]


def parse_tables(
    source: Path, tables: Iterable[Table], classes: tuple[str, ...] | None, region: str | None = None
) -> dict[str, Any]:
    """Return the columns of DTYPES, "paths", "offsets" and "group_names" (see `reading.Manifest`) of all tables.

    region: data.region. Raises UserError at the first bad cell of a table's column.
    """
    numbers = {name: number for number, name in enumerate(classes or ())}
    groups = {"": -1}
    clips = 0
    parts = list[dict[str, NDArray[Any]]]()
    for table in tables:
        parts.append(_parse_table(source, table, numbers, groups))
        parts[-1]["more_labels"]["clip"] += clips
        parts[-1]["regions"] = np.zeros(0, DTYPES["regions"]) if region is None else parse_regions(source, table)
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
        raise UserError(f"{source}:{lines[cells['path'].index('')]}: the path is empty")
    labels_of = cache(partial(_labels, numbers))
    more = ((clip, text) for clip, text in enumerate(cells["label"]) if ";" in text)
    values = {
        name: _parsed(source, table, name, partial(column.value, name), column.dtype)
        for name, column in OPTIONAL_COLUMNS.items()
    }
    has_spans = bool(cells.keys() & {"start_frame", "end_frame"})
    return {
        "paths": np.frombuffer(paths, np.uint8),
        "lengths": np.fromiter(map(len, each), np.int64, len(each)),
        "labels": _parsed(source, table, "label", lambda text: (*labels_of(text), -1)[0], np.int32),
        "more_labels": np.array(
            [(clip, label) for clip, text in more for label in labels_of(text)[1:]], DTYPES["more_labels"]
        ),
        "frame_counts": values["num_frames"],
        "reversed_flags": values["reversed"],
        "lines": np.array(lines, np.int32),
        "digests": values["sha256"] if "sha256" in cells else np.zeros(0, "V32"),
        "spans": _spans(source, lines, values) if has_spans else np.zeros(0, DTYPES["spans"]),
        "groups": _parsed(source, table, "group", lambda name: groups.setdefault(name, len(groups) - 1), np.int32),
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
            wrong = f"a video has {counts[bad[0]]} frames, and the span {span} does not lie among them"
        raise UserError(f"{source}:{lines[bad[0]]}: {wrong}")
    return spans


def parse_regions(source: Path, table: Table) -> NDArray[np.void]:
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
    found = sorted(parse_label(numbers, word) for word in words.split(";")) if words != ";" else []
    if len(set(found)) < len(found):
        raise ValueError(f"a label must name each class once, got {words!r}")
    return tuple(found)


def parse_label(numbers: dict[str, int], text: str) -> int:
    """Parse a label: an integer as it is, a name by its place among the classes. Raises ValueError."""
    name = text.strip()
    limit = len(numbers) or _INT32_MAX
    if _INTEGER.fullmatch(name):
        if not 0 <= int(name) < limit:
            what = f"{CLASSES_FILE} has {limit} classes" if numbers else "labels start from 0"
            raise ValueError(f"label {text} is out of range: {what}")
        return int(name)
    if name in numbers:
        return numbers[name]
    if not name:
        raise ValueError("the label is empty")
    if not numbers:
        right = "write the class names into it, one a line, or use integers"
        raise ValueError(f"label {name!r} is a name, but {CLASSES_FILE} is missing next to the manifest: {right}")
    near = difflib.get_close_matches(name, numbers, n=1)
    hint = f": did you mean {near[0]!r}?" if near else f" with its {len(numbers)} classes"
    raise ValueError(f"the class {name!r} is not in {CLASSES_FILE}{hint}")
