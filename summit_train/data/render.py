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
from summit_train.data.upright import Turn, cut, turn_by, turn_of

Frames: TypeAlias = NDArray[np.uint8]
ViewsOf = Callable[[int, int], Sequence[View]]

# Eight bits, colour at half the resolution: what most videos and JPEG pictures have.
_HALF_COLOUR = frozenset({"yuv420p", "yuvj420p"})


def turn_in(frame: VideoFrame) -> Turn:
    """How the frame becomes upright: by its display matrix."""
    # Not `frame.side_data`: frame and container would hold each other until the garbage collector comes by.
    try:
        side_data: Mapping[str, Buffer] = cast(Any, SideDataContainer)(frame)
    except ValueError:
        # There is a kind that this PyAV does not know, such as EXIF. The angle it gives; of mirroring it says nothing.
        return turn_by(frame.rotation)
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
        self._canvas: VideoFrame | None = None

    def __call__(self, frame: VideoFrame) -> list[Frames]:
        """One contiguous (crop_height, crop_width, 3) picture a view; the first frame's size counts."""
        turn = turn_in(frame)
        self._look(*turn.size(frame.width, frame.height), (frame.width, frame.height))
        sizes = {(view.width, view.height) for view in self._views}
        scaled = {size: self._scaled(frame, turn.size(*size)) for size in sizes}
        return [self._crop(scaled[view.width, view.height], view, turn) for view in self._views]

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of what the views need of a picture that stands upright, in its pixels."""
        self._look(width, height, (width, height))
        across = [_needed(view.x, view.crop_width, view.width, width) for view in self._views]
        down = [_needed(view.y, view.crop_height, view.height, height) for view in self._views]
        (lefts, rights), (tops, bottoms) = zip(*across, strict=True), zip(*down, strict=True)
        return min(lefts), min(tops), max(rights), max(bottoms)

    def on_canvas(self, part: VideoFrame, left: int, top: int, size: tuple[int, int]) -> VideoFrame:
        """A picture of which the part that `box` names is there; left and top are even. It is overwritten next time."""
        canvas = self._canvas
        if canvas is None or (canvas.width, canvas.height, canvas.format.name) != (*size, part.format.name):
            canvas = self._canvas = VideoFrame(*size, part.format.name)
            for plane in canvas.planes:
                _plane(plane)[:] = 128
        canvas.colorspace, canvas.color_range = part.colorspace, part.color_range
        for pixels, source, target in zip((2, 1, 1), part.planes, canvas.planes, strict=True):
            y, x = pixels * top // 2, pixels * left // 2
            _plane(target)[y : y + source.height, x : x + source.width] = _plane(source)
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
            return cut(turn(self._rgb(scaled, 0, 0, scaled.width, scaled.height)), view)
        rgb = self._rgb(scaled, view.x, view.y, view.crop_width, view.crop_height, view.flip)
        return np.ascontiguousarray(rgb)

    def _rgb(self, scaled: VideoFrame, x: int, y: int, width: int, height: int, flip: bool = False) -> Frames:
        """A rectangle of a scaled frame, (height, width, 3); flip: of one with half-resolution colour alone."""
        if scaled.format.name in _HALF_COLOUR:
            scaled = _part(scaled, x // 2, y // 2, (x + width + 1) // 2, (y + height + 1) // 2)
            x, y = x % 2, y % 2
            if flip:
                _mirror(scaled)
                x = scaled.width - width - x
        rgb = self._painter.reformat(scaled, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1)
        return cast(Frames, rgb.to_ndarray())[y : y + height, x : x + width]


def _needed(start: int, length: int, scaled: int, stored: int) -> tuple[int, int]:
    """From where to where a side of the stored picture is needed for a stretch of it as scaled.

    Two pixels of half-resolution colour more on either side, and as much again for each time it is scaled down.
    """
    margin = 2 * (1 + -(-stored // scaled))
    return max(0, start * stored // scaled - margin), min(stored, -(-(start + length) * stored // scaled) + margin)


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


def _mirror(frame: VideoFrame) -> None:
    """Mirror a frame that `_part` made, in place: eight bytes at a time, which NumPy does ten times as fast as one."""
    for plane in frame.planes:
        eights = _plane(plane).view(np.uint64)
        eights[:] = eights[:, ::-1].byteswap()


def _plane(plane: VideoPlane) -> Frames:
    """(height, width) of one of a frame's planes, in its own memory."""
    return np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
