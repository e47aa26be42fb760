"""The clips below a folder: videos, and folders of pictures, through links too."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.data.manifest.tables import Table, is_video
from summit_train.data.video.pictures import is_picture


def class_folders(source: Path) -> tuple[str, ...]:
    """Return the names of a folder's class folders, sorted: their places are the labels. Raises UserError."""
    names = tuple(entry.name for entry in _entries(str(source)) if entry.is_dir())
    if not names:
        raise UserError(f"{source}: must be a manifest, or have a sub-folder of videos for each class; has none")
    return names


def folder_table(source: Path, others: Counter[str]) -> Table:
    """List the clips below each class folder, at any depth, sorted; their paths are relative to `source`.

    others: of `clips_below`. Pictures that lie in a class folder itself are counted there too.
    """
    others.update(_kind(entry.name) for entry in _entries(str(source)) if not entry.is_dir())
    paths, labels = list[str](), list[str]()
    for label, name in enumerate(class_folders(source)):
        clips = clips_below(os.path.join(source, name), others, is_clip=False)
        paths += sorted(os.path.relpath(clip, source) for clip in clips)
        labels += [str(label)] * (len(paths) - len(labels))
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
    status, seen = os.stat(folder), {} if seen is None else seen
    if (first := seen.setdefault((status.st_dev, status.st_ino), folder)) != folder:
        raise UserError(f"{folder}: leads to {first} once more, through a link; remove one of the two")
    entries = _entries(folder)
    files = [entry.name for entry in entries if not entry.is_dir()]
    clips = [os.path.join(folder, name) for name in files if is_video(name)]
    for entry in entries:
        if entry.is_dir():
            clips += clips_below(entry.path, others, seen=seen)
    if is_clip and not clips and any(map(is_picture, files)):
        clips, files = [folder], [name for name in files if not is_picture(name)]
    others.update(_kind(name) for name in files if not is_video(name))
    return clips


def skipped_text(others: Counter[str]) -> list[str]:
    """Return a line about files that are no clips, or nothing."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(others.items()))
    return [f"no videos by their names: {kinds}"] if kinds else []


def _kind(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "without an extension"


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return a folder's entries by name, without hidden ones. Raises UserError for a link to nothing."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda one: one.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):  # a disk that is not mounted hides its clips
            target = os.readlink(entry.path)
            raise UserError(f"{entry.path}: is a link to {target}, which is not there; mount it, or remove the link")
    return entries
