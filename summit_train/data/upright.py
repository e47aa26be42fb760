"""Stored pictures to upright ones, by the display matrix of the container, and crops of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.data.augment import View


@dataclass(frozen=True)
class Turn:
    """How a stored picture becomes upright: transposed, then mirrored left to right, then top to bottom."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The other side's (width, height): upright from stored, and stored from upright."""
        return (height, width) if self.transpose else (width, height)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(H, W, 3) as stored -> (H', W', 3) upright, without a copy."""
        if self.transpose:
            picture = picture.transpose(1, 0, 2)
        return picture[:: -1 if self.flip_y else 1, :: -1 if self.flip_x else 1]


def turn_of(display_matrix: bytes) -> Turn:
    """The quarter turn (and mirroring) of a display matrix; an angle in between goes to the nearest one.

    The matrix is nine native 32-bit integers a b u, c d v, x y w; the stored pixel (p, q) is shown at
    (a p + c q + x, b p + d q + y) (FFmpeg, libavutil/display.h).
    """
    a, b, _, c, d, *_ = struct.unpack("=9i", display_matrix)
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return Turn(False, a < 0, d < 0)
    return Turn(True, c < 0, b < 0)


def turn_by(degrees: int) -> Turn:
    """Quarter turns counterclockwise, without mirroring."""
    return {
        90: Turn(True, False, True),
        180: Turn(False, True, True),
        270: Turn(True, True, False),
    }.get(round(degrees / 90) * 90 % 360, Turn())


# What EXIF's orientations 1 to 8 ask for.
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


def cut(picture: NDArray[np.uint8], view: View) -> NDArray[np.uint8]:
    """The view's crop of an upright (height, width, 3) picture: contiguous (crop_height, crop_width, 3)."""
    crop = picture[view.y : view.y + view.crop_height, view.x : view.x + view.crop_width]
    return mirrored(crop) if view.flip else np.ascontiguousarray(crop)


def mirrored(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A contiguous copy of a (height, width, 3) picture, mirrored left to right."""
    copy = np.empty(picture.shape, np.uint8)
    # One colour after the other: NumPy takes three times as long where the innermost step is over the three.
    for colour in range(picture.shape[2]):
        copy[..., colour] = picture[:, ::-1, colour]
    return copy
