"""The small encoder, and the text on a picture: where it stands, and what it leaves alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.video.encode import scaled, with_areas, with_caption, write_video


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (20, 32, 48, 3), np.uint8)
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        write_video(tmp_path / name / "a.mp4", frames, b_frames=3)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["a.mp4"]
    assert (tmp_path / "once/a.mp4").read_bytes() == (tmp_path / "again/a.mp4").read_bytes()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="MALLOC_PERTURB_ is glibc's")
def test_uninitialised_memory_does_not_get_into_the_bytes(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\nfrom summit_train.data.video.encode import write_video\n"
        "t, y, x, c = np.meshgrid(*map(np.arange, (6, 24, 32, 3)), indexing='ij')\n"
        "ramp = (x * 255 / 31 + 9 * t + 3 * y + 40 * c).astype(np.uint8)\n"
        "write_video(sys.argv[1], ramp, b_frames=3)\n"
    )
    for fill in ("1", "255"):
        environ = os.environ | {"MALLOC_PERTURB_": fill}
        words = [sys.executable, "-c", program, tmp_path / f"{fill}.mp4"]
        subprocess.run(words, cwd=Path(__file__).parents[3], env=environ, check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_video_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_video(tmp_path / "a.mp4", np.zeros((2, 16, 16, 4), np.uint8))
    assert not list(tmp_path.iterdir())


def _changed(text: str, height: int = 160, width: int = 240) -> tuple[int, int]:
    """The (bottom, right) ends of what a caption changes, which begins at the upper left corner."""
    picture = np.full((height, width, 3), 90, np.uint8)
    drawn = with_caption(picture, text)
    assert drawn.shape == picture.shape and drawn.dtype == np.uint8 and (picture == 90).all()
    rows, columns = (np.flatnonzero((drawn != 90).any((axis, 2))) for axis in (1, 0))
    assert rows[0] == columns[0] == 0 and len(rows) == rows[-1] + 1 and len(columns) == columns[-1] + 1
    assert drawn.max() > 200 and drawn.min() == 0, "white on black"
    return int(rows[-1]), int(columns[-1])


def test_the_bar_holds_the_text_whose_letters_shrink_if_it_is_long() -> None:
    short, long = _changed("walk 0.93"), _changed("walk slowly 0.93")
    assert short[0] == long[0] == 15  # letters of 160 / 16 = 10 pixels, and half of it around them
    assert 40 < short[1] < long[1] < 239
    assert _changed("a long name 0.93", 320, 120)[0] < _changed("a 0.93", 320, 120)[0] == 30
    assert _changed("a name that is far too long for such a picture 0.93", 32, 32) == (12, 31)
    grey = np.full((160, 240, 3), 90, np.uint8)
    assert (with_caption(grey, "") == grey).all()
    assert (with_caption(grey, "a") != with_caption(grey, "b")).any()


def test_frames_are_scaled_down_to_a_short_or_a_long_side_and_never_up() -> None:
    frames = np.repeat(np.array([50, 200], np.uint8), 40 * 60 * 3).reshape(2, 40, 60, 3)
    for sides, shape in (((20,), (20, 30)), ((80,), (40, 60)), ((30, 30), (20, 30))):
        small = scaled(frames, *sides)
        assert small.shape == (2, *shape, 3) and [np.unique(one).tolist() for one in small] == [[50], [200]]


def test_boxes_have_their_classes_colours_at_their_edges_and_nowhere_else() -> None:
    grey = np.full((160, 240, 3), 90, np.uint8)
    drawn = with_areas(grey, [(0, "", (40.4, 60, 80.2, 70.2)), (1, "", (100, 100, 200, 55))])
    assert (grey == 90).all() and drawn.shape == grey.shape
    red, green = (255, 25, 25), (25, 255, 94)  # hues of 0 and 138 degrees
    for label, places in (
        (red, [(60, 40), (61, 90), (129, 120), (90, 41), (90, 119), (129, 110)]),  # the first box is on top
        (green, [(154, 100), (101, 130), (153, 239), (110, 101)]),
    ):
        assert all(tuple(drawn[place]) == label for place in places), label
    is_edge = np.zeros((160, 240), np.bool_)
    for top, bottom, left, right in ((60, 130, 40, 121), (100, 155, 100, 300)):
        is_edge[top:bottom, left:right] = True
    outside = drawn[~is_edge]
    assert (outside == 90).all()
    assert (drawn[62:99, 42:119] == 90).all() and (drawn[132:153, 102:240] == 90).all()


@pytest.mark.parametrize(("top", "bar"), [(40, (30, 39)), (3, (5, 14))])
def test_the_text_of_a_box_stands_above_it_or_in_it(top: int, bar: tuple[int, int]) -> None:
    drawn = with_areas(np.full((160, 240, 3), 90, np.uint8), [(2, "car 0.98", (230, top, 8, 90 - top))])
    rows, columns = np.nonzero((drawn == 0).all(2))
    assert (rows.min(), rows.max()) == bar and columns.max() <= 239 and columns.min() < 215, "all of it is in sight"
    assert drawn[bar[0] : bar[1] + 1].min(2).max() > 200, "white on black"
    assert (with_areas(drawn, []) == drawn).all()
