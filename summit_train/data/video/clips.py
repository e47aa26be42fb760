"""Clips of a video file or of a folder of pictures: the chosen frames, in the chosen views.

Frame i is the i-th in presentation order, whatever a file says of times or counts. A folder holds one JPEG or PNG for
each frame, numbered without a gap.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from summit_train.data.video.augment import View
from summit_train.data.video.decode import count_packets, read_by_jumps, read_from_start
from summit_train.data.video.pictures import PictureReader, probe_picture
from summit_train.data.video.render import Frames as Frames
from summit_train.data.video.render import Renderer
from summit_train.data.video.render import ViewsOf as ViewsOf
from summit_train.data.video.source import LIMITS, NO_HURRY, Budget, DecodeError, Encoded, Limits, VideoInfo, read_bytes
from summit_train.data.video.span import Choose as Choose

ViewOf = Callable[[int, int], View]
Fetch = Callable[[int], tuple[str, bytes]]

_NUMBERED = re.compile(r"(.*?)(\d+)\.(jpe?g|png)", re.IGNORECASE)
_FLOW = re.compile(r"flow_(x|y)_(\d+)\.(?:jpe?g|png)")
NO_FLOW = "is a video, and data.modality is flow: make its flow with `summit-train data flow`, and name that instead"


def read_views(
    video: Encoded, choose: Choose, views_of: ViewsOf, num_frames: int | None = None, limits: Limits = LIMITS
) -> Frames:
    """Read K clips of T frames of a video in C views: uint8 RGB (K * C, T, height, width, 3), clip by clip.

    choose: from the number of frames to frame numbers int64 (K, T), in any order and with repeats. views_of: from the
    upright (width, height) in pixels to C views whose crops have one size. Both must be pure: they may be called again.
    num_frames: from the manifest; with it a video is decoded from the nearest key frames where that is certain to give
    the same frames, without it the packets are counted. Where the video holds fewer frames, `choose` is called again
    with the true number. A frame is decoded and scaled once.
    Raises DecodeError where the video cannot be read, something that the wanted frames need is damaged, or it takes
    more than `limits`.
    """
    budget = Budget(video.name, limits)
    chosen = _chosen(choose, num_frames or count_packets(video, budget))
    pictures: dict[int, list[Frames]] = {}
    if num_frames:
        pictures = read_by_jumps(video, _wanted(chosen), Renderer(views_of), num_frames, budget)
    if not pictures:
        pictures, num_seen = read_from_start(video, _wanted(chosen), Renderer(views_of), budget)
        if num_seen <= chosen.max():
            chosen = _chosen(choose, num_seen)
            pictures, _ = read_from_start(video, _wanted(chosen), Renderer(views_of), budget)
    return _clip_by_clip(chosen, pictures)


def single(choose: Choose, view_of: ViewOf) -> tuple[Choose, ViewsOf]:
    """Return `choose` and `views_of` for one clip in one view. choose: gives (T,) frame numbers."""
    return lambda n: choose(n)[None], lambda w, h: [view_of(w, h)]


def read_picture_views(
    name: str, fetch: Fetch, choose: Choose, render: Renderer, num_frames: int, limits: Limits = LIMITS
) -> Frames:
    """Read clips as `read_views` does, from frames that are stored as pictures of their own, in the renderer's views.

    name: of the whole, for messages. fetch: from a frame's number to its name for messages and the bytes of its JPEG or
    PNG picture; called once a frame. The first wanted frame's size counts for all. Raises DecodeError as `fetch` does,
    and for a bad picture.
    """
    chosen = _chosen(choose, num_frames)
    reader, numbers = PictureReader(render, Budget(name, limits)), sorted(_wanted(chosen))
    return _clip_by_clip(chosen, dict(zip(numbers, reader.read(list(map(fetch, numbers))), strict=True)))


def _chosen(choose: Choose, num_frames: int) -> NDArray[np.int64]:
    chosen = np.asarray(choose(num_frames))
    if not chosen.size or chosen.min() < 0 or chosen.max() >= num_frames:
        raise ValueError(f"the frames chosen of {num_frames} do not lie among them: {chosen.tolist()}")
    return chosen


def _wanted(chosen: NDArray[np.int64]) -> frozenset[int]:
    return frozenset(chosen.ravel().tolist())


def _clip_by_clip(chosen: NDArray[np.int64], pictures: dict[int, list[Frames]]) -> Frames:
    """Put the pictures of each view into the order of the chosen frames (K, T)."""
    clips = [[pictures[number] for number in row] for row in chosen.tolist()]
    views: Frames = np.array([view for clip in clips for view in zip(*clip, strict=True)])
    return views


def is_picture(name: str) -> bool:
    """Return whether a file's name is that of a frame in a folder of pictures, such as 00001.jpg."""
    return _NUMBERED.fullmatch(name) is not None


