"""Strips of frames: the background keeps a quarter of its brightness, and the size follows from the frames."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from summit_train.inference.cam.figure import Row, draw_strip


def _row(num_frames: int, height: int = 128, width: int = 128, title: str = "bend, score 0.97") -> Row:
    """Bright frames whose left half is foreground."""
    foreground = np.zeros((num_frames, height, width), bool)
    foreground[:, :, : width // 2] = True
    pictures = np.full((num_frames, height, width, 3), (200, 100, 40), np.uint8)
    return Row(title, list(range(num_frames)), pictures, foreground)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        # 8 x 128 + 7 gaps of 4, margins of 10; title 26, and for each row 26, 128 and 20 for the numbers.
        ([_row(8)], (1072, 220)),
        ([_row(8), _row(8)], (1072, 394)),
        ([_row(9)], (1072, 368)),  # the ninth goes below
        ([_row(2)], (500, 220)),  # wide enough for a title
        ([_row(4, 32, 64)], (1056, 220)),  # small frames are enlarged
        ([_row(4, 512, 256)], (544, 348)),  # large ones made smaller
    ],
)
def test_the_size_follows_from_the_frames(rows: list[Row], size: tuple[int, int], tmp_path: Path) -> None:
    draw_strip(tmp_path / "strip.png", "a.mp4", rows)
    picture = matplotlib.image.imread(tmp_path / "strip.png")
    assert picture.shape[1::-1] == size


def test_frames_stand_where_they_should(tmp_path: Path) -> None:
    draw_strip(tmp_path / "strip.png", "a.mp4", [_row(8), _row(8)])
    picture = (255 * matplotlib.image.imread(tmp_path / "strip.png")[:, :, :3]).round().astype(int)
    for top in (62, 62 + 174):
        for column in range(8):
            left = 10 + column * 132
            assert picture[top + 64, left + 32].tolist() == [200, 100, 40]
            assert picture[top + 64, left + 96].tolist() == [50, 25, 10]
    # Between the pictures, and beside them, it is white.
    assert (picture[62:190, 138:142] == 255).all() and (picture[:, :10] == 255).all()


def test_texts_fit_whatever_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    title = "$Pretending$ to put \N{SNOWMAN} " + "something behind something, " * 9
    draw_strip(tmp_path / "strip.png", title, [_row(2, title=title), _row(2, title=title)])
    (figure,) = figures
    boxes = [text.get_window_extent() for text in figure.texts]
    assert len(boxes) == 1 + 2 * (1 + 2)
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= 500 and box.y0 >= 0
        assert not any(box.overlaps(other) for other in boxes[:number])
