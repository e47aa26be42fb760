"""Writing videos: a small encoder through PyAV; text and outlined areas on a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image, ImageColor, ImageDraw, ImageFont

from summit_train.data.video.render import Frames

_SMALLEST = 8  # letters, pixels
# Encodes a uint8 RGB picture (H, W, 3) to be shown at a time in ticks.
Write = Callable[[Frames, int], None]
Drawn = tuple[int, str, tuple[float, float, float, float]]  # an area: its class, text, left, top, width and height


@dataclass(frozen=True)
class Encoding:
    """How a video is encoded.

    codec: by default libx264 if this PyAV has it, else mpeg4. quality: x264's constant rate factor, 0 is the finest
    (mpeg4 takes a sixth of it for its quantiser). key_every: frames between key frames. b_frames: in a row, at most.
    tick: seconds [1 / fps].
    """

    codec: str = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    quality: int = 18
    key_every: int = 12
    b_frames: int = 2
    tick: Fraction | None = None


@contextmanager
def open_writer(
    path: str | os.PathLike[str], size: tuple[int, int], fps: int | Fraction, encoding: Encoding
) -> Iterator[Write]:
    """Yield what writes frames of this (width, height); the container follows the path's extension.

    The file appears under its name when the block ends; after an error in the block nothing is left of it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        with encoder(f"file:{temporary}", size, fps, encoding) as write:
            yield write
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def encoder(
    file: Any, size: tuple[int, int], fps: int | Fraction, encoding: Encoding, container_format: str | None = None
) -> Iterator[Write]:
    """Yield what writes frames of this (width, height), one thread; the same frames give the same bytes.

    file: a name, or an open file, which needs `container_format`. It is complete when the block ends.
    """
    options = {"crf": str(encoding.quality), "preset": "fast"}
    if encoding.codec == "mpeg4":
        options = dict.fromkeys(("qmin", "qmax"), str(max(1, encoding.quality // 6)))
    elif encoding.codec == "libx264":
        # Its macroblock tree reads uninitialised memory, so the bytes would differ from run to run.
        options["x264-params"] = "mbtree=0"
    with av.open(file, "w", format=container_format, options={"fflags": "+bitexact"}) as container:
        options["flags"] = "+bitexact"
        stream = cast(VideoStream, container.add_stream(encoding.codec, rate=fps, options=options))
        stream.width, stream.height = size
        # Half-resolution colour needs even sides.
        stream.pix_fmt = "yuv444p" if size[0] % 2 or size[1] % 2 else "yuv420p"
        context = stream.codec_context
        context.thread_count = 1
        context.gop_size = encoding.key_every
        context.max_b_frames = encoding.b_frames
        if encoding.tick is not None:
            context.time_base = encoding.tick

        def write(picture: Frames, time: int) -> None:
            frame = VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = time
            frame.time_base = encoding.tick or 1 / Fraction(fps)
            container.mux(stream.encode(frame))

        yield write
        container.mux(stream.encode(None))


def write_video(path: str | os.PathLike[str], frames: Frames, fps: int | Fraction = 25, **how: Any) -> None:
    """Encode uint8 RGB frames (T, H, W, 3). how: as of Encoding."""
    _, height, width, _ = frames.shape
    with open_writer(path, (width, height), fps, Encoding(**how)) as write:
        for time, picture in enumerate(frames):
            write(picture, time)


def jpeg(picture: Frames, quality: int = 80) -> bytes:
    """Return an RGB picture (H, W, 3), or a grey one (H, W), as the bytes of a JPEG."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "JPEG", quality=quality)
    return content.getvalue()


def scaled(frames: Frames, short_side: int, long_side: int = 1000) -> Frames:
    """Return frames (T, H, W, 3), scaled down where a side is longer than these."""
    height, width = frames.shape[1:3]
    factor = min(1, short_side / min(height, width), long_side / max(height, width))
    size = round(width * factor), round(height * factor)
    return np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in frames])


def with_caption(picture: Frames, text: str) -> Frames:
    """Return a copy of an RGB picture (H, W, 3) with white text on a black bar at its upper left corner.

    The letters are a sixteenth of the height, smaller if the text would be too long; if it still is, its end is cut.
    Without text the picture stays as it is.
    """
    image = Image.fromarray(picture)
    size = max(_SMALLEST, image.height // 16)
    while (width := round(ImageFont.load_default(size).getlength(text)) + size) > image.width and size > _SMALLEST:
        size -= 1
    if text:
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, width, size * 3 // 2), fill=(0, 0, 0))
        font = ImageFont.load_default(size)
        place = (size // 2, size * 3 // 4)
        draw.text(place, text, fill=(255, 255, 255), font=font, anchor="lm")
    return np.array(image)


def with_areas(picture: Frames, areas: Sequence[Drawn]) -> Frames:
    """Return a copy of an RGB picture (H, W, 3) with outlined areas, the first one on top.

    Their edges are in pixels, continuous: 0, 0, 1, 1 is the first pixel. A class has a colour of its own. The text
    is above its box or, where it does not fit, in it.
    """
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    size = max(_SMALLEST, image.height // 30)
    font = ImageFont.load_default(size)
    line = max(2, image.height // 200)
    for label, text, (x, y, across, down) in reversed(areas):
        left, top, right, bottom = map(round, (x, y, x + across, y + down))
        # The golden angle: hues of neighbouring numbers are far apart.
        colour = ImageColor.getrgb(f"hsv({label * 137.508 % 360:.0f}, 90%, 100%)")
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=line)
        height, width = size * 5 // 4, round(font.getlength(text)) + size // 2
        x, y = max(0, min(left, image.width - width)), top - height if top >= height else top + line
        if text:
            draw.rectangle((x, y, x + width - 1, y + height - 1), fill=(0, 0, 0))
            draw.text((x + size // 4, y + height // 2), text, fill=(255, 255, 255), font=font, anchor="lm")
    return np.array(image)
