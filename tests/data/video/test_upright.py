from __future__ import annotations

import struct

import numpy as np
import pytest

from summit_train.data.video.augment import View, cut
from summit_train.data.video.render import Turn, turn_by, turn_of

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def _matrix(a: float, b: float, c: float, d: float) -> bytes:
    ones = [round(value * 65536) for value in (a, b, 0, c, d, 0, 0, 0)]
    return struct.pack("=9i", *ones, 1 << 30)


@pytest.mark.parametrize(
    ("matrix", "upright"),
    [
        (_matrix(1, 0, 0, 1), PICTURE),
        (_matrix(0, 1, -1, 0), np.rot90(PICTURE, -1)),  # clockwise: x' = -y, y' = x
        (_matrix(0, -1, 1, 0), np.rot90(PICTURE)),
        (_matrix(-1, 0, 0, -1), np.rot90(PICTURE, 2)),
        (_matrix(-1, 0, 0, 1), np.fliplr(PICTURE)),
        (_matrix(1, 0, 0, -1), np.flipud(PICTURE)),
        (_matrix(0, 1, 1, 0), PICTURE.transpose(1, 0, 2)),
        (_matrix(0.94, 0.34, -0.34, 0.94), PICTURE),  # 20 degrees: no turn is the nearest
        (_matrix(0.34, 0.94, -0.94, 0.34), np.rot90(PICTURE, -1)),
    ],
)
def test_the_display_matrix_says_where_a_pixel_is_shown(matrix: bytes, upright: np.ndarray) -> None:
    turn = turn_of(matrix)
    np.testing.assert_array_equal(turn(PICTURE), upright)
    assert turn.size(3, 2) == upright.shape[1::-1]


def test_no_turn_leaves_the_picture() -> None:
    assert Turn()(PICTURE).tobytes() == PICTURE.tobytes()


def test_a_crop_is_cut_then_mirrored() -> None:
    crop = cut(PICTURE, View(3, 2, 1, 0, 2, 1, flip=True))
    assert crop.tolist() == [[[6, 7, 8], [3, 4, 5]]] and crop.flags.c_contiguous


@pytest.mark.parametrize("degrees", [-180, -90, 0, 90, 180, 270, 88])
def test_a_turn_by_an_angle_is_counterclockwise(degrees: int) -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(turn_by(degrees)(picture), np.rot90(picture, round(degrees / 90)))
