"""Decoded frames to pixels: upright, scaled, cropped, RGB or grey."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from av.buffer import Buffer
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from summit_train.data.video.augment import View, cut

Frames: TypeAlias = NDArray[np.uint8]

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


def upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Return the (width, height) of a frame as it is shown."""
    return turn_in(frame).size(frame.width, frame.height)


class Renderer:
    """Turns decoded frames into crops: scales a frame, then makes interleaved RGB of each crop.

    Scaling straight to interleaved RGB would take twice as long, and swscale then averages the colours of two
    neighbouring pixels. is_grey: the crops are grey, (crop_height, crop_width, 1): pictures of flow.
    """

    def __init__(self, views: Sequence[View], *, is_grey: bool = False) -> None:
        self._views = views
        self._is_grey = is_grey
        self._scaler = VideoReformatter()
        self._painter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> list[Frames]:
        """Return one contiguous (crop_height, crop_width, C) picture a view."""
        turn = turn_in(frame)
        if (region := self._views[0].region) is not None:
            whole = View(*turn.size(frame.width, frame.height), *region)
            picture = self._crop(whole, turn, self._scaled(frame, (frame.width, frame.height)))
            pixels, kind = (picture[..., 0], "gray") if self._is_grey else (picture, "rgb24")
            frame = VideoFrame.from_ndarray(pixels, kind)
            turn = Turn()
        sizes = {(view.width, view.height) for view in self._views}
        scaled = {size: self._scaled(frame, turn.size(*size)) for size in sizes}
        return [self._crop(view, turn, scaled[view.width, view.height]) for view in self._views]

    def _scaled(self, frame: VideoFrame, size: tuple[int, int]) -> VideoFrame:
        """Return a frame at this size. Its pixel format defines the pixels of a clip.

        A frame that is scaled down becomes planar RGB (`gbrp`), with a colour for each pixel: half-resolution colour at
        the new size would lose colour that the video has. Otherwise half-resolution colour stays.
        """
        is_smaller = size[0] < frame.width or size[1] < frame.height
        kind = frame.format.name if frame.format.name in _HALF_COLOUR and not is_smaller else "gbrp"
        kind = "gray" if self._is_grey else kind
        return self._scaler.reformat(frame, *size, kind, interpolation=Interpolation.BILINEAR, threads=1)

    def _crop(self, view: View, turn: Turn, frame: VideoFrame) -> Frames:
        """Return the view's crop of a scaled frame."""
        if self._is_grey:
            return cut(turn(_planes(frame)[0][..., None]), view)
        if turn != Turn():
            return cut(turn(self._rgb(frame)), view)
        part, left, top = _part(view, frame)
        x = part.width - view.crop_width - left if view.flip else left
        return np.ascontiguousarray(self._rgb(part)[top : top + view.crop_height, x : x + view.crop_width])

    def _rgb(self, frame: VideoFrame) -> Frames:
        rgb = self._painter.reformat(frame, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
        return cast(Frames, rgb.to_ndarray())


def _part(view: View, frame: VideoFrame) -> tuple[VideoFrame, int, int]:
    """Return the part of a frame that has the crop, mirrored if the view is, and the crop's left and top in it."""
    kind = frame.format.name
    unit = 2 if kind in _HALF_COLOUR else 1  # pixels that share a colour
    left, right = view.x // unit, -(-(view.x + view.crop_width) // unit)
    top, bottom = view.y // unit, -(-(view.y + view.crop_height) // unit)
    # Wider, for swscale's fast path of 16 pixels at a time; the padding is not set.
    part = VideoFrame(-(-unit * (right - left) // 16) * 16, unit * (bottom - top), kind)
    part.colorspace, part.color_range = frame.colorspace, frame.color_range
    for pixels, source, target in zip((unit, 1, 1), _planes(frame), _planes(part), strict=True):
        taken = source[pixels * top : pixels * bottom, pixels * left : pixels * right]
        target[: taken.shape[0], : taken.shape[1]] = taken
        if view.flip:
            eights = target.view(np.uint64)
            eights[:] = eights[:, ::-1].byteswap()  # ten times as fast as byte by byte
    return part, view.x % unit, view.y % unit


def _planes(frame: VideoFrame) -> list[Frames]:
    """Return each plane of a frame, (height, width), as a view of its memory."""
    return [
        np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in frame.planes
    ]
