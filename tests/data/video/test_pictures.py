from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from summit_train.data.video import pictures
from summit_train.data.video.augment import View
from summit_train.data.video.pictures import (
    Layout,
    PictureReader,
    Stack,
    layout_of,
    orientation_of,
    restart_units,
    stack_of,
)
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import LIMITS, Budget, DecodeError, Limits

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


def _read(reader: PictureReader, *contents: bytes) -> list[list[NDArray[np.uint8]]]:
    return list(reader.read([(f"picture {number}", content) for number, content in enumerate(contents)]))


def _random_view(width: int, height: int, random: np.random.Generator) -> View:
    across, down = (int(random.integers(max(2, side // 4), 2 * side)) for side in (width, height))
    crop_width, crop_height = (int(random.integers(1, side + 1)) for side in (across, down))
    x, y = int(random.integers(across - crop_width + 1)), int(random.integers(down - crop_height + 1))
    return View(across, down, x, y, crop_width, crop_height, bool(random.integers(2)))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_part_has_the_pixels_of_the_whole(width: int, height: int) -> None:
    content, random = _picture(width, height), np.random.default_rng(1)
    layout = _layout(content)
    assert (layout.width, layout.height) == (width, height)
    whole = _pixels(content)
    for _ in range(50):
        left, top = int(random.integers(width)), int(random.integers(height))
        right, bottom = int(random.integers(left, width)) + 1, int(random.integers(top, height)) + 1
        part = stack_of([content], layout, (left, top, right, bottom))
        assert part is not None
        pixels = _pixels(part.content)
        assert part.left <= left and part.top <= top
        assert part.left + pixels.shape[1] >= right and part.top + pixels.shape[0] >= bottom
        taken = whole[part.top :, part.left :][: pixels.shape[0], : pixels.shape[1]]
        np.testing.assert_array_equal(pixels, taken)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_view_is_the_same_of_a_part(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    views = [_random_view(width, height, random) for _ in range(60)]
    contents = [_picture(width, height, seed) for seed in range(5)]
    together = [_read(_reader(view), *contents) for view in views]
    one_by_one = [_read(reader, content)[0] for reader in map(_reader, views) for content in contents]
    monkeypatch.setattr(pictures, "stack_of", lambda *_: None)
    whole = [_read(_reader(view), *contents) for view in views]
    np.testing.assert_equal(together, whole)
    np.testing.assert_equal(one_by_one, [picture for pictures in whole for picture in pictures])


def test_several_views_of_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [View(96, 64, x, 8, 20, 24) for x in (10, 40)]
    content = _picture(96, 64)
    found = _read(_reader(*views), content)
    monkeypatch.setattr(pictures, "stack_of", lambda *_: None)
    np.testing.assert_array_equal(found, _read(_reader(*views), content))


def _note_stacks(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Let `sizes` have how many pictures each stack takes."""

    def note(contents: Sequence[bytes], layout: Layout, box: tuple[int, int, int, int]) -> Stack | None:
        sizes.append(len(contents))
        return stack_of(contents, layout, box)

    monkeypatch.setattr(pictures, "stack_of", note)


def test_pictures_that_begin_differently_are_decoded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(96, 64, 90), (96, 64, 90), (96, 64, 50), (64, 96, 90), (96, 64, 90), (96, 64, 90)]
    contents = [_picture(width, height, quality, quality=quality) for width, height, quality in sizes]
    contents.insert(3, _picture(96, 64, progressive=True))
    view, tall = View(96, 64, 20, 8, 40, 30), [0, 1, 2, 3, 5, 6]
    stacks: list[int] = []
    _note_stacks(monkeypatch, stacks)
    found = _read(_reader(view), *(contents[i] for i in tall))
    assert stacks == [2, 1, 2]
    monkeypatch.setattr(pictures, "stack_of", lambda *_: None)
    np.testing.assert_equal(found, [_read(_reader(view), contents[i])[0] for i in tall])


def test_a_stack_is_no_larger_than_a_picture_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    contents, stacks = [_picture(96, 64, seed) for seed in range(7)], list[int]()
    _note_stacks(monkeypatch, stacks)
    views = [View(96, 64, 0, 0, 96, 64)]
    limits = Limits(pixels=3 * (96 + 128) * (64 + 128))
    reader = PictureReader(Renderer(lambda width, height: views), Budget("pictures", limits))
    assert len(_read(reader, *contents)) == 7 and stacks == [3, 3, 1]


def test_pictures_that_are_decoded_together_are_held_to_the_clock() -> None:
    reader = PictureReader(Renderer(lambda width, height: [View(96, 64, 8, 8, 16, 16)]), Budget("x", Limits(seconds=0)))
    with pytest.raises(DecodeError, match="is not read within 0 s"):
        _read(reader, _picture(96, 64), _picture(96, 64, 1))


def test_of_a_stack_the_damaged_picture_is_named() -> None:
    contents = [_picture(96, 64, seed) for seed in range(4)]
    at = _layout(contents[2]).scan_at
    contents[2] = contents[2][:at] + b"\xff\xc4" + contents[2][at + 2 :]
    reader = _reader(View(96, 64, 0, 0, 96, 64))
    with pytest.raises(DecodeError, match="picture 2"):
        _read(reader, *contents)


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
    assert _read(_reader(View(48, 32, 8, 8, 8, 8)), content)[0][0].shape == (8, 8, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_undone(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = (96, 64) if orientation < 5 else (64, 96)
    turned = _picture(96, 64, exif=exif)
    assert orientation_of(turned) == orientation
    found = _read(_reader(View(*upright, 0, 0, *upright)), turned)[0][0]
    as_stored = Image.fromarray(_read(_reader(View(96, 64, 0, 0, 96, 64)), _picture(96, 64))[0][0])
    as_stored.getexif()[0x0112] = orientation
    np.testing.assert_array_equal(found, np.asarray(ImageOps.exif_transpose(as_stored)))


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_orientation_is_read_in_either_order_of_bytes_and_from_no_damaged_one(order: str) -> None:
    mark = b"II" if order == "<" else b"MM"
    entries = struct.pack(order + "HHIHH", 0x0100, 3, 1, 96, 0) + struct.pack(order + "HHIHH", 0x0112, 3, 1, 7, 0)
    tiff = mark + struct.pack(order + "HI", 42, 8) + struct.pack(order + "H", 2) + entries
    segment = b"Exif\0\0" + tiff
    content = b"\xff\xd8\xff\xe1" + (2 + len(segment)).to_bytes(2, "big") + segment + _picture(96, 64)[2:]
    assert orientation_of(content) == 7
    assert all(orientation_of(content[:end]) == 1 for end in range(len(segment)))
    assert orientation_of(content.replace(struct.pack(order + "H", 7), struct.pack(order + "H", 9))) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00", b"GIF89a", b"\xff" * 99])
def test_what_is_no_picture_has_no_layout(content: bytes) -> None:
    assert layout_of(content) is None


def test_a_header_is_taken_at_no_word() -> None:
    content = _picture(96, 64)
    for end in range(_layout(content).scan_at):
        assert layout_of(content[:end]) is None
    layout = _layout(content)
    at = content.index(b"\xff\xd0", layout.scan_at)
    without = content[:at] + content[at + 2 :]  # a marker is missing
    assert stack_of([without], layout, (0, 0, 8, 8)) is None
    assert stack_of([content, without, content], layout, (0, 0, 8, 8)) is None
    with pytest.raises(DecodeError, match="cut short"):
        _read(_reader(View(96, 64, 0, 0, 8, 8)), content[: len(content) // 2])
