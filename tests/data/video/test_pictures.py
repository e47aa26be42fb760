"""Clips of pictures: which files of a folder are its frames or its flow, and the pixels of each picture."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from av.video.frame import VideoFrame
from numpy.typing import NDArray
from PIL import Image, ImageOps

from summit_train.data.video.clips import PictureClip, open_folder
from summit_train.data.video.pictures import decode_picture, holds_flow, list_pictures, probe_folder
from summit_train.data.video.source import LIMITS, Budget, DecodeError, Limits
from tests.data.clips import all_of

GREY_STEP = 20


def _picture(path: Path, grey: int, width: int = 48, height: int = 32) -> None:
    VideoFrame.from_ndarray(np.full((height, width, 3), grey, np.uint8), "rgb24").save(str(path))


@pytest.fixture(params=["{:05}.jpg", "img_{:05}.jpg", "{}.png", "{}.JPG"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Twelve frames; frame i is grey of the value 20 i. Beside them lies a file that is no frame."""
    (tmp_path / "clip").mkdir()
    for number in range(12):
        name = request.param.format(number + 1)
        _picture(tmp_path / "clip" / name.lower(), GREY_STEP * number)
        (tmp_path / "clip" / name.lower()).rename(tmp_path / "clip" / name)
    (tmp_path / "clip" / "Thumbs.db").touch()
    return tmp_path / "clip"


def _read(folder: Path, numbers: Sequence[int], num_frames: int | None) -> NDArray[np.uint8]:
    with open_folder(str(folder), num_frames) as opened:
        frames = np.array([numbers])
        pixels: NDArray[np.uint8] = opened.read(frames, [all_of(*opened.size(frames))])[0]
    return pixels


def _grey(frames: NDArray[np.uint8]) -> list[int]:
    return [round(float(frame.mean()) / GREY_STEP) for frame in frames]


def test_frames_are_read_by_their_numbers_in_any_order(folder: Path) -> None:
    for num_frames in (12, None):
        clip = _read(folder, [9, 1, 1, 11], num_frames)
        assert clip.shape == (4, 32, 48, 3) and _grey(clip) == [9, 1, 1, 11]


def test_probe_decodes_every_picture_and_digests_them_in_order(folder: Path) -> None:
    info = probe_folder(str(folder))
    assert (info.num_frames, info.width, info.height, info.fps) == (12, 48, 32, None)
    assert info.codec in ("mjpeg", "png")
    digests = [hashlib.sha256(Path(name).read_bytes()).digest() for name in list_pictures(str(folder))]
    assert info.sha256 == hashlib.sha256(b"".join(digests)).hexdigest()


# What is not a clip.


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    for number in range(1, 5):
        _picture(tmp_path / f"{number:05}.jpg", 100)
    return tmp_path


@pytest.mark.parametrize(
    ("gone", "more", "num_frames", "reason"),
    [
        ([], ["flow_x_00001.jpg"], None, r"one series of frames .* got \*\.jpg, flow_x_\*\.jpg"),
        ([4], [], 4, "holds 3 pictures, but the manifest says 4"),
        ([2, 4], [], None, r"the frame before 00003\.jpg is missing"),
        ([1, 2, 3, 4], ["notes.txt"], None, r"one series of frames such as 00001\.jpg, got no picture"),
    ],
)
def test_folders_that_are_not_a_clip_say_why(
    frames: Path, gone: list[int], more: list[str], num_frames: int | None, reason: str
) -> None:
    for number in gone:
        (frames / f"{number:05}.jpg").unlink()
    for name in more:
        (frames / name).touch()
    with pytest.raises(DecodeError, match=reason):
        _read(frames, [0], num_frames)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_picture_that_is_cut_short_is_named(frames: Path, keep: float) -> None:
    path = frames / "00003.jpg"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    for read in (probe_folder, lambda folder: _read(folder, [2], 4)):
        with pytest.raises(DecodeError, match=r"00003\.jpg"):
            read(str(frames))


def test_a_picture_of_another_size_is_named(frames: Path) -> None:
    _picture(frames / "00003.jpg", 100, width=64)
    with pytest.raises(DecodeError, match=r"00003\.jpg: differs .*: mjpeg 64 x 32, not mjpeg 48 x 32"):
        probe_folder(str(frames))


# Optical flow.


