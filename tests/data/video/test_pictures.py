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
from summit_train.data.video.pictures import Layout, PictureReader, layout_of, orientation_of, restart_units, stack_of
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
    for _ in range(20):
        left, top = int(random.integers(width)), int(random.integers(height))
        right, bottom = int(random.integers(left, width)) + 1, int(random.integers(top, height)) + 1
        part = stack_of([content], layout, (left, top, right, bottom))
        assert part is not None
        pixels = _pixels(part.content)
        assert part.left <= left and part.top <= top
        assert part.left + pixels.shape[1] >= right and part.top + pixels.shape[0] >= bottom
        np.testing.assert_array_equal(pixels, whole[part.top :, part.left :][: pixels.shape[0], : pixels.shape[1]])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_view_is_the_same_of_a_part(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, stacks = np.random.default_rng(2), list[int]()
    contents = [_picture(width, height, seed) for seed in range(2)]
    contents += [_picture(width, height, 2, progressive=True), _picture(width, height, 3, quality=50)]  # not alike
    views = [[_random_view(width, height, random)] for _ in range(20)]
    views.append(views[0] + views[1])  # several views of one picture

    def noted(alike: Sequence[bytes], *more: Any) -> object:
        stacks.append(len(alike))
        return stack_of(alike, *more)

    monkeypatch.setattr(pictures, "stack_of", noted)
    found = [_read(_reader(*some), *contents) for some in views]
    assert stacks == [2, 1] * len(views)
    monkeypatch.setattr(pictures, "stack_of", lambda *_: None)
    np.testing.assert_equal(found, [_read(_reader(*some), *contents) for some in views])


def test_a_stack_is_no_larger_than_a_picture_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    contents, stacks = [_picture(96, 64, seed) for seed in range(7)], list[int]()
    monkeypatch.setattr(pictures, "stack_of", lambda alike, *_: stacks.append(len(alike)))
    limits = Limits(pixels=3 * (96 + 128) * (64 + 128))
    reader = PictureReader(Renderer(lambda width, height: [View(96, 64, 0, 0, 96, 64)]), Budget("pictures", limits))
    assert len(_read(reader, *contents)) == 7 and stacks == [3, 3, 3, 3, 3, 2, 1]  # one picture at a time is read whole


def test_parts_are_held_to_the_clock_and_to_the_size() -> None:
    for limits, message in ((Limits(seconds=0), "is not read within 0 s"), (Limits(pixels=96 * 64 - 1), "96 x 64")):
        render = Renderer(lambda width, height: [View(96, 64, 8, 8, 16, 16)])
        with pytest.raises(DecodeError, match=message):
            _read(PictureReader(render, Budget("x", limits)), _picture(96, 64), _picture(96, 64, 1))


def test_of_a_stack_the_damaged_picture_is_named() -> None:
    contents = [_picture(96, 64, seed) for seed in range(3)]
    at = _layout(contents[2]).scan_at
    contents[2] = contents[2][:at] + b"\xff\xc4" + contents[2][at + 2 :]
    with pytest.raises(DecodeError, match="picture 2"):
        _read(_reader(View(96, 64, 0, 0, 96, 64)), *contents)


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


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_undone(orientation: int, kind: str) -> None:
    if kind == "PNG" and orientation not in (1, 3, 6, 8):
        pytest.skip("PyAV does not tell the mirroring of a PNG")
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    upright = (96, 64) if orientation < 5 else (64, 96)
    as_stored = Image.fromarray(_read(_reader(View(96, 64, 0, 0, 96, 64)), _picture(96, 64))[0][0])
    as_stored.save(stream, "PNG", exif=exif)
    turned = _picture(96, 64, exif=exif) if kind == "JPEG" else stream.getvalue()
    assert kind == "PNG" or orientation_of(turned) == orientation
    found = _read(_reader(View(*upright, 0, 0, *upright)), turned)[0][0]
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


def test_a_header_is_not_trusted() -> None:
    for content in (b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00", b"GIF89a", b"\xff" * 99):
        assert layout_of(content) is None
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
