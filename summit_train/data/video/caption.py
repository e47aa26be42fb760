"""A line of text on a picture."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from summit_train.data.video.render import Frames

_SMALLEST = 8
_INK, _PAPER = (255, 255, 255), (0, 0, 0)


def with_caption(picture: Frames, text: str) -> Frames:
    """Return a copy of an RGB picture (H, W, 3) with white text on a black bar at its upper left corner.

    The letters are a sixteenth of the height, smaller where the text would be too long; where it still is, its end is
    cut. Without text there is no bar.
    """
    image = Image.fromarray(picture)
    if text:
        draw = ImageDraw.Draw(image)
        size = max(_SMALLEST, image.height // 16)
        while size > _SMALLEST and _width(text, size) + size > image.width:
            size -= 1
        draw.rectangle((0, 0, _width(text, size) + size, size * 3 // 2), fill=_PAPER)
        draw.text((size // 2, size * 3 // 4), text, fill=_INK, font=ImageFont.load_default(size), anchor="lm")
    return np.array(image)


def _width(text: str, size: int) -> int:
    return round(ImageFont.load_default(size).getlength(text))
