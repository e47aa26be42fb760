"""Reading one clip in one view, and probing files by their paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from summit_train.data.loading import Crop, Sample, Store, read_open
from summit_train.data.video import films, stream
from summit_train.data.video.augment import View
from summit_train.data.video.clips import VideoClip
from summit_train.data.video.encode import Encoding, open_writer
from summit_train.data.video.render import Frames
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


def write_as(
    path: Path,
    frames: Frames,
    fps: int = 25,
    *,
    times: Sequence[int] | None = None,
    rotation: int = 0,
    **how: Any,
) -> None:
    """Write a video as `write_video` does.

    times: of the frames, in units of 1 / fps [0, 1, 2, ...]. rotation: by the display matrix, degrees counterclockwise.
    """
    plain = path.with_name(f"plain {path.name}")
    height, width = frames.shape[1:3]
    with open_writer(plain, (width, height), fps, Encoding(**how)) as write:
        for picture, time in zip(frames, range(len(frames)) if times is None else times, strict=True):
            write(picture, time)
    if not rotation:
        plain.rename(path)
        return
    with av.open(str(plain)) as source, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(rotation)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
    plain.unlink()


def write_sound(path: Path) -> None:
    """A file without a video stream."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_h264(
    path: Path, frames: Frames, change: Callable[[list[Any]], None] = lambda packets: None, **options: str
) -> None:
    """Write frames as H.264 by these options of FFmpeg. change: is given the packets before they are written."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        packets = [packet for frame in frames for packet in stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24"))]
        packets += stream.encode(None)
        change(packets)
        for packet in packets:
            container.mux(packet)


def write_swapped(path: Path, times: Mapping[int, float] | None = None, key_every: int = 48, more: str = "") -> None:
    """48 frames, frame i of the grey 5 i, some with wrong times: by default those of two B-frames in a row are swapped.

    The decoder shows them in their right order, whatever the times say. times: of frames, in frames. more: for x264.
    """
    if times is None:
        times = dict(pair for number in range(1, 46, 3) for pair in ((number, number + 1), (number + 1, number)))

    def change(packets: list[Any]) -> None:
        for packet in packets:
            packet.pts, packet.dts = int(2 * times.get(packet.pts, packet.pts)), 2 * packet.dts - 96

    frames = np.arange(48, dtype=np.uint8)[:, None, None, None] * np.full((64, 64, 3), 5, np.uint8)
    groups = f"b-adapt=0:scenecut=0:b-pyramid=none:min-keyint={key_every}{more}"
    write_h264(path, frames, change, g=str(key_every), bf="2", **{"x264-params": groups})
