"""The videos that cam is given, and the files that it writes: maps as npz, and a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from summit_train.data.manifest import manifest_of_files
from summit_train.data.manifest.files import FileStore
from summit_train.data.manifest.tables import is_video
from summit_train.data.video.clips import list_pictures
from summit_train.data.video.source import DecodeError, Limits
from summit_train.errors import UserError
from summit_train.files import replacing
from summit_train.inference.cam import Heatmap

_COLUMNS = ("label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold")
_MOST_BYTES = 180  # of a name; file systems take 255, and endings are to come


def find_videos(given: Iterable[str]) -> list[str]:
    """Return the videos among paths: a file itself, of a folder all videos below it, or it itself where it is one.

    A folder of numbered pictures is a video. Files are not opened, and a missing one is returned as it is. Raises
    UserError for a folder without a video.
    """
    found: list[str] = []
    for path in given:
        if not os.path.isdir(path):
            found.append(path)
            continue
        walked = os.walk(path)
        below = [os.path.join(folder, file) for folder, _, files in walked for file in files if is_video(file)]
        if not below:
            try:
                list_pictures(path)
            except DecodeError as error:
                raise UserError(f"{path}: there is no video in it, and as one it {error.reason}") from error
        found += sorted(below) or [path]
    return found


def video_store(paths: Sequence[str], seconds: float) -> FileStore:
    """Return a store of these videos, each of which may take so many seconds to read."""
    return FileStore(manifest_of_files(paths, "the videos given"), "", Limits(seconds=seconds))


def output_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each video's output files, without ending: its stem, numbered where another one has it."""
    taken: set[str] = set()
    names = []
    for path in paths:
        stem = PurePath(path).stem.encode("utf-8", "surrogateescape")[:_MOST_BYTES].decode("utf-8", "ignore") or "video"
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        names.append(name)
    return names


def save_maps(path: Path, first: tuple[Heatmap, float], *others: tuple[Heatmap, float]) -> None:
    """Write the maps of one video by one network or two, each with its threshold, as npz, whole or not at all.

    `np.load` reads it without pickle. The second network's names begin with beside_.
    """
    arrays = first[0].values() | {"threshold": first[1]}
    for heatmap, threshold in others:
        values = heatmap.values() | {"threshold": threshold}
        arrays |= {f"beside_{name}": value for name, value in values.items()}
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)


def csv_text(videos: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of mapped videos: a line for each video and network, as `Heatmap.record` has it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "network", *_COLUMNS, "strip", "maps"])
    for video in videos:
        for row in video["networks"]:
            cells = [row[name] for name in ("network", *_COLUMNS)]
            writer.writerow([video["path"], *cells, video["strip"], video["maps"]])
    return text.getvalue()
