"""Decoded frames to pixels: upright, scaled, cut, RGB.

A decoder's frame is scaled by swscale in its own colours, and only the crop of it becomes RGB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from av.buffer import Buffer
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.plane import VideoPlane
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from summit_train.data.augment import View
from summit_train.data.upright import Turn, cut, mirrored, turn_of

Frames: TypeAlias = NDArray[np.uint8]
ViewsOf = Callable[[int, int], Sequence[View]]

# Eight bits, colour at half the resolution: what most videos and JPEG pictures have.
_HALF_COLOUR = frozenset({"yuv420p", "yuvj420p"})


def turn_in(frame: VideoFrame) -> Turn:
    """How the frame becomes upright: by its display matrix."""
    # Not `frame.side_data`: frame and container would hold each other until the garbage collector comes by.
    side_data: Mapping[str, Buffer] = cast(Any, SideDataContainer)(frame)
    matrix = side_data.get("DISPLAYMATRIX")
    return Turn() if matrix is None else turn_of(bytes(matrix))


class Renderer:
    """Turns decoded frames into the crops of the asked views.

    Swscale scales a frame in its own colours, where that takes a third of the time, and only the crop becomes RGB.
    Straight to RGB it would besides shift colours by up to three levels at even widths and by none at odd ones.
    """

    def __init__(self, views_of: ViewsOf) -> None:
        self._views_of = views_of
        self._views: Sequence[View] = ()
        self._scaler, self._painter = VideoReformatter(), VideoReformatter()
        self.stored_size = (0, 0)

    def __call__(self, frame: VideoFrame) -> list[Frames]:
        """One contiguous (crop_height, crop_width, 3) picture a view; the first frame's size counts."""
        turn = turn_in(frame)
        if not self._views:
            self.stored_size = (frame.width, frame.height)
            self._views = self._views_of(*turn.size(*self.stored_size))
        sizes = {(view.width, view.height) for view in self._views}
        scaled = {size: self._scaled(frame, turn.size(*size)) for size in sizes}
        return [self._crop(scaled[view.width, view.height], view, turn) for view in self._views]

    def _scaled(self, frame: VideoFrame, size: tuple[int, int]) -> VideoFrame:
        kind = frame.format.name if frame.format.name in _HALF_COLOUR else "rgb24"
        return self._scaler.reformat(frame, *size, kind, interpolation=Interpolation.BILINEAR, threads=1)

    def _crop(self, scaled: VideoFrame, view: View, turn: Turn) -> Frames:
        if turn != Turn() or scaled.format.name not in _HALF_COLOUR:
            return cut(turn(self._rgb(scaled, 0, 0, scaled.width, scaled.height)), view)
        rgb = self._rgb(scaled, view.x, view.y, view.crop_width, view.crop_height)
        return mirrored(rgb) if view.flip else np.ascontiguousarray(rgb)

    def _rgb(self, scaled: VideoFrame, x: int, y: int, width: int, height: int) -> Frames:
        """A rectangle of a scaled frame, (height, width, 3)."""
        if scaled.format.name in _HALF_COLOUR:
            scaled = _part(scaled, x // 2, y // 2, (x + width + 1) // 2, (y + height + 1) // 2)
            x, y = x % 2, y % 2
        rgb = self._painter.reformat(scaled, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
        return cast(Frames, rgb.to_ndarray())[y : y + height, x : x + width]


def _part(frame: VideoFrame, left: int, top: int, right: int, bottom: int) -> VideoFrame:
    """The rectangle of a frame with half-resolution colour, in units of two pixels, as a frame of its own.

    It is made wider for swscale's fast way, which takes 16 pixels at a time; what stands there is not set.
    """
    part = VideoFrame(-(-2 * (right - left) // 16) * 16, 2 * (bottom - top), frame.format.name)
    part.colorspace, part.color_range = frame.colorspace, frame.color_range
    for pixels, source, target in zip((2, 1, 1), frame.planes, part.planes, strict=True):
        taken = _plane(source)[pixels * top : pixels * bottom, pixels * left : pixels * right]
        _plane(target)[: taken.shape[0], : taken.shape[1]] = taken
    return part


def _plane(plane: VideoPlane) -> Frames:
    """(height, width) of one of a frame's planes, in its own memory."""
    return np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
