"""Clips of a video, or of a series of pictures: the frames that are asked for, in the views that are asked for.

Frame i is the i-th in presentation order, whatever a file says of times or counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from summit_train.data.augment import View
from summit_train.data.decode import PictureReader, Renderer, count_packets, read_by_jumps, read_from_start
from summit_train.data.limits import LIMITS, Budget, Limits
from summit_train.data.video import AnyVideo, Encoded

Frames: TypeAlias = NDArray[np.uint8]
Choose = Callable[[int], NDArray[np.int64]]
ViewOf = Callable[[int, int], View]
ViewsOf = Callable[[int, int], Sequence[View]]
Fetch = Callable[[int], tuple[str, bytes]]


def read_views(
    video: AnyVideo,
    choose: Choose,
    views_of: ViewsOf,
    num_frames: int | None = None,
    *,
    seek: bool = True,
    limits: Limits = LIMITS,
) -> Frames:
    """Read K clips of T frames of a video in C views: uint8 RGB (K * C, T, height, width, 3), clip by clip.

    video: a file's path, or what is at hand of it. choose: from the number of frames to frame numbers int64 (K, T),
    in any order and with repeats. views_of: from the upright (width, height) in pixels to C views whose crops have one
    size. Both are pure: they may be called again. num_frames: what the manifest says; without it the packets are
    counted. Where the video turns out to hold fewer frames, `choose` is asked again with the true number. A frame is
    decoded and scaled once. seek: decode from the nearest key frames where that is certain to give the same frames;
    needs `num_frames`.
    Raises DecodeError where the video cannot be read or something that the wanted frames need is damaged, or when it
    takes more than `limits`.
    """
    encoded = Encoded.of(video)
    budget = Budget(encoded.name, limits)
    chosen = _chosen(choose, num_frames or count_packets(encoded, budget))
    pictures: dict[int, list[Frames]] = {}
    if seek and num_frames:
        pictures = read_by_jumps(encoded, _wanted(chosen), Renderer(views_of), num_frames, budget)
    if not pictures:
        pictures, num_seen = read_from_start(encoded, _wanted(chosen), Renderer(views_of), budget)
        if num_seen <= chosen.max():
            chosen = _chosen(choose, num_seen)
            pictures, _ = read_from_start(encoded, _wanted(chosen), Renderer(views_of), budget)
    return _clip_by_clip(chosen, pictures)


def read_clip(
    video: AnyVideo,
    choose: Choose,
    view_of: ViewOf,
    num_frames: int | None = None,
    *,
    seek: bool = True,
    limits: Limits = LIMITS,
) -> Frames:
    """Read one clip in one view: uint8 RGB (T, crop_height, crop_width, 3); see `read_views`.

    choose gives (T,) frame numbers, view_of one View.
    """
    many, views_of = lambda n: choose(n)[None], lambda w, h: [view_of(w, h)]
    clip: Frames = read_views(video, many, views_of, num_frames, seek=seek, limits=limits)[0]
    return clip


def read_picture_views(
    name: str, fetch: Fetch, choose: Choose, views_of: ViewsOf, num_frames: int, limits: Limits = LIMITS
) -> Frames:
    """What `read_views` gives, of frames that are stored as pictures of their own.

    name: what messages call the whole. fetch: from a frame's number to what messages call that frame and the bytes of
    its JPEG or PNG picture; a frame is fetched once. The first wanted frame's size counts for all. Raises DecodeError
    as `fetch` does, and for a bad picture.
    """
    chosen = _chosen(choose, num_frames)
    reader, numbers = PictureReader(Renderer(views_of), Budget(name, limits)), sorted(_wanted(chosen))
    return _clip_by_clip(chosen, dict(zip(numbers, reader.read(list(map(fetch, numbers))), strict=True)))


def _chosen(choose: Choose, num_frames: int) -> NDArray[np.int64]:
    chosen = np.asarray(choose(num_frames))
    if not chosen.size or chosen.min() < 0 or chosen.max() >= num_frames:
        raise ValueError(f"the frames chosen of {num_frames} do not lie among them: {chosen.tolist()}")
    return chosen


def _wanted(chosen: NDArray[np.int64]) -> frozenset[int]:
    return frozenset(chosen.ravel().tolist())


def _clip_by_clip(chosen: NDArray[np.int64], pictures: dict[int, list[Frames]]) -> Frames:
    """The pictures of each view put in the order of the chosen frames (K, T)."""
    clips = [[pictures[number] for number in row] for row in chosen.tolist()]
    views: Frames = np.array([view for clip in clips for view in zip(*clip, strict=True)])
    return views
