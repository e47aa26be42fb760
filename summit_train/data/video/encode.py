"""A small encoder of videos through PyAV."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
from av.video.frame import VideoFrame

from summit_train.data.video.render import Frames


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
    """Encode uint8 RGB frames (T, H, W, 3) on one thread; the same input gives the same bytes.

    The container follows the path's extension. The file appears under its name when it is complete.
    codec: by default libx264 where this PyAV has it, else mpeg4. quality: x264's constant rate factor, 0 is the finest
    (mpeg4 takes a sixth of it for its quantiser). key_every: frames between key frames. b_frames: at most so many in a
    row. rotation: degrees counterclockwise, for the display matrix. times: each frame's presentation time in units of
    1 / fps, rising (default 0, 1, 2, ...).
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    codec = codec or ("libx264" if "libx264" in av.codecs_available else "mpeg4")
    try:
        with av.open(f"file:{temporary}", "w", options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream(codec, rate=fps, options=_encoder_options(codec, quality))
            _, stream.height, stream.width, _ = frames.shape
            # Half-resolution colour needs even sides.
            stream.pix_fmt = "yuv444p" if stream.width % 2 or stream.height % 2 else "yuv420p"
            stream.codec_context.thread_count = 1
            stream.codec_context.gop_size = key_every
            stream.codec_context.max_b_frames = b_frames
            stream.set_display_rotation(rotation)
            for number, picture in enumerate(frames):
                frame = VideoFrame.from_ndarray(picture, "rgb24")
                frame.pts = number if times is None else times[number]
                frame.time_base = 1 / Fraction(fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _encoder_options(codec: str, quality: int) -> dict[str, str]:
    options = {"crf": str(quality), "preset": "fast"}
    if codec == "mpeg4":
        options = dict.fromkeys(("qmin", "qmax"), str(max(1, quality // 6)))
    elif codec == "libx264":
        # Its macroblock tree reads uninitialised memory, so the bytes would differ from run to run.
        options["x264-params"] = "mbtree=0"
    return options | {"flags": "+bitexact"}
