"""Decode JPEG and PNG pictures with PyAV, whole or only the needed parts.

The blocks between two restart markers of a JPEG can be decoded alone (ITU-T T.81, F.1.1.5.1). Where there are enough
markers, as in pictures that `data pack` makes, the blocks around a rectangle make a smaller picture with bit-identical
pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, cast

import av
import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.data.video.decode import codec_options
from summit_train.data.video.render import Frames, Renderer, Turn, planes, turn_in
from summit_train.data.video.source import Budget, DecodeError

# By the first bytes of a file: the codec, and what is among its last bytes.
_KINDS = {b"\xff\xd8": ("mjpeg", b"\xff\xd9"), b"\x89PNG": ("png", b"IEND")}
_TRAILING_BYTES = 256  # that some programs leave behind a picture's end
_STACK_HEIGHT = 8192  # of pictures that are decoded together, in pixels
# Baseline, and colour at half the resolution: a unit of 16 x 16 pixels has four blocks of brightness, two of colour.
UNIT = 16
_END = b"\xff\xd9"
_SIZE, _HUFFMAN, _QUANTISER, _SCAN, _INTERVAL, _EXIF = 0xC0, 0xC4, 0xDB, 0xDA, 0xDD, 0xE1
_OTHER_FRAMES = frozenset(range(0xC1, 0xD0)) - {_HUFFMAN, 0xC8, 0xCC}
_SAMPLES = b"\x08\x03\x22\x11\x11"  # eight bits, three colours, their sampling factors
_RESTART = 0xD0  # .. 0xD7


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
            if not views:  # the first cannot be cut, or one is damaged: decoding each alone tells which
                views = [self._render(_picture(*pictures[0], self._budget)[1])]
            yield from views
            pictures = pictures[len(views) :]

    def _together(self, pictures: Sequence[tuple[str, bytes]]) -> list[list[Frames]]:
        """Return the views of the first pictures that can be decoded as one: with one header, of a permitted size."""
        name, content = pictures[0]
        layout = layout_of(content)
        if layout is None or not _is_whole(content, _END):
            return []
        self._budget.check()
        self._budget.size(layout.width, layout.height)
        # FFmpeg counts 128 pixels more on either side.
        most = self._budget.limits.pixels // (layout.width + 128) // (layout.height + 128)
        most, head = max(1, min(_STACK_HEIGHT // layout.height, most)), content[: layout.scan_at]
        contents = [one for _, one in pictures[:most]]
        alike = list(takewhile(lambda one: one.startswith(head) and _is_whole(one, _END), contents))
        stack = stack_of(alike, layout, self._render.box(layout.width, layout.height))
        if stack is None:
            return []
        self._decoder = self._decoder or _picture_decoder("mjpeg", self._budget)
        try:
            frame = _decoded(name, stack.content, self._decoder)
        except DecodeError:
            return []
        return self._render.together(_unstacked(frame, stack, layout, len(alike)), Turn())


def probe_picture(name: str, content: bytes, budget: Budget) -> tuple[str, int, int]:
    """Decode a JPEG or PNG picture; return (codec, upright width, height). Raises DecodeError."""
    codec, frame = _picture(name, content, budget)
    return (codec, *turn_in(frame).size(frame.width, frame.height))


def _picture(name: str, content: bytes, budget: Budget) -> tuple[str, VideoFrame]:
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise DecodeError(name, "is not a JPEG or PNG picture" if content else "is empty")
    codec, end = kind
    budget.check()
    if not _is_whole(content, end):
        raise DecodeError(name, "is cut short")
    frame = _decoded(name, content, _picture_decoder(codec, budget))
    budget.size(frame.width, frame.height)
    return codec, frame


def _is_whole(content: bytes, end: bytes) -> bool:
    return end in content[-_TRAILING_BYTES:]


def _picture_decoder(codec: str, budget: Budget) -> VideoCodecContext:
    context = cast(VideoCodecContext, av.CodecContext.create(codec, "r"))
    # Else missing parts of a picture would be grey.
    context.options = {"err_detect": "explode", **codec_options(budget)}
    context.thread_count = 1
    return context


def _decoded(name: str, content: bytes, decoder: VideoCodecContext) -> VideoFrame:
    try:
        frames = decoder.decode(Packet(content))
    except (av.FFmpegError, MemoryError) as error:
        raise DecodeError(name, f"cannot be decoded: {getattr(error, 'strerror', error)}") from error
    if len(frames) != 1:
        raise DecodeError(name, "is damaged: no picture can be decoded")
    return frames[0]


# Cutting a rectangle out of the bytes of JPEG pictures.


class Layout(NamedTuple):
    """A picture's bytes. units: of 16 x 16 pixels in a restart interval; size_at, scan_at: offsets."""

    width: int
    height: int
    units: int
    size_at: int
    scan_at: int


class Stack(NamedTuple):
    """The same rectangle of several pictures, one below the other, as the bytes of one picture.

    pitch: pixels from one rectangle's upper edge to the next one's. left, top: its place in its picture.
    """

    content: bytes
    pitch: int
    left: int
    top: int
    height: int


