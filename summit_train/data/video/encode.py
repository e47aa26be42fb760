"""A small encoder of videos through PyAV."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
from av.container import OutputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.render import Frames


@dataclass(frozen=True)
class Encoding:
    """How a video is encoded.

    codec: by default libx264 where this PyAV has it, else mpeg4. quality: x264's constant rate factor, 0 is the finest
    (mpeg4 takes a sixth of it for its quantiser). key_every: frames between key frames. b_frames: at most so many in a
    row. rotation: degrees counterclockwise, for the display matrix. tick: the unit of the frames' times in seconds, by
    default 1 / fps.
    """

    codec: str | None = None
    quality: int = 18
    key_every: int = 12
    b_frames: int = 2
    rotation: int = 0
    tick: Fraction | None = None


class VideoWriter:
    """Encodes one frame after the other into an open container; `open_writer` makes it."""

    def __init__(self, container: OutputContainer, size: tuple[int, int], fps: int | Fraction, how: Encoding) -> None:
        codec = how.codec or ("libx264" if "libx264" in av.codecs_available else "mpeg4")
        self._container = container
        options = _encoder_options(codec, how.quality)
        self._stream = cast(VideoStream, container.add_stream(codec, rate=fps, options=options))
        self._stream.width, self._stream.height = size
        # Half-resolution colour needs even sides.
        self._stream.pix_fmt = "yuv444p" if size[0] % 2 or size[1] % 2 else "yuv420p"
        context = self._stream.codec_context
        context.thread_count = 1
        context.gop_size = how.key_every
        context.max_b_frames = how.b_frames
        if how.tick is not None:
            context.time_base = how.tick
        self._stream.set_display_rotation(how.rotation)
        self._tick = how.tick or 1 / Fraction(fps)
        self._num_frames = 0

    def add(self, picture: Frames, time: int | None = None) -> None:
        """Encode a uint8 RGB picture (H, W, 3). time: of its presentation in ticks, rising [0, 1, 2, ...]."""
        frame = VideoFrame.from_ndarray(picture, "rgb24")
        frame.pts = self._num_frames if time is None else time
        frame.time_base = self._tick
        self._num_frames += 1
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Write the frames that the encoder still holds."""
        self._container.mux(self._stream.encode(None))


@contextmanager
def open_writer(
    path: str | os.PathLike[str], size: tuple[int, int], fps: int | Fraction = 25, how: Encoding | None = None
) -> Iterator[VideoWriter]:
    """Yield a writer of frames of this (width, height), on one thread; the same frames give the same bytes.

    The container follows the path's extension. The file appears under its name when the block ends; after an error in
    the block nothing is left of it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        with av.open(f"file:{temporary}", "w", options={"fflags": "+bitexact"}) as container:
            writer = VideoWriter(container, size, fps, how or Encoding())
            yield writer
            writer.finish()
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_video(
    path: str | os.PathLike[str],
    frames: Frames,
    fps: int | Fraction = 25,
    *,
    codec: str | None = None,
    quality: int = 18,
    key_every: int = 12,
    b_frames: int = 2,
    rotation: int = 0,
    times: Sequence[int] | None = None,
) -> None:
    """Encode uint8 RGB frames (T, H, W, 3) as `open_writer` does.

    codec, quality, key_every, b_frames, rotation: as `Encoding` has them. times: each frame's presentation time in
    units of 1 / fps, rising (default 0, 1, 2, ...).
    """
    _, height, width, _ = frames.shape
    with open_writer(path, (width, height), fps, Encoding(codec, quality, key_every, b_frames, rotation)) as writer:
        for number, picture in enumerate(frames):
            writer.add(picture, None if times is None else times[number])


def _encoder_options(codec: str, quality: int) -> dict[str, str]:
    options = {"crf": str(quality), "preset": "fast"}
    if codec == "mpeg4":
        options = dict.fromkeys(("qmin", "qmax"), str(max(1, quality // 6)))
    elif codec == "libx264":
        # Its macroblock tree reads uninitialised memory, so the bytes would differ from run to run.
        options["x264-params"] = "mbtree=0"
    return options | {"flags": "+bitexact"}
