"""Decoded frames to pixels: upright, scaled, cropped, RGB or grey."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from av.buffer import Buffer
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from summit_train.data.video.augment import View, cut
from summit_train.spec.modality import RGB

Frames: TypeAlias = NDArray[np.uint8]
ViewsOf = Callable[[int, int], Sequence[View]]

# Eight bits, colour at half the resolution: what most videos and JPEG pictures have.
_HALF_COLOUR = frozenset({"yuv420p", "yuvj420p"})


@dataclass(frozen=True)
class Turn:
    """The steps from a stored picture to an upright one: transpose, mirror left to right, mirror top to bottom."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) after the turn, or before it."""
        return (height, width) if self.transpose else (width, height)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the upright picture (H', W', C) of a stored one (H, W, C), without a copy."""
        if self.transpose:
            picture = picture.transpose(1, 0, 2)
        return picture[:: -1 if self.flip_y else 1, :: -1 if self.flip_x else 1]


# By quarter turns counterclockwise.
_QUARTER_TURNS = (Turn(), Turn(True, False, True), Turn(False, True, True), Turn(True, True, False))


def turn_of(display_matrix: bytes) -> Turn:
    """Return the quarter turn (and mirroring) nearest to a display matrix.

    The matrix is nine native 32-bit integers a b u, c d v, x y w; the stored pixel (p, q) is shown at
    (a p + c q + x, b p + d q + y) (FFmpeg, libavutil/display.h).
    """
    a, b, _, c, d, *_ = struct.unpack("=9i", display_matrix)
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return Turn(False, a < 0, d < 0)
    return Turn(True, c < 0, b < 0)


def turn_in(frame: VideoFrame) -> Turn:
    """Return the turn that makes a frame upright, by its display matrix or its EXIF angle."""
    # Not `frame.side_data`: frame and container would hold each other until the garbage collector comes by.
    try:
        side_data: Mapping[str, Buffer] = cast(Any, SideDataContainer)(frame)
    except ValueError:
        # Side data that this PyAV does not know, such as EXIF: it gives the angle counterclockwise, but no mirroring.
        return _QUARTER_TURNS[round(frame.rotation / 90) % 4]
    matrix = side_data.get("DISPLAYMATRIX")
    return Turn() if matrix is None else turn_of(bytes(matrix))


class Renderer:
    """Turns decoded frames into crops: scales a frame, then makes interleaved RGB of the crops all at once.

    Scaling straight to interleaved RGB would take twice as long, and swscale then averages the colours of two
    neighbouring pixels. is_grey: the crops are grey, (crop_height, crop_width, 1): pictures of flow.
    """

    def __init__(self, views_of: ViewsOf, *, is_grey: bool = False) -> None:
        self._views_of, self._is_grey = views_of, is_grey
        self._views: Sequence[View] = ()
        self._scaler, self._painter = VideoReformatter(), VideoReformatter()
        self.stored_size = (0, 0)

    def __call__(self, frame: VideoFrame) -> list[Frames]:
        """Return one contiguous (crop_height, crop_width, C) picture a view; the first frame's size counts."""
        turn = turn_in(frame)
        self._look(*turn.size(frame.width, frame.height), (frame.width, frame.height))
        return [np.ascontiguousarray(picture) for picture in self.together([frame], turn)[0]]

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) of the part of an upright picture that the views need, in its pixels."""
        self._look(width, height, (width, height))
        across = [_needed(view.x, view.crop_width, view.width, width) for view in self._views]
        down = [_needed(view.y, view.crop_height, view.height, height) for view in self._views]
        (lefts, rights), (tops, bottoms) = zip(*across, strict=True), zip(*down, strict=True)
        return min(lefts), min(tops), max(rights), max(bottoms)

    def _look(self, width: int, height: int, stored_size: tuple[int, int]) -> None:
        """Choose the views at the first frame."""
        if not self._views:
            self.stored_size = stored_size
            self._views = self._views_of(width, height)

    def together(self, frames: Iterable[VideoFrame], turn: Turn) -> list[list[Frames]]:
        """Return the crops of each of several frames of one kind; the first frame or `box` chose the views.

        The crops of a view become RGB all at once, and may be views of one array.
        """
        sizes = {(view.width, view.height) for view in self._views}
        scaled = [{size: self._scaled(frame, turn.size(*size)) for size in sizes} for frame in frames]
        crops = [self._crops(view, turn, [frame[view.width, view.height] for frame in scaled]) for view in self._views]
        return [list(pictures) for pictures in zip(*crops, strict=True)]

    def _scaled(self, frame: VideoFrame, size: tuple[int, int]) -> VideoFrame:
        """Return a frame at this size. Its pixel format defines the pixels of a clip.

        A frame that is scaled down becomes planar RGB (`gbrp`), with a colour for each pixel: half-resolution colour at
        the new size would lose colour that the video has. Otherwise half-resolution colour stays.
        """
        is_smaller = size[0] < frame.width or size[1] < frame.height
        kind = frame.format.name if frame.format.name in _HALF_COLOUR and not is_smaller else "gbrp"
        kind = "gray" if self._is_grey else kind
        return self._scaler.reformat(frame, *size, kind, interpolation=Interpolation.BILINEAR, threads=1)

    def _crops(self, view: View, turn: Turn, frames: Sequence[VideoFrame]) -> list[Frames]:
        """Return the view's crop of each scaled frame."""
        if self._is_grey:
            return [cut(turn(planes(frame)[0][..., None]), view) for frame in frames]
        if turn != Turn():
            return [cut(turn(self._rgb(frame)), view) for frame in frames]
        sheet, left, top = _sheet(view, frames)
        x = sheet.width - view.crop_width - left if view.flip else left
        by_frame = self._rgb(sheet).reshape(len(frames), -1, sheet.width, RGB.channels)
        return list(by_frame[:, top : top + view.crop_height, x : x + view.crop_width])

    def _rgb(self, frame: VideoFrame) -> Frames:
        rgb = self._painter.reformat(frame, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
        return cast(Frames, rgb.to_ndarray())


def _sheet(view: View, frames: Sequence[VideoFrame]) -> tuple[VideoFrame, int, int]:
    """Return a sheet of the frames' crops, one below the other, mirrored if the view is, and their left and top."""
    kind = frames[0].format.name
    unit = 2 if kind in _HALF_COLOUR else 1  # pixels that share a colour
    left, right = view.x // unit, -(-(view.x + view.crop_width) // unit)
    top, bottom = view.y // unit, -(-(view.y + view.crop_height) // unit)
    # Wider, for swscale's fast path of 16 pixels at a time; the padding is not set.
    sheet = VideoFrame(-(-unit * (right - left) // 16) * 16, unit * (bottom - top) * len(frames), kind)
    sheet.colorspace, sheet.color_range = frames[0].colorspace, frames[0].color_range
    targets = planes(sheet)
    for number, frame in enumerate(frames):
        for pixels, source, target in zip((unit, 1, 1), planes(frame), targets, strict=True):
            taken = source[pixels * top : pixels * bottom, pixels * left : pixels * right]
            first = pixels * (bottom - top) * number
            target[first : first + taken.shape[0], : taken.shape[1]] = taken
    for plane in targets if view.flip else ():
        eights = plane.view(np.uint64)
        eights[:] = eights[:, ::-1].byteswap()  # ten times as fast as byte by byte
    return sheet, view.x % unit, view.y % unit


def _needed(start: int, length: int, scaled: int, stored: int) -> tuple[int, int]:
    """Return the first and last pixel of a stored side that are needed for a part of the scaled side.

    The margin is two pixels of half-resolution colour, and as much again for each time it is scaled down.
    """
    margin = 2 * (1 + -(-stored // scaled))
    return max(0, start * stored // scaled - margin), min(stored, -(-(start + length) * stored // scaled) + margin)


def planes(frame: VideoFrame) -> list[Frames]:
    """Return each plane of a frame, (height, width), as a view of its memory."""
    return [
        np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in frame.planes
    ]