def restart_units(width: int) -> int:
    """Return the units between restart markers: 2, 3 or 1, whichever divides a row, so that markers form columns."""
    columns = -(-width // UNIT)
    return next(units for units in (2, 3, 1) if columns % units == 0)


def layout_of(content: bytes) -> Layout | None:
    """Return the layout of a picture that can be cut and has all of its tables; None for anything else."""
    width, height, units, size_at = 0, 0, 0, 0
    seen: list[int] = []
    at, marker = 2, 0  # segments follow each other up to the scan (T.81, B.1.1.4)
    while marker != _SCAN and content[at : at + 1] == b"\xff" and at + 4 <= len(content):
        marker, begin, at = content[at + 1], at + 4, at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        body = content[begin:at]
        seen.append(marker)
        if marker == _SIZE:
            size_at = begin + 1
            height, width = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
            if body[:1] + body[5:6] + body[7:15:3] != _SAMPLES:
                return None
        elif marker == _INTERVAL:
            units = int.from_bytes(body[:2], "big")
        elif marker == _EXIF or marker in _OTHER_FRAMES:  # it may be turned; not baseline
            return None
        elif marker == _SCAN:
            has_tables = (seen.count(_QUANTISER), seen.count(_HUFFMAN), seen.count(_SIZE)) == (2, 4, 1)
            is_whole = body[:1] == b"\x03" and at < len(content)
            if has_tables and is_whole and width and height and units and -(-width // UNIT) % units == 0:
                return Layout(width, height, units, size_at, at)
    return None


def stack_of(contents: Sequence[bytes], layout: Layout, box: tuple[int, int, int, int]) -> Stack | None:
    """Cut the smallest parts with the box (left, top, right, bottom), in pixels, out of pictures with one layout.

    All have the same bytes up to the scan. None if one's markers do not match its header: decoding that picture alone
    then raises the error.
    """
    units, columns, rows = layout.units, -(-layout.width // UNIT), -(-layout.height // UNIT)
    first, last = box[0] // (UNIT * units), -(-box[2] // (UNIT * units))
    top, bottom = box[1] // UNIT, -(-box[3] // UNIT)
    intervals = columns // units
    together = b"".join(contents)
    bounds = _bounds(together, contents, layout, rows * intervals)
    if bounds is None:
        return None
    # Of each row of units all from the first interval's bytes to the last one's marker.
    starts = (bounds[:, :-1].reshape(-1, rows, intervals)[:, top:bottom, first] + 2).ravel().tolist()
    ends = (bounds[:, 1:].reshape(-1, rows, intervals)[:, top:bottom, last - 1] + 2).ravel().tolist()
    blocks = bytearray(b"".join([together[start:end] for start, end in zip(starts, ends, strict=True)]))
    # The markers between intervals are numbered from 0 to 7 in turn.
    lengths = np.diff(bounds).reshape(-1, rows, intervals)[:, top:bottom, first:last]
    markers = np.cumsum(lengths) - 1
    np.frombuffer(blocks, np.uint8)[markers] = _RESTART + np.arange(len(markers)) % 8
    blocks[-2:] = _END
    left, upper, pitch = first * units * UNIT, top * UNIT, (bottom - top) * UNIT
    width, height = min(last * units * UNIT, layout.width) - left, min(bottom * UNIT, layout.height) - upper
    size = (pitch * (len(contents) - 1) + height).to_bytes(2, "big") + width.to_bytes(2, "big")
    head = together[: layout.size_at] + size + together[layout.size_at + 4 : layout.scan_at]
    return Stack(head + blocks, pitch, left, upper, height)


def _bounds(together: bytes, contents: Sequence[bytes], layout: Layout, intervals: int) -> NDArray[np.int64] | None:
    """Return the offsets of each picture's markers in all pictures' bytes: (picture, intervals + 1).

    The first is two bytes before the scan, the last the picture's end.
    """
    starts = np.cumsum([0, *map(len, contents)])
    scan: NDArray[np.uint8] = np.frombuffer(together, np.uint8)
    places = np.flatnonzero(scan[:-1] == 0xFF)
    marks = places[scan[places + 1] & 0xF8 == _RESTART]
    scans = starts[:-1] + layout.scan_at
    inside = np.searchsorted(marks, np.stack([scans, starts[1:]]))
    if np.any(inside[1] - inside[0] != intervals - 1):
        return None
    between = marks[inside[0][:, None] + np.arange(intervals - 1)]
    ends = [start + content.rfind(_END) for start, content in zip(starts, contents, strict=False)]
    return np.column_stack([scans - 2, between, ends])


def _unstacked(frame: VideoFrame, stack: Stack, layout: Layout, num_pictures: int) -> Iterator[VideoFrame]:
    """Yield whole pictures of which a decoded stack has one part each; the rest is grey."""
    sources = planes(frame)
    for number in range(num_pictures):
        picture = VideoFrame(layout.width, layout.height, frame.format.name)
        picture.colorspace, picture.color_range = frame.colorspace, frame.color_range
        for pixels, source, target in zip((2, 1, 1), sources, planes(picture), strict=True):
            target[:] = 128
            left, top, y = (pixels * place // 2 for place in (stack.left, stack.top, stack.pitch * number))
            taken = source[y : y - (-pixels * stack.height // 2)]
            target[top : top + taken.shape[0], left : left + taken.shape[1]] = taken
        yield picture
