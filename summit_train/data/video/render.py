"""Decoded frames to pixels: upright, scaled, cropped, RGB."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from av.buffer import Buffer
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from summit_train.data.video.augment import View, cut
from summit_train.data.video.jpeg import Stack
from summit_train.modality import RGB

Frames: TypeAlias = NDArray[np.uint8]
ViewsOf = Callable[[int, int], Sequence[View]]

# Eight bits, colour at half the resolution: what most videos and JPEG pictures have.
_HALF_COLOUR = frozenset({"yuv420p", "yuvj420p"})


def turn_in(frame: VideoFrame) -> Turn:
    """Return the turn that makes a frame upright, by its display matrix."""
    # Not `frame.side_data`: frame and container would hold each other until the garbage collector comes by.
    try:
        side_data: Mapping[str, Buffer] = cast(Any, SideDataContainer)(frame)
    except ValueError:
        # Side data that this PyAV does not know, such as EXIF: it gives the angle, but not the mirroring.
        return turn_by(frame.rotation)
    matrix = side_data.get("DISPLAYMATRIX")
    return Turn() if matrix is None else turn_of(bytes(matrix))


class Renderer:
    """Turns decoded frames into crops.

    Swscale scales a frame in its own colours, which takes a third of the time, and only the crop becomes RGB. Scaling
    straight to RGB would also shift colours by up to three levels at even widths.
    """

    def __init__(self, views_of: ViewsOf) -> None:
        self._views_of = views_of
        self._views: Sequence[View] = ()
        self._scaler, self._painter = VideoReformatter(), VideoReformatter()
        self.stored_size = (0, 0)
        self._canvas: VideoFrame | None = None
        self._canvas_planes: Sequence[Frames] = ()

    def __call__(self, frame: VideoFrame, turn: Turn | None = None) -> list[Frames]:
        """Return one contiguous (crop_height, crop_width, 3) picture a view; the first frame's size counts.

        turn: makes the frame upright; by default the display matrix's.
        """
        turn = turn or turn_in(frame)
        self._look(*turn.size(frame.width, frame.height), (frame.width, frame.height))
        sizes = {(view.width, view.height) for view in self._views}
        scaled = {size: self._scaled(frame, turn.size(*size)) for size in sizes}
        return [self._crop(scaled[view.width, view.height], view, turn) for view in self._views]

    def together(self, frame: VideoFrame, stack: Stack, num_pictures: int, size: tuple[int, int]) -> list[list[Frames]]:
        """Return the crops of each picture of `size`, of which a decoded stack, cut by `box`, has one part each.

        Their crops become RGB all at once, and are views of one array.
        """
        self._look(*size, size)
        sheets, planes = [_Sheet(view, num_pictures) for view in self._views], _planes(frame)
        for number in range(num_pictures):
            canvas = self._on_canvas(frame, planes, stack, number, size)
            scaled = {side: self._scaled(canvas, side) for side in {(view.width, view.height) for view in self._views}}
            for sheet, view in zip(sheets, self._views, strict=True):
                sheet.put(number, scaled[view.width, view.height])
        rgb = [sheet.rgb(self._painter) for sheet in sheets]
        return [list(pictures) for pictures in zip(*rgb, strict=True)]

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) of the part of an upright picture that the views need, in its pixels."""
        self._look(width, height, (width, height))
        across = [_needed(view.x, view.crop_width, view.width, width) for view in self._views]
        down = [_needed(view.y, view.crop_height, view.height, height) for view in self._views]
        (lefts, rights), (tops, bottoms) = zip(*across, strict=True), zip(*down, strict=True)
        return min(lefts), min(tops), max(rights), max(bottoms)

    def _on_canvas(
        self, frame: VideoFrame, planes: Sequence[Frames], stack: Stack, number: int, size: tuple[int, int]
    ) -> VideoFrame:
        """Put part `number` of a stack onto a canvas of `size`, which the next call overwrites."""
        canvas = self._canvas
        if canvas is None or (canvas.width, canvas.height, canvas.format.name) != (*size, frame.format.name):
            canvas = self._canvas = VideoFrame(*size, frame.format.name)
            self._canvas_planes = _planes(canvas)
            for plane in self._canvas_planes:
                plane[:] = 128
        canvas.colorspace, canvas.color_range = frame.colorspace, frame.color_range
        for pixels, source, target in zip((2, 1, 1), planes, self._canvas_planes, strict=True):
            left, top, y = (pixels * place // 2 for place in (stack.left, stack.top, stack.pitch * number))
            taken = source[y : y - (-pixels * stack.height // 2)]
            target[top : top + taken.shape[0], left : left + taken.shape[1]] = taken
        return canvas

    def _look(self, width: int, height: int, stored_size: tuple[int, int]) -> None:
        """Choose the views at the first frame."""
        if not self._views:
            self.stored_size = stored_size
            self._views = self._views_of(width, height)

    def _scaled(self, frame: VideoFrame, size: tuple[int, int]) -> VideoFrame:
        kind = frame.format.name if frame.format.name in _HALF_COLOUR else "rgb24"
        return self._scaler.reformat(frame, *size, kind, interpolation=Interpolation.BILINEAR, threads=1)

    def _crop(self, scaled: VideoFrame, view: View, turn: Turn) -> Frames:
        if turn != Turn() or scaled.format.name not in _HALF_COLOUR:
            rgb = self._painter.reformat(scaled, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
            return cut(turn(cast(Frames, rgb.to_ndarray())), view)
        sheet = _Sheet(view, 1)
        sheet.put(0, scaled)
        return np.ascontiguousarray(sheet.rgb(self._painter)[0])


class _Sheet:
    """The same crop of several frames with half-resolution colour, one below the other, converted to RGB together."""

    def __init__(self, view: View, num_frames: int) -> None:
        self._view, self._num_frames = view, num_frames
        self._left, self._right = view.x // 2, (view.x + view.crop_width + 1) // 2  # in units of two pixels
        self._top, self._bottom = view.y // 2, (view.y + view.crop_height + 1) // 2
        self._frame: VideoFrame | None = None
        self._planes: Sequence[Frames] = ()

    def put(self, number: int, scaled: VideoFrame) -> None:
        """Copy the crop of a scaled frame."""
        rows = self._bottom - self._top
        if self._frame is None:
            # Wider, for swscale's fast path of 16 pixels at a time; the padding is not set.
            width = -(-2 * (self._right - self._left) // 16) * 16
            self._frame = VideoFrame(width, 2 * rows * self._num_frames, scaled.format.name)
            self._frame.colorspace, self._frame.color_range = scaled.colorspace, scaled.color_range
            self._planes = _planes(self._frame)
        for pixels, source, target in zip((2, 1, 1), _planes(scaled), self._planes, strict=True):
            across = slice(pixels * self._left, pixels * self._right)
            taken = source[pixels * self._top : pixels * self._bottom, across]
            first = pixels * rows * number
            target[first : first + taken.shape[0], : taken.shape[1]] = taken

    def rgb(self, painter: VideoReformatter) -> list[Frames]:
        """Return the crops, (crop_height, crop_width, 3) each. May be called once."""
        view, frame = self._view, cast(VideoFrame, self._frame)
        x = view.x % 2
        if view.flip:
            _mirror(frame)
            x = frame.width - view.crop_width - x
        rgb = painter.reformat(frame, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
        by_frame = rgb.to_ndarray().reshape(self._num_frames, -1, frame.width, RGB.channels)
        return list(by_frame[:, view.y % 2 :][:, : view.crop_height, x : x + view.crop_width])


def _needed(start: int, length: int, scaled: int, stored: int) -> tuple[int, int]:
    """Return the first and last pixel of a stored side that are needed for a part of the scaled side.

    The margin is two pixels of half-resolution colour, and as much again for each time it is scaled down.
    """
    margin = 2 * (1 + -(-stored // scaled))
    return max(0, start * stored // scaled - margin), min(stored, -(-(start + length) * stored // scaled) + margin)


def _mirror(frame: VideoFrame) -> None:
    """Mirror a frame whose width is a multiple of 16, in place, eight bytes at a time: ten times as fast as one."""
    for plane in _planes(frame):
        eights = plane.view(np.uint64)
        eights[:] = eights[:, ::-1].byteswap()


def _planes(frame: VideoFrame) -> list[Frames]:
    """Return each plane of a frame, (height, width), as a view of its memory."""
    return [
        np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in frame.planes
    ]


@dataclass(frozen=True)
class Turn:
    """The steps from a stored picture to an upright one: transpose, mirror left to right, mirror top to bottom."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) after the turn; its inverse has the same effect on sizes."""
        return (height, width) if self.transpose else (width, height)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the upright picture (H', W', C) of a stored one (H, W, C), without a copy."""
        if self.transpose:
            picture = picture.transpose(1, 0, 2)
        return picture[:: -1 if self.flip_y else 1, :: -1 if self.flip_x else 1]


def turn_of(display_matrix: bytes) -> Turn:
    """Return the quarter turn (and mirroring) nearest to a display matrix.

    The matrix is nine native 32-bit integers a b u, c d v, x y w; the stored pixel (p, q) is shown at
    (a p + c q + x, b p + d q + y) (FFmpeg, libavutil/display.h).
    """
    a, b, _, c, d, *_ = struct.unpack("=9i", display_matrix)
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return Turn(False, a < 0, d < 0)
    return Turn(True, c < 0, b < 0)


def turn_by(degrees: int) -> Turn:
    """Return the quarter turn nearest to an angle counterclockwise, without mirroring."""
    return {
        90: Turn(True, False, True),
        180: Turn(False, True, True),
        270: Turn(True, True, False),
    }.get(round(degrees / 90) * 90 % 360, Turn())


# For EXIF's orientations 1 to 8.
ORIENTATIONS = (
    Turn(),
    Turn(False, True, False),
    Turn(False, True, True),
    Turn(False, False, True),
    Turn(True, False, False),
    Turn(True, True, False),
    Turn(True, True, True),
    Turn(True, False, True),
)
