"""From a manifest's cells of text to columns of numbers, every mistake named with its line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.data.tables import ManifestError, Table

CLASSES_FILE = "classes.txt"
_INT32_MAX = 2**31 - 1
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class Cells(NamedTuple):
    """Some clips, n of them: their paths' bytes in a row, then for each the length of its path in bytes, its label,
    its frame count (-1 where unknown), whether it is reversed, its line in the source, and the SHA-256 of its file
    (32 bytes, zeros where unknown; no column at all where none is known)."""

    paths: bytes
    lengths: NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]
    digests: NDArray[np.void] = np.zeros(0, "V32")


def parse_table(source: Path, table: Table, classes: tuple[str, ...] | None) -> Cells:
    """The clips of a table. Raises ManifestError at the first cell that is no good."""
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
    """The reversed column: 0, 1, false, true, no, yes or empty."""
    texts = table.cells["reversed"]
    meaning = {text: _FLAGS.get(text.strip().lower()) for text in set(texts)}
    if None in meaning.values():
        index = next(index for index, text in enumerate(texts) if meaning[text] is None)
        raise ManifestError(f"{source}:{table.lines[index]}: reversed is {texts[index]!r}: wanted 0 or 1")
    return np.fromiter(map(meaning.__getitem__, texts), bool, len(texts))


def _digests(source: Path, table: Table) -> NDArray[np.void]:
    """The sha256 column: 64 hexadecimal digits, or nothing."""
    texts = table.cells["sha256"]
    for line, text in zip(table.lines, texts, strict=True):
        if text and not _SHA256.fullmatch(text):
            raise ManifestError(f"{source}:{line}: sha256 is {text!r}: wanted 64 hexadecimal digits, or nothing")
    return np.frombuffer(b"".join(bytes.fromhex(text) if text else bytes(32) for text in texts), "V32")


def _is_integer(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()
