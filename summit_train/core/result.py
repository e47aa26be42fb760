"""Print the result of a command, the only place that does: as text for people, or as one JSON object."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from summit_train.core.text import NONE, printable


@dataclass(frozen=True)
class TextTable:
    """Rows of equal length as aligned columns: the first `left` columns flush left, the others flush right.

    rich's Table takes 9 s for the 20,000 rows of a data set.
    """

    rows: Sequence[Sequence[str]]
    left: int = 1
    indent: str = ""

    @classmethod
    def of_records(cls, records: Sequence[Mapping[str, str]]) -> TextTable:
        """Return records of equal keys as a table under a header.

        Columns of numbers are flush right. Columns in which every cell is empty or a dash are left out.
        """
        columns = []
        for name in records[0]:
            cells = [record[name] for record in records]
            if all(cell in ("", NONE) for cell in cells):
                continue
            width = max(map(len, (name, *cells)))
            is_number = all(cell in ("", NONE) or cell[0].isdigit() for cell in cells)
            columns.append([cell.rjust(width) if is_number else cell for cell in (name, *cells)])
        return cls(list(zip(*columns, strict=True)), left=len(columns))

    def __str__(self) -> str:
        rows = [[printable(cell) for cell in row] for row in self.rows]
        left = self.left
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            self.indent
            + "  ".join([*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]).rstrip()
            for row in rows
        )


@dataclass(frozen=True)
class Result:
    """Result of a command. text: lines and tables for people; values: the object of --json; status: the exit status.

    Of several ranks only the first has text and values.
    """

    text: Iterable[str | TextTable] = ()
    values: Mapping[str, Any] | None = field(default=None, kw_only=True)
    status: int = field(default=0, kw_only=True)


def tell(*lines: str | TextTable) -> None:
    """Print lines on stderr, at once."""
    _print(lines, sys.stderr)


def warn(line: str) -> None:
    tell(f"warning: {line}")


def say(*lines: str | TextTable) -> OSError | None:
    """Print lines of a log on stdout, at once. If that fails, say so on stderr and return why: no work ends with it."""
    lost = _print(lines, sys.stdout)
    if lost is not None:
        warn(f"the rest of this log is lost: standard output: {lost.strerror}")
    return lost


def show(result: Result, *, as_json: bool = False) -> bool:
    """Print a result. Return False where its reader has left (`| head`); other errors are raised, with a name.

    Commands call this themselves only for what is shown before their end.
    """
    values = [] if result.values is None else [json.dumps(result.values)]
    lost = _print(values if as_json else result.text, sys.stdout)
    if lost is not None and lost.errno != errno.EPIPE:
        raise OSError(lost.errno, lost.strerror, "standard output")
    return lost is None


def _print(lines: Iterable[str | TextTable], stream: TextIO) -> OSError | None:
    """Print lines in one write, as launchers mix the output of ranks. After an error the stream leads nowhere."""
    text = "".join(f"{printable(line) if isinstance(line, str) else line}\n" for line in lines)
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
