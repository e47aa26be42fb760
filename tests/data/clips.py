"""Reading one clip in one view, and probing files by their paths."""

from __future__ import annotations

import os
from typing import Any

from summit_train.data.batches.stores import Store
from summit_train.data.video import decode
from summit_train.data.video.clips import Choose, Frames, ViewOf, read_views, single
from summit_train.data.video.source import Encoded, VideoInfo

Video = Encoded | str | os.PathLike[str]


def encoded(video: Video) -> Encoded:
    return video if isinstance(video, Encoded) else Encoded(os.fspath(video))


def probe(video: Video, *limits: Any) -> VideoInfo:
    return decode.probe(encoded(video), *limits)


def read_clip(video: Video, choose: Choose, view_of: ViewOf, num_frames: int | None = None, **how: Any) -> Frames:
    clip: Frames = read_views(encoded(video), *single(choose, view_of), num_frames, **how)[0]
    return clip


def stored_clip(store: Store, clip: int, choose: Choose, view_of: ViewOf) -> Frames:
    found: Frames = store.read_views(clip, *single(choose, view_of))[0]
    return found
