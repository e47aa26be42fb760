"""Decoding JPEG and PNG pictures with PyAV, whole or only the parts that are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import cast

import av
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from summit_train.data.video.decode import codec_options
from summit_train.data.video.jpeg import Layout, layout_of, orientation_of, stack_of
from summit_train.data.video.limits import Budget
from summit_train.data.video.render import ORIENTATIONS, Frames, Renderer, Turn, turn_in
from summit_train.data.video.source import DecodeError

_CODECS = {b"\xff\xd8": "mjpeg", b"\x89PNG": "png"}
_ENDS = {"mjpeg": b"\xff\xd9", "png": b"IEND"}
_STACK_HEIGHT = 8192  # of pictures that are decoded together, in pixels
_TRAILING_BYTES = 256  # that some programs leave behind a picture's end


class PictureReader:
    """Reads JPEG and PNG pictures in each of the renderer's views; JPEGs with their own tables share a decoder."""

    def __init__(self, render: Renderer, budget: Budget) -> None:
        self._render, self._budget = render, budget
        self._decoder: VideoCodecContext | None = None

    def read(self, pictures: Sequence[tuple[str, bytes]]) -> Iterator[list[Frames]]:
        """Yield the views of each picture, (name, content). Raises DecodeError, also for one that is cut short.

        Of JPEGs with restart markers only the blocks that the views need are decoded, and several with one header
        together, as one picture; damage elsewhere in them is not seen.
        """
        while pictures:
            views = self._together(pictures)
            if not views:
                _, frame, turn = _picture(*pictures[0], self._budget)
                views = [self._render(frame, turn)]
            yield from views
            pictures = pictures[len(views) :]

    def _together(self, pictures: Sequence[tuple[str, bytes]]) -> list[list[Frames]]:
        """Return the views of the first pictures that can be decoded as one.

        Empty where the first cannot be cut, or one is damaged: decoding each alone tells which.
        """
        name, content = pictures[0]
        layout = layout_of(content) if _ends(content, "mjpeg") else None
        if layout is None:
            return []
        self._budget.time()
        contents = self._alike(pictures, layout)
        stack = stack_of(contents, layout, self._render.box(layout.width, layout.height))
        if stack is None:
            return []
        self._decoder = self._decoder or _picture_decoder("mjpeg", self._budget)
        try:
            frame = _decoded(name, stack.content, self._decoder)
        except DecodeError:
            return []
        return self._render.together(frame, stack, len(contents), (layout.width, layout.height))

    def _alike(self, pictures: Sequence[tuple[str, bytes]], layout: Layout) -> list[bytes]:
        """Return the first pictures with the same header, as many as make one picture of a permitted size."""
        self._budget.size(layout.width, layout.height)
        # FFmpeg counts 128 pixels more on either side.
        most = self._budget.limits.pixels // (layout.width + 128) // (layout.height + 128)
        most = max(1, min(_STACK_HEIGHT // layout.height, most))
        head = pictures[0][1][: layout.scan_at]
        contents = (content for _, content in pictures[:most])
        return list(takewhile(lambda content: content.startswith(head) and _ends(content, "mjpeg"), contents))


def probe_picture(name: str, content: bytes, budget: Budget) -> tuple[str, int, int]:
    """Decode a JPEG or PNG picture: (codec, upright width, height). Raises DecodeError."""
    codec, frame, turn = _picture(name, content, budget)
    return (codec, *turn.size(frame.width, frame.height))


def _picture_decoder(codec: str, budget: Budget) -> VideoCodecContext:
    context = cast(VideoCodecContext, av.CodecContext.create(codec, "r"))
    # Else missing parts of a picture would be grey.
    context.options = {"err_detect": "explode", **codec_options(budget)}
    context.thread_count = 1
    return context


def _picture(name: str, content: bytes, budget: Budget) -> tuple[str, VideoFrame, Turn]:
    """Decode a picture: its codec, the frame, and the turn that makes it upright."""
    codec = next((codec for start, codec in _CODECS.items() if content.startswith(start)), None)
    if codec is None:
        raise DecodeError(name, "is no JPEG or PNG picture" if content else "is empty")
    budget.time()
    if not _ends(content, codec):
        raise DecodeError(name, "is cut short")
    frame = _decoded(name, content, _picture_decoder(codec, budget))
    budget.size(frame.width, frame.height)
    # PyAV passes on the angle of EXIF, but not its mirroring.
    return codec, frame, ORIENTATIONS[orientation_of(content) - 1] if codec == "mjpeg" else turn_in(frame)


def _decoded(name: str, content: bytes, decoder: VideoCodecContext) -> VideoFrame:
    try:
        frames = decoder.decode(Packet(content))
    except (av.FFmpegError, MemoryError) as error:
        raise DecodeError(name, f"cannot be decoded: {getattr(error, 'strerror', error)}") from error
    if len(frames) != 1:
        raise DecodeError(name, "is damaged: no picture can be decoded")
    return frames[0]


def _ends(content: bytes, codec: str) -> bool:
    return _ENDS[codec] in content[-_TRAILING_BYTES:]