def list_pictures(folder: str) -> list[str]:
    """Return the paths of a folder's frames in order (00001.jpg, img_00001.jpg, ...), without its other files.

    Raises DecodeError where there is none, where a number is missing, and where there are several series (such as
    img_00001.jpg beside flow_x_00001.jpg): nothing tells which one is the clip.
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
    for wanted, (number, name) in enumerate(numbered, start=numbered[0][0]):
        if number != wanted:
            raise DecodeError(folder, f"the frame before {name} is missing, or there twice")
    return [os.path.join(folder, name) for _, name in numbered]


def read_folder_views(
    folder: str, choose: Choose, views_of: ViewsOf, num_frames: int | None, limits: Limits = LIMITS
) -> Frames:
    """Read clips of a folder as `read_views` does. Raises DecodeError, also for a wrong `num_frames`."""
    paths = list_pictures(folder)
    if num_frames not in (None, len(paths)):
        raise DecodeError(folder, f"holds {len(paths)} pictures, but the manifest says {num_frames}")
    fetch = lambda number: (paths[number], read_bytes(paths[number]))  # noqa: E731
    return read_picture_views(folder, fetch, choose, Renderer(views_of), len(paths), limits)


def list_flow_pictures(folder: str) -> list[str]:
    """Return the paths of a folder's pictures of flow, field by field: x, y, x, y, ...

    Their names are flow_x_00001.jpg, flow_y_00001.jpg, and so on; other files are left out. Raises DecodeError where
    there is none, or a number or one of its two pictures is missing.
    """
    try:
        matches = [match for name in os.listdir(folder) if (match := _FLOW.fullmatch(name))]
    except OSError as error:
        raise DecodeError(folder, error.strerror or str(error)) from error
    if not matches:
        raise DecodeError(folder, "holds no pictures of flow: flow_x_00001.jpg and flow_y_00001.jpg, and so on")
    found = sorted((int(match[2]), match[1], match[0]) for match in matches)
    there = {(number, axis) for number, axis, _ in found}
    for number in range(found[0][0], found[-1][0] + 1):
        for axis in ("x", "y"):
            if (number, axis) not in there:
                raise DecodeError(folder, f"flow_{axis} of field {number} is missing")
    if len(there) < len(found):
        raise DecodeError(folder, "has a picture of flow twice, as two files of one number")
    return [os.path.join(folder, name) for _, _, name in found]


def read_flow_views(
    folder: str, choose: Choose, views_of: ViewsOf, num_fields: int | None, limits: Limits = LIMITS
) -> Frames:
    """Read a folder's pictures of flow: uint8 grey (K * C, P, height, width, 1), clip by clip.

    choose: from the number of fields to numbers of pictures (K, P), in the order of `list_flow_pictures`. Raises
    DecodeError, also for a video file, and for a wrong `num_fields`.
    """
    if os.path.isfile(folder):
        raise DecodeError(folder, NO_FLOW)
    paths = list_flow_pictures(folder)
    found = len(paths) // 2
    if num_fields not in (None, found):
        raise DecodeError(folder, f"holds {found} fields of flow, but the manifest says {num_fields}")
    fetch = lambda number: (paths[number], read_bytes(paths[number]))  # noqa: E731
    render = Renderer(views_of, is_grey=True)
    return read_picture_views(folder, fetch, lambda pictures: choose(pictures // 2), render, len(paths), limits)


def probe_folder(folder: str) -> tuple[VideoInfo, str]:
    """Decode every picture; return what the folder holds and the SHA-256 of the frames' SHA-256s, in their order.

    Raises DecodeError, also for pictures of several sizes.
    """
    paths = list_pictures(folder)
    budget, digest = Budget(folder, NO_HURRY), hashlib.sha256()
    kinds = list[tuple[str, int, int]]()
    for path in paths:
        content = read_bytes(path)
        kinds.append(probe_picture(path, content, budget))
        if kinds[-1] != kinds[0]:
            differs = "{} {} x {}, not {} {} x {}".format(*kinds[-1], *kinds[0])
            raise DecodeError(path, f"differs from the frames before it: {differs}")
        digest.update(hashlib.sha256(content).digest())
    codec, width, height = kinds[0]
    return VideoInfo(len(paths), None, width, height, None, codec), digest.hexdigest()
