"""The text on a picture: where it stands, and what it leaves alone."""

from __future__ import annotations

import numpy as np
from summit_train.data.video.caption import with_caption

GREY = np.full((160, 240, 3), 90, np.uint8)


def _changed(text: str, height: int = 160, width: int = 240) -> tuple[int, int]:
    """The (bottom, right) ends of what a caption changes, which begins at the upper left corner."""
    picture = np.full((height, width, 3), 90, np.uint8)
    drawn = with_caption(picture, text)
    assert drawn.shape == picture.shape and drawn.dtype == np.uint8 and (picture == 90).all()
    rows, columns = (np.flatnonzero((drawn != 90).any((axis, 2))) for axis in (1, 0))
    assert rows[0] == columns[0] == 0 and len(rows) == rows[-1] + 1 and len(columns) == columns[-1] + 1
    assert drawn.max() > 200 and drawn.min() == 0, "white on black"
    return int(rows[-1]), int(columns[-1])


def test_the_bar_holds_the_text() -> None:
    short, long = _changed("walk 0.93"), _changed("walk slowly 0.93")
    assert short[0] == long[0] == 15  # letters of 160 / 16 = 10 pixels, and half of it around them
    assert 40 < short[1] < long[1] < 239


def test_letters_shrink_where_the_text_is_long() -> None:
    assert _changed("a long name 0.93", 320, 120)[0] < _changed("a 0.93", 320, 120)[0] == 30
    assert _changed("a name that is far too long for such a picture 0.93", 32, 32) == (12, 31)


def test_without_text_the_picture_stays() -> None:
    assert (with_caption(GREY, "") == GREY).all()
    assert (with_caption(GREY, "a") != with_caption(GREY, "b")).any()
