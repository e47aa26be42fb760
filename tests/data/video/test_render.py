from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from summit_train.data.video.augment import View, cut
from summit_train.data.video.render import Renderer, turn_of

WIDTH, HEIGHT = 61, 47


def _frame(kind: str, width: int = WIDTH, height: int = HEIGHT) -> VideoFrame:
    """A smooth picture whose colours differ from place to place, as a decoder would give it."""
    y, x = np.mgrid[:height, :width]
    picture = np.stack([40 + 2 * x, 50 + 3 * y, 200 - x - y], -1)
    return VideoFrame.from_ndarray(picture.astype(np.uint8), "rgb24").reformat(format=kind)


def _pictures(frame: VideoFrame, *views: View) -> list[NDArray[np.uint8]]:
    return Renderer(views)(frame)


@pytest.mark.parametrize("kind", ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv420p10le", "gray", "rgb24"])
@pytest.mark.parametrize("size", [(80, 60), (81, 63), (61, 47), (30, 23)])
def test_a_crop_is_the_cut_of_the_whole_wherever_it_lies(kind: str, size: tuple[int, int]) -> None:
    width, height = size
    frame = _frame(kind)
    (whole,) = _pictures(frame, View(width, height, 0, 0, width, height))
    assert whole.shape == (height, width, 3)
    for x, y in ((0, 0), (1, 0), (0, 1), (3, 5), (4, 2)):
        for crop_width in (*range(1, 18, 2), 16, width - x):
            view = View(width, height, x, y, crop_width, height - y)
            plain, flipped = _pictures(frame, view, replace(view, flip=True))
            assert plain.flags.c_contiguous and flipped.flags.c_contiguous
            np.testing.assert_array_equal(plain, whole[y:, x : x + crop_width])
            np.testing.assert_array_equal(flipped, plain[:, ::-1])


@pytest.mark.parametrize("kind", ["yuv420p", "yuvj420p", "yuv444p"])
@pytest.mark.parametrize("size", [(80, 60), (81, 63), (61, 47)])
def test_colours_are_those_of_an_exact_conversion(kind: str, size: tuple[int, int]) -> None:
    frame = _frame(kind)
    exact = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    reference = VideoReformatter().reformat(frame, *size, "rgb24", interpolation=exact).to_ndarray()
    (picture,) = _pictures(frame, View(*size, 0, 0, *size))
    difference = np.abs(picture.astype(int) - reference)
    assert difference.mean() < 2.5 and difference.max() <= 8


@pytest.mark.parametrize("space", [1, 5])  # BT.709, BT.470BG
@pytest.mark.parametrize("kind", ["yuv420p", "yuvj420p", "yuv444p"])
def test_scaling_down_keeps_the_colours_of_the_file(kind: str, space: int) -> None:
    """Squares of 4 x 4 pixels in random colours, halved: each keeps its colour in the 2 x 2 pixels that are left."""
    colours = np.random.default_rng(0).integers(40, 216, (16, 24, 3), np.uint8)
    frame = VideoFrame.from_ndarray(colours.repeat(4, 0).repeat(4, 1), "rgb24").reformat(format=kind)
    frame.colorspace = space
    exact = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    reference = VideoReformatter().reformat(frame, 48, 32, "rgb24", interpolation=exact).to_ndarray()
    plain, flipped = _pictures(frame, *(View(48, 32, 3, 1, 40, 30, flip=flip) for flip in (False, True)))
    assert np.abs(plain.astype(int) - reference[1:31, 3:43]).mean() < 1
    np.testing.assert_array_equal(flipped, plain[:, ::-1])


def test_frames_of_several_sizes_get_the_size_of_the_view() -> None:
    render = Renderer([View(WIDTH, HEIGHT, 0, 0, WIDTH, HEIGHT)])
    assert render(_frame("yuv420p"))[0].shape == (HEIGHT, WIDTH, 3)
    assert render(_frame("yuv420p", 24, 18))[0].shape == (HEIGHT, WIDTH, 3)


# Turning pictures upright.


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


def test_a_crop_is_cut_then_mirrored() -> None:
    crop = cut(PICTURE, View(3, 2, 1, 0, 2, 1, flip=True))
    assert crop.tolist() == [[[6, 7, 8], [3, 4, 5]]] and crop.flags.c_contiguous
