"""From the text of a list (CSV, header-less list or class folders) to columns of numbers; errors name file and line."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from summit_train.data.video.span import TO_THE_END, DecodeError, Span

VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
COLUMNS = (
    "path", "label", "num_frames", "fps", "width", "height", "group", "sha256", "reversed", "start_frame", "end_frame"
)  # fmt: skip
CLASSES_FILE = "classes.txt"
_BLOCK = 1 << 20  # characters that are read at once
_ROWS = 1 << 14  # of a table
_INT32_MAX = 2**31 - 1
# int() and float() also take `nan`, `1_0` and the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

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


def read_tables(
    source: Path, columns: tuple[str, str] = ("path", "label"), what: str = "the manifest "
) -> Iterator[Table]:
    """Read a CSV whose header has these columns, or header-less lines `path label` or `path num_frames label`.

    Yields an empty table, and the rows in tables of some thousand, since a list may have millions. Raises UserError,
    with `what` if the file cannot be read.
    """
    with opened(source, what) as file:
        filled = ((line, text) for line, text in enumerate(iter(file.readline, ""), 1) if text.strip())
        line, head = next(filled, (1, ""))
        blocks = iter(lambda: file.read(_BLOCK) + file.readline(), "")
        names = [name.strip().strip('"') for name in head.split(",")]
        if set(columns) & set(names):
            place = f"{source}:{line}"
            for name in columns:
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
    """Raise UserError for a column that is nearly a known one which the list lacks; others may have any name."""
    for name in names:
        near = difflib.get_close_matches(name, [column for column in known if column not in names], n=1, cutoff=0.8)
        if near and name not in known and not _is_series(name, near[0]):
            raise UserError(f"{place}: unknown column {name!r}: did you mean {near[0]!r}?")


def _is_series(name: str, column: str) -> bool:
    """Return whether a name is the plural of a column's, or that with a number: labels, label_2."""
    return re.fullmatch(rf"{re.escape(column)}(s|_?\d+)", name) is not None


def check_classes(place: str | Path, classes: Iterable[str]) -> None:
    """Raise UserError for a class that classes.txt cannot hold. place: what names it, for the message."""
    if broken := next((name for name in classes if "\n" in name or name != name.strip()), None):
        what = f"a class must have a name of one line without a blank around it, got {broken!r}"
        raise UserError(f"{place}: {what}; rename it")


def csv_rows(source: Path, texts: Iterable[str], first: int, width: int) -> Iterator[tuple[Any, ...]]:
    """Yield (line, cells) of the rows of texts that follow the first lines. Raises UserError."""
    rows, line = csv.reader(texts), first + 1
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
    groups, clips, parts = {"": -1}, 0, list[dict[str, NDArray[Any]]]()
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

    def parsed(name: str, parse: Callable[[str], object], dtype: DTypeLike) -> NDArray[Any]:
        """Parse a column, each different text once; a missing one has empty cells."""
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

    labels_of = cache(partial(_labels, numbers))
    more = ((clip, text) for clip, text in enumerate(cells["label"]) if ";" in text)
    labels = parsed("label", lambda text: (*labels_of(text), -1)[0], np.int32)
    frame_counts = parsed("num_frames", partial(_optional, "num_frames"), np.int32)
    spans = parse_spans(source, table, frame_counts.tolist()) if cells.keys() & {"start_frame", "end_frame"} else []
    return {
        "paths": np.frombuffer(paths, np.uint8),
        "lengths": np.fromiter(map(len, each), np.int64, len(each)),
        "labels": labels,
        "frame_counts": frame_counts,
        "reversed_flags": parsed("reversed", partial(_optional, "reversed"), np.bool_),
        "lines": np.array(lines, np.int32),
        "digests": parsed("sha256", partial(_optional, "sha256"), "V32") if "sha256" in cells else np.zeros(0, "V32"),
        "spans": np.array(spans, DTYPES["spans"]),
        "groups": parsed("group", lambda name: groups.setdefault(name, len(groups) - 1), np.int32),
        "more_labels": np.array(
            [(clip, label) for clip, text in more for label in labels_of(text)[1:]], DTYPES["more_labels"]
        ),
    }


def parse_spans(source: Path, table: Table, frame_counts: Sequence[int]) -> list[Span]:
    """Return each clip's span, which must be within its video's frames if above 0. Raises UserError at a bad one."""
    lines, cells = table
    starts, ends = (cells.get(name, [""] * len(lines)) for name in ("start_frame", "end_frame"))
    spans = []
    for line, num_frames, start, end in zip(lines, frame_counts, starts, ends, strict=True):
        try:
            spans.append(parse_span(start, end))
            if num_frames > 0:
                spans[-1].frames("a video", num_frames)
        except DecodeError as error:
            raise UserError(f"{source}:{line}: {error.path} {error.reason}") from None
        except ValueError as error:
            raise UserError(f"{source}:{line}: {error}") from None
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


def parse_span(start: str = "", end: str = "") -> Span:
    """Parse a span's two cells; an empty one means the video's own start or end. Raises ValueError."""
    numbers = [0, TO_THE_END]
    for place, (name, text) in enumerate((("start_frame", start.strip()), ("end_frame", end.strip()))):
        if text:
            numbers[place] = int(text) if _INTEGER.fullmatch(text) else -1
            if not 0 <= numbers[place] <= _INT32_MAX:
                raise ValueError(f"{name} must be the number of a frame, 0 or more, or empty, got {text!r}")
    span = Span(*numbers)
    if span.end != TO_THE_END and span.start >= span.end:
        raise ValueError(f"end_frame must be after start_frame, got {span.start} to {span.end}")
    return span


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
    name, limit = text.strip(), len(numbers) or _INT32_MAX
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


def parse_flag(name: str, text: str) -> bool:
    """Parse the cell of a flag; an empty one is False. Raises ValueError."""
    word = text.strip().lower()
    if word not in _FLAGS:
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return _FLAGS[word]


def _optional(name: str, text: str) -> object:
    """Parse a cell of num_frames (-1: unknown), reversed or sha256 (zeros: unknown); it may be empty."""
    word = text.strip()
    if name == "num_frames":
        count = int(word or -1) if _INTEGER.fullmatch(word or "-1") else 0
        if count != -1 and not 0 < count <= _INT32_MAX:
            raise ValueError(f"num_frames must be a positive integer, or empty, got {text!r}")
        return count
    if name == "reversed":
        return parse_flag(name, word)
    if text and not _SHA256.fullmatch(text):
        raise ValueError(f"sha256 must be 64 hexadecimal digits, or empty, got {text!r}")
    return bytes.fromhex(text) if text else bytes(32)
