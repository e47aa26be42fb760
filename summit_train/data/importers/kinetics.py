"""Kinetics-400, -600 and -700: a CSV with label,youtube_id,time_start,time_end,split for each split.

The usual downloaders cut the clip out and call it ID_000010_000020.mp4, in seconds, or keep ID.mp4; in one folder, or
in a folder for each class. Labels are the class names' places in alphabetical order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from summit_train.data.importers.annotations import Annotations, Listed, csv_rows
from summit_train.data.manifest import ManifestError

_COLUMNS = ("label", "youtube_id", "time_start", "time_end")


def read(source: Path, classes: tuple[str, ...] | None) -> Annotations:
    """Read one split's CSV. classes: those of the other split, as one list may lack some. Raises ManifestError."""
    clips: list[Listed] = []
    rows = list(csv_rows(source, _COLUMNS))
    counts = Counter(row["youtube_id"] for _, row in rows)
    for line, row in rows:
        identity, label = row["youtube_id"].strip(), row["label"].strip()
        if not identity or not label:
            raise ManifestError(f"{source}:{line}: a youtube_id and a label are wanted (a test list has no labels)")
        try:
            start, end = (int(float(row[name])) for name in ("time_start", "time_end"))
        except ValueError:
            raise ManifestError(f"{source}:{line}: time_start and time_end are seconds, not {row!r}") from None
        names = [f"{identity}_{start:06}_{end:06}"]
        # One video of which several clips are listed does not say which one its file is.
        if counts[row["youtube_id"]] == 1:
            names.append(identity)
        clips.append(Listed(tuple(names), label))
    return Annotations(tuple(clips), classes or tuple(sorted({clip.label for clip in clips})), by_stem=True)
