"""Folders of pictures that are clips: one JPEG or PNG for each frame, numbered without a gap."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator

from summit_train.data.clips import Choose, Frames, ViewsOf, read_picture_views
from summit_train.data.decode import probe_picture
from summit_train.data.limits import LIMITS, NO_HURRY, Budget, Limits
from summit_train.data.video import DecodeError, VideoInfo

_NUMBERED = re.compile(r"(.*?)(\d+)\.(jpe?g|png)", re.IGNORECASE)


def list_pictures(folder: str) -> list[str]:
    """The names of a folder's frames, in their order (00001.jpg, img_00001.jpg, ...); other files are passed over.

    Raises DecodeError where there is none, where a number is missing, and where there are several series (such as
    img_00001.jpg beside flow_x_00001.jpg): nothing says which one is the clip.
    """
    try:
        matches = [match for name in os.listdir(folder) if (match := _NUMBERED.fullmatch(name))]
    except OSError as error:
        raise DecodeError(folder, error.strerror or str(error)) from error
    if not matches:
        raise DecodeError(folder, "is a directory without frames: wanted a video file, or pictures such as 00001.jpg")
    series = sorted({f"{match[1]}*.{match[3]}" for match in matches})
    if len(series) > 1:
        raise DecodeError(folder, f"holds several series of pictures: {', '.join(series[:5])}")
    numbered = sorted((int(match[2]), match[0]) for match in matches)
    first = numbered[0][0]
    for place, (number, name) in enumerate(numbered):
        if number != first + place:
            raise DecodeError(folder, f"the frame before {name} is missing, or there twice")
    return [name for _, name in numbered]


def read_folder_views(
    folder: str, choose: Choose, views_of: ViewsOf, num_frames: int | None, limits: Limits = LIMITS
) -> Frames:
    """What `clips.read_views` gives, of a folder of pictures. Raises DecodeError, also for a wrong `num_frames`."""
    names = list_pictures(folder)
    if num_frames not in (None, len(names)):
        raise DecodeError(folder, f"holds {len(names)} pictures, but the manifest says {num_frames}")

    def fetch(number: int) -> tuple[str, bytes]:
        return _read(os.path.join(folder, names[number]))

    return read_picture_views(folder, fetch, choose, views_of, len(names), limits)


def probe_folder(folder: str) -> VideoInfo:
    """Decode every picture and say what the folder holds. Raises DecodeError, also for pictures of several sizes."""
    names = list_pictures(folder)
    budget = Budget(folder, NO_HURRY)
    first = None
    for name, content in _contents(folder, names):
        found = probe_picture(name, content, budget)
        first = first or found
        if found != first:
            kinds = "{} {} x {}, not {} {} x {}".format(*found, *first)
            raise DecodeError(name, f"differs from the frames before it: {kinds}")
    assert first is not None
    codec, width, height = first
    return VideoInfo(len(names), None, width, height, None, codec, 0)


def folder_sha256(folder: str) -> str:
    """One digest of all frames: of the SHA-256 of each, in their order. Raises DecodeError."""
    digest = hashlib.sha256()
    for _, content in _contents(folder, list_pictures(folder)):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _contents(folder: str, names: list[str]) -> Iterator[tuple[str, bytes]]:
    return (_read(os.path.join(folder, name)) for name in names)


def _read(path: str) -> tuple[str, bytes]:
    try:
        with open(path, "rb") as file:
            return path, file.read()
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
