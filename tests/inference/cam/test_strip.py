"""Strips of frames: the background keeps a quarter of its brightness, and texts fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from summit_train.inference.cam.command import draw_strip

BRIGHT, DARK = (200, 100, 40), (50, 25, 10)
ODD = "$Pretending$ to put \N{SNOWMAN} " + "something behind something, " * 9


def strip(path: Path, num_frames: int, height: int = 128, width: int = 128, title: str = "bend, score 0.97") -> Image:
    """The strip of bright frames whose left half is foreground."""
    foreground = np.zeros((num_frames, height, width), bool)
    foreground[:, :, : width // 2] = True
    pictures = np.full((num_frames, height, width, 3), BRIGHT, np.uint8)
    draw_strip(path, ("a.mp4", title), range(num_frames), pictures, foreground)
    return Image.open(path).convert("RGB")


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 32, 64), (8, 128, 128), (4, 512, 256)])
def test_half_of_each_frame_is_darkened(frames: int, height: int, width: int, tmp_path: Path) -> None:
    picture = strip(tmp_path / "strip.png", frames, height, width)
    colours = {colour: count for count, colour in picture.getcolors(1 << 24) or []}
    shown = min(max(height, 128), 256)
    half = frames * shown * (shown * width // height) / 2
    assert colours[BRIGHT] == pytest.approx(colours[DARK], rel=0.1) and 0.7 * half < colours[BRIGHT] < 1.5 * half
    assert picture.getpixel((0, 0)) == picture.getpixel((picture.width - 1, picture.height - 1)) == (255, 255, 255)


def test_texts_fit_whatever_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    picture = strip(tmp_path / "strip.png", 2, title=ODD)
    (figure,) = figures
    title = figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
    boxes = [title, *(axes.title.get_window_extent() for axes in figure.axes)]
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= picture.width and box.y1 <= picture.height
        assert not any(box.overlaps(other) for other in boxes[:number])
