"""Numbers, times and tables as text for people."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "\N{EM DASH}"
MOST_ITEMS = 20
# Control characters, line breaks, what turns the direction of text, and bytes outside UTF-8 as Python names them.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULA = re.compile(r"[=@\t\r]|[+-](?!([0-9]+(\.[0-9]+)?|\.[0-9]+)(e[+-]?[0-9]+)?$)")  # but not a number
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show(value: object) -> str:
    """Return a JSON value for people: `1,536`, `0.005`, `yes`, a dash for null."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return listed([f"{key} {show(item)}" for key, item in value.items()])
    return listed(value) if isinstance(value, (list, tuple)) else str(value)


def numbered(names: Sequence[str], form: str) -> list[str]:
    """Return names, those that are there several times by `form`, such as "{} ({})", with their number from 1."""
    return [
        name if names.count(name) == 1 else form.format(name, names[: place + 1].count(name))
        for place, name in enumerate(names)
    ]


def listed(values: Sequence[object], most: int = MOST_ITEMS) -> str:
    """Return the first `most` values, and the number of all values if there are more."""
    shown = ", ".join(show(value) for value in values[:most])
    return f"{shown}, \N{HORIZONTAL ELLIPSIS} ({len(values):,} in all)" if len(values) > most else shown


def from_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also where it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def percent(value: float | None, unit: str = "%") -> str:
    """Return an accuracy, usually in percent, of which 20,000 videos resolve two decimals; or without unit a number."""
    return NONE if value is None else f"{value:.2f} {unit}" if unit else f"{value:.4g}"


def mean_std(mean: float | None, std: float | None, unit: str = "%") -> str:
    """Return `73.81 ± 0.05 %`."""
    if mean is None or std is None:
        return percent(mean, unit)
    between = " \N{PLUS-MINUS SIGN} "
    return f"{mean:.2f}{between}{std:.2f} {unit}" if unit else f"{mean:.4g}{between}{std:.2g}"


def noise_text(clips: float | None) -> str:
    """Return a noise scale as `1,230 clips`, three digits; `unclear` where its estimates scatter too widely."""
    if clips is None or not math.isfinite(clips):
        return "unclear"
    return counted(float(f"{clips:.3g}"), "clip")


def duration(seconds: float) -> str:
    """Return `0 s`, `8.1 s`, `47 s`, `4 min 09 s` or `1 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def counted(number: float, noun: str) -> str:
    """Return 1 clip, 1,536 clips, 2.5 clips."""
    form = "," if not isinstance(number, float) else ",.4g" if abs(number) < 1000 else ",.0f"
    shown = f"{number:{form}}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


def share(part: float) -> str:
    """Return 0.123 as 12.3 %."""
    return f"{100 * part:.1f} %"


def with_unit(value: float, unit: str) -> str:
    """Return 4 significant digits and a prefix by powers of 1000: 83.85 G multiply-adds/s."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.4g} {prefix}{'' if unit.startswith('B') else ' '}{unit}"
    return f"{value:.4g} {unit}"


def binary_size(size: float) -> str:
    """Return bytes as 12.5 GiB, or below 1 GiB as 320 MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def csv_text(rows: Iterable[Iterable[object]], *, exact: bool = False) -> str:
    """Return a CSV. Text that a spreadsheet would run as a formula gets an apostrophe in front, unless `exact`."""
    text = io.StringIO(newline="")
    if not exact:
        rows = ([f"'{one}" if isinstance(one, str) and _FORMULA.match(one) else one for one in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def printable(text: str) -> str:
    """Return one line of text as a terminal takes it: what it would obey, or not show, is escaped as in Python."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_nan(value: Any) -> Any:
    """Replace each number that is not finite by None, also within mappings and lists, as JSON needs it."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(without_nan, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
