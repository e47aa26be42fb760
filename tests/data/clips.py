"""Reading one clip in one view, as the stores do it."""

from __future__ import annotations

from typing import Any

from summit_train.data.video.clips import Choose, Frames, ViewOf, read_views, single
from summit_train.data.video.source import AnyVideo


def read_clip(video: AnyVideo, choose: Choose, view_of: ViewOf, num_frames: int | None = None, **how: Any) -> Frames:
    clip: Frames = read_views(video, *single(choose, view_of), num_frames, **how)[0]
    return clip
