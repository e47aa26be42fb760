from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.data.video.augment import View
from summit_train.data.video.clips import holds_flow, list_flow_pictures, list_pictures, probe_folder, read_folder_views
from summit_train.data.video.source import DecodeError

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


def _all_of(width: int, height: int) -> list[View]:
    return [View(width, height, 0, 0, width, height)]


def _these(*numbers: int) -> Callable[[int], NDArray[np.int64]]:
    return lambda num_frames: np.array([numbers])


def _grey(frames: NDArray[np.uint8]) -> list[int]:
    return [round(float(frame.mean()) / GREY_STEP) for frame in frames]


def test_frames_are_read_by_their_numbers_in_any_order_in_several_views(folder: Path) -> None:
    def two(width: int, height: int) -> list[View]:
        return [View(24, 16, 0, 2, 10, 12), View(24, 16, 14, 2, 10, 12, flip=True)]

    views = read_folder_views(str(folder), _these(9, 1, 1, 11), _all_of, 12)
    assert views.shape == (1, 4, 32, 48, 3) and _grey(views[0]) == [9, 1, 1, 11]
    views = read_folder_views(str(folder), lambda n: np.array([[0, n - 1], [5, 6]]), two, None)
    assert views.shape == (4, 2, 12, 10, 3)
    assert [_grey(view) for view in views] == [[0, 11], [0, 11], [5, 6], [5, 6]]


def test_probe_decodes_every_picture_and_digests_them_in_order(folder: Path) -> None:
    info, digest = probe_folder(str(folder))
    assert (info.num_frames, info.width, info.height, info.fps) == (12, 48, 32, None)
    assert info.codec in ("mjpeg", "png")
    digests = [hashlib.sha256(Path(name).read_bytes()).digest() for name in list_pictures(str(folder))]
    assert digest == hashlib.sha256(b"".join(digests)).hexdigest()


# What is not a clip.


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    for number in range(1, 5):
        _picture(tmp_path / f"{number:05}.jpg", 100)
    return tmp_path


def test_folders_that_are_not_a_clip_say_why(frames: Path) -> None:
    _picture(frames / "flow_x_00001.jpg", 0)
    with pytest.raises(DecodeError, match=r"several series of pictures: \*\.jpg, flow_x_\*\.jpg"):
        list_pictures(str(frames))
    (frames / "flow_x_00001.jpg").unlink()
    (frames / "00004.jpg").unlink()
    with pytest.raises(DecodeError, match="holds 3 pictures, but the manifest says 4"):
        read_folder_views(str(frames), _these(0), _all_of, 4)
    (frames / "00002.jpg").unlink()
    with pytest.raises(DecodeError, match=r"the frame before 00003\.jpg is missing"):
        list_pictures(str(frames))
    (frames / "none").mkdir()
    (frames / "none/notes.txt").touch()
    with pytest.raises(DecodeError, match="is a directory without frames"):
        probe_folder(str(frames / "none"))


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_picture_that_is_cut_short_is_named(frames: Path, keep: float) -> None:
    path = frames / "00003.jpg"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    for read in (probe_folder, lambda folder: read_folder_views(folder, _these(2), _all_of, 4)):
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


def test_flow_is_listed_field_by_field(fields: list[Path], tmp_path: Path) -> None:
    assert list_flow_pictures(str(tmp_path)) == [str(path) for path in fields]
    assert holds_flow(str(tmp_path))
    with pytest.raises(DecodeError, match="holds optical flow and no frames"):
        list_pictures(str(tmp_path))


def test_flow_beside_frames(fields: list[Path], tmp_path: Path) -> None:
    frames = [tmp_path / f"frame{number}.jpg" for number in range(12)]
    for path in frames:
        path.touch()
    assert list_pictures(str(tmp_path)) == [str(path) for path in frames]
    assert list_flow_pictures(str(tmp_path)) == [str(path) for path in fields]
    assert not holds_flow(str(tmp_path))


def test_flow_that_is_not_whole_is_named(fields: list[Path], tmp_path: Path) -> None:
    fields[-1].unlink()  # y of the last field
    with pytest.raises(
        DecodeError, match=r"holds 11 pictures \S+ and 10 pictures \S+: number 11 is only in one of them"
    ):
        list_flow_pictures(str(tmp_path))
    fields[-2].unlink()
    for gone in fields[4:6]:
        gone.unlink()
    with pytest.raises(DecodeError, match=r"the frame before \S+4\.\w+ is missing"):
        list_flow_pictures(str(tmp_path))
    for gone in tmp_path.glob("*[yY]*"):
        gone.unlink()
    with pytest.raises(
        DecodeError, match=r"holds no flow_x_00001\.jpg with flow_y_00001\.jpg, or the like, only \S*x\S+"
    ):
        list_flow_pictures(str(tmp_path))


def test_flow_of_two_kinds_is_not_guessed_between(frames: Path) -> None:
    for name in ("x_1.jpg", "y_1.jpg", "flow_x_1.jpg", "flow_y_1.jpg"):
        (frames / name).touch()
    with pytest.raises(DecodeError, match=r"several series of flow: flow_x_\*\.jpg, x_\*\.jpg"):
        list_flow_pictures(str(frames))


def test_a_folder_of_flow_counts_its_fields(tmp_path: Path) -> None:
    for number in range(1, 4):
        for axis in "xy":
            _picture(tmp_path / f"flow_{axis}_{number}.jpg", 128)
    assert probe_folder(str(tmp_path))[0].num_frames == 3
