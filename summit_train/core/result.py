"""What a command found, and the one place that prints it: as text for people, or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from summit_train.core.text import NONE


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
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        left = self.left
        return "\n".join(
            self.indent
            + "  ".join([*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]).rstrip()
            for row in self.rows
        )


@dataclass(frozen=True)
class Result:
    """What a command returns. text: lines and tables for people; values: the object of --json; status: the exit status.

    Of several ranks only the first has text and values.
    """

    text: Iterable[str | TextTable] = ()
    values: Mapping[str, Any] | None = field(default=None, kw_only=True)
    status: int = field(default=0, kw_only=True)


def tell(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def warn(line: str) -> None:
    tell(f"warning: {line}")


def show(result: Result, *, as_json: bool = False) -> None:
    """Print a result. Commands call this themselves only for what is shown before their end."""
    if not as_json:
        for part in result.text:
            print(part, flush=True)
    elif result.values is not None:
        print(json.dumps(result.values), flush=True)