@pytest.fixture(params=["flow_{}_{:05}.jpg", "{}_{:05}.jpg", "000123-{}_{}.png", "{}{:04}.jpg", "img_{}-{}.JPG"])
def fields(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Eleven fields, x and y; number 10 is the tenth also where names have no zeros."""
    paths = [tmp_path / request.param.format(axis, number) for number in range(1, 12) for axis in "xy"]
    for path in paths:
        path.touch()
    (tmp_path / "notes.txt").touch()
    return paths


def test_flow_is_listed_field_by_field_alone_and_beside_frames(fields: list[Path], tmp_path: Path) -> None:
    folder, paths = str(tmp_path), [str(path) for path in fields]
    assert list_pictures(folder, is_flow=True) == paths and holds_flow(folder)
    with pytest.raises(DecodeError, match=r"must hold one series of frames .*, got \S+, \S+$"):
        list_pictures(folder)
    frames = [tmp_path / f"frame{number}.jpg" for number in range(12)]
    for path in frames:
        path.touch()
    assert list_pictures(folder) == [str(path) for path in frames]
    assert list_pictures(folder, is_flow=True) == paths and not holds_flow(folder)


def test_flow_that_is_not_whole_is_named(fields: list[Path], tmp_path: Path) -> None:
    def remove(*paths: Path, reason: str) -> None:
        for path in paths:
            path.unlink()
        with pytest.raises(DecodeError, match=reason):
            list_pictures(str(tmp_path), is_flow=True)

    lone = r"holds 11 pictures \S+ and 10 pictures \S+: number 11 is only in one of them"
    remove(fields[-1], reason=lone)  # y of the last field
    remove(fields[-2], *fields[4:6], reason=r"the frame before \S+4\.\w+ is missing")
    remove(*tmp_path.glob("*[yY]*"), reason=r"one series of flow such as .*, got \S*x\S+")


def test_flow_of_two_kinds_is_not_guessed_between(frames: Path) -> None:
    for name in ("x_1.jpg", "y_1.jpg", "flow_x_1.jpg", "flow_y_1.jpg"):
        (frames / name).touch()
    with pytest.raises(DecodeError, match=r"got \*\.jpg, flow_x_\*\.jpg, flow_y_\*\.jpg, x_\*\.jpg, y_\*\.jpg"):
        list_pictures(str(frames), is_flow=True)


def test_a_folder_of_flow_counts_its_fields(tmp_path: Path) -> None:
    for number in range(1, 4):
        for axis in "xy":
            _picture(tmp_path / f"flow_{axis}_{number}.jpg", 128)
    assert probe_folder(str(tmp_path)).num_frames == 3


# One picture.


def _encoded(kind: str = "JPEG", seed: int = 0, **options: Any) -> bytes:
    """Colourful noise of 4 x 4 pixels, 96 x 64."""
    coarse = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse.repeat(4, 0).repeat(4, 1)).save(stream, kind, **options)
    return stream.getvalue()


def _pixels(*contents: bytes, limits: Limits = LIMITS) -> NDArray[np.uint8]:
    """The pictures of a clip, whole."""
    fetch = lambda numbers: ((f"picture {number}", contents[number]) for number in numbers)  # noqa: E731
    frames = np.arange(len(contents))[None]
    with PictureClip("clip", fetch, len(contents), limits) as opened:
        pixels: NDArray[np.uint8] = opened.read(frames, [all_of(*opened.size(frames))])[0]
    return pixels


def test_a_picture_does_not_depend_on_those_before_it() -> None:
    """Tables of one picture must not serve another: here of several qualities, and one without its own tables."""
    kinds = [{"quality": 90}, {"quality": 30, "optimize": True}, {"progressive": True}, {"kind": "PNG"}]
    contents = [_encoded(**options, seed=seed) for options in kinds for seed in (0, 1)]
    contents += contents[-1:]
    alone = [_pixels(content)[0] for content in contents]
    np.testing.assert_array_equal(_pixels(*contents), alone)
    at = contents[0].index(b"\xff\xc4")
    bare = contents[0][:at] + contents[0][contents[0].index(b"\xff\xda") :]  # uses the standard's Huffman tables
    np.testing.assert_array_equal(_pixels(contents[2], bare)[1], alone[0])


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_orientation_of_a_camera_is_undone(orientation: int, kind: str) -> None:
    exif, as_stored = Image.Exif(), Image.fromarray(_pixels(_encoded(kind))[0])
    exif[0x0112] = orientation
    as_stored.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(as_stored))
    np.testing.assert_array_equal(_pixels(_encoded(kind, exif=exif))[0], upright)
    exif[0x0112] = {1: 4, 3: 2, 6: 5, 8: 7}[orientation]
    with pytest.raises(DecodeError, match="has a mirrored EXIF orientation; run mogrify"):
        _pixels(_encoded(kind, exif=exif))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(seconds=0), "takes longer than 0 s to read"), (Limits(pixels=96 * 64 - 1), "picture 0")],
)
def test_pictures_are_held_to_the_clock_and_to_the_size(limits: Limits, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        _pixels(_encoded(), limits=limits)


def test_the_damaged_one_of_several_pictures_is_named() -> None:
    contents = [_encoded(seed=seed) for seed in range(3)]
    at = contents[2].index(b"\xff\xda") + 14
    contents[2] = contents[2][:at] + b"\xff\xc4" + contents[2][at + 2 :]
    with pytest.raises(DecodeError, match="picture 2"):
        _pixels(*contents)
    for content in (b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00", b"GIF89a", b"\xff" * 99):
        with pytest.raises(DecodeError, match="thing: is "):
            decode_picture("thing", content, Budget("thing", LIMITS))
