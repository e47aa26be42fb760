"""The videos that a command is given: files, and folders of files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from summit_train.data.manifest import manifest_of_files
from summit_train.data.manifest.files import FileStore
from summit_train.data.manifest.tables import is_video
from summit_train.data.video.clips import list_pictures
from summit_train.data.video.source import DecodeError, Limits
from summit_train.errors import UserError

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
