from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from summit_train.data import decode
from summit_train.data.augment import View
from summit_train.data.decode import PictureReader
from summit_train.data.jpeg import Layout, layout_of, part_of, restart_units
from summit_train.data.limits import LIMITS, Budget
from summit_train.data.render import Renderer
from summit_train.data.video import DecodeError

TURNED = Image.Exif()
TURNED[0x0112] = 6
SIZES = [(96, 64), (95, 63), (80, 112), (170, 128), (33, 31), (16, 16)]


def _picture(width: int, height: int, seed: int = 0, **options: Any) -> bytes:
    """Colourful noise of 4 x 4 pixels as a JPEG; by default with the restart markers of `data pack`."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    picture = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", **{"restart_marker_blocks": restart_units(width), **options})
    return stream.getvalue()


def _layout(content: bytes) -> Layout:
    layout = layout_of(content)
    assert layout is not None
    return layout


def _pixels(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The brightness."""
    image = Image.open(io.BytesIO(content))
    image.draft("L", None)
    return np.asarray(image)


def _reader(*views: View) -> PictureReader:
    return PictureReader(Renderer(lambda width, height: views), Budget("picture", LIMITS))


def _random_view(width: int, height: int, random: np.random.Generator) -> View:
    across, down = (int(random.integers(max(2, side // 4), 2 * side)) for side in (width, height))
    crop_width, crop_height = (int(random.integers(1, side + 1)) for side in (across, down))
    x, y = int(random.integers(across - crop_width + 1)), int(random.integers(down - crop_height + 1))
    return View(across, down, x, y, crop_width, crop_height, bool(random.integers(2)))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_part_has_the_pixels_of_the_whole(width: int, height: int) -> None:
    content, random, num_parts = _picture(width, height), np.random.default_rng(1), 0
    layout = _layout(content)
    assert (layout.width, layout.height) == (width, height)
    whole = _pixels(content)
    for _ in range(50):
        left, top = int(random.integers(width)), int(random.integers(height))
        right, bottom = int(random.integers(left, width)) + 1, int(random.integers(top, height)) + 1
        part = part_of(content, layout, (left, top, right, bottom))
        if part is None:
            continue
        num_parts += 1
        pixels = _pixels(part.content)
        assert part.left <= left and part.top <= top
        assert part.left + pixels.shape[1] >= right and part.top + pixels.shape[0] >= bottom
        taken = whole[part.top :, part.left :][: pixels.shape[0], : pixels.shape[1]]
        np.testing.assert_array_equal(pixels, taken)
    assert num_parts > 0 or (width, height) == (16, 16)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_view_is_the_same_of_a_part(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    views = [_random_view(width, height, random) for _ in range(60)]
    contents = [_picture(width, height, seed) for seed in range(2)]
    found = [[reader.read("picture", content)[0] for content in contents] for reader in map(_reader, views)]
    monkeypatch.setattr(decode, "part_of", lambda *_: None)
    for view, pictures in zip(views, found, strict=True):
        for content, picture in zip(contents, pictures, strict=True):
            np.testing.assert_array_equal(picture, _reader(view).read("picture", content)[0])


def test_several_views_of_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [View(96, 64, x, 8, 20, 24) for x in (10, 40)]
    content = _picture(96, 64)
    found = _reader(*views).read("picture", content)
    monkeypatch.setattr(decode, "part_of", lambda *_: None)
    np.testing.assert_array_equal(found, _reader(*views).read("picture", content))


@pytest.mark.parametrize(
    "options",
    [
        {"restart_marker_blocks": 0},
        {"restart_marker_blocks": 4},  # not a divisor of a row's six units
        {"progressive": True},
        {"subsampling": "4:4:4"},
        {"exif": TURNED},
    ],
)
def test_other_pictures_are_decoded_whole(options: dict[str, Any]) -> None:
    content = _picture(96, 64, **options)
    assert layout_of(content) is None
    assert _reader(View(48, 32, 8, 8, 8, 8)).read("picture", content)[0].shape == (8, 8, 3)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_the_orientation_of_a_camera_is_undone(orientation: int, turns: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain, turned = _picture(96, 64), _picture(96, 64, exif=exif)
    upright = (96, 64) if turns % 2 == 0 else (64, 96)
    found = _reader(View(*upright, 0, 0, *upright)).read("picture", turned)[0]
    as_stored = _reader(View(96, 64, 0, 0, 96, 64)).read("picture", plain)[0]
    np.testing.assert_array_equal(found, np.rot90(as_stored, turns))


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00", b"GIF89a", b"\xff" * 99])
def test_what_is_no_picture_has_no_layout(content: bytes) -> None:
    assert layout_of(content) is None


def test_a_header_is_taken_at_no_word() -> None:
    content = _picture(96, 64)
    for end in range(0, _layout(content).scan_at, 7):
        assert layout_of(content[:end]) is None
    layout = _layout(content)
    at = content.index(b"\xff\xd0", layout.scan_at)
    assert part_of(content[:at] + content[at + 2 :], layout, (0, 0, 8, 8)) is None  # a marker is missing
    with pytest.raises(DecodeError, match="cut short"):
        _reader(View(96, 64, 0, 0, 8, 8)).read("picture", content[: len(content) // 2])
