"""Reading one clip in one view, and probing files by their paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from summit_train.data.loading import Crop, Sample, Store, read_open
from summit_train.data.video import films, stream
from summit_train.data.video.augment import View
from summit_train.data.video.clips import Frames, VideoClip
from summit_train.data.video.source import LIMITS, Encoded, VideoInfo

CLIPS = Path(__file__).parents[2].parent / "shared" / "clips"
needs_clips = pytest.mark.skipif(not CLIPS.is_dir(), reason="the real clips in ../shared/clips are not here")

ViewOf = Callable[[int, int], View]
Video = Encoded | str | os.PathLike[str]


def all_of(width: int, height: int) -> View:
    return View(width, height, 0, 0, width, height)


def encoded(video: Video) -> Encoded:
    return video if isinstance(video, Encoded) else Encoded(os.fspath(video))


def probe(video: Video, *limits: Any) -> VideoInfo:
    return stream.probe(encoded(video), *limits)


def _single(sample: Sample, view_of: ViewOf) -> tuple[Sample, Crop]:
    return lambda n: sample(n)[None], lambda w, h: [view_of(w, h)]


def read_clip(video: Video, sample: Sample, view_of: ViewOf, num_frames: int | None = None, **how: Any) -> Frames:
    with VideoClip(encoded(video), num_frames, **how) as opened:
        clip: Frames = read_open(opened, *_single(sample, view_of)).pixels[0]
    return clip


def stored_clip(store: Store, clip: int, sample: Sample, view_of: ViewOf) -> Frames:
    """The frames that are chosen of a clip, numbered in the order in which they are stored."""
    with store.open(clip) as opened:
        found: Frames = read_open(opened, *_single(sample, view_of)).pixels[0]
    return found


def as_film(path: Path, num_frames: int | None = None) -> Encoded:
    """Return a video that is not held in memory, with the index of its packets if `num_frames` are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.devnull)
        patch.setattr(films, "MAX_HELD_BYTES", 0)
        return films.Films().load(str(path), None, num_frames, LIMITS)


def write_sound(path: Path) -> None:
    """A file without a video stream."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
