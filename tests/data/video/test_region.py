"""Regions of frames: their pixels are those of a picture that was cut beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from summit_train.core.errors import UserError
from summit_train.data.loading import read_clip
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.augment import test_views as evaluation_views
from summit_train.data.video.encode import write_video
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.source import DecodeError
from tests.data.clips import all_of, stored_clip, write_as

HEADER = "path,label,left,top,width,height\n"
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3), np.uint8)


def _all(frames: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(frames)


def _listed(folder: Path, *rows: str, region: str | None = "columns") -> Manifest:
    (folder / "list.csv").write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return read_manifest(folder / "list.csv", region)


def _write_pictures(folder: Path, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    folder.mkdir()
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{number:03}.png")


@pytest.mark.parametrize("crops", [1, 3, "full"])
def test_a_region_has_the_pixels_of_a_picture_that_was_cut(tmp_path: Path, crops: int | str) -> None:
    _write_pictures(tmp_path / "whole", PIXELS)
    _write_pictures(tmp_path / "cut", PIXELS[:, 7:34, 5:46])
    store = FileStore(_listed(tmp_path, "whole,0,5,7,41,27", "cut,0,,,,"), str(tmp_path))
    for side in (27, 40, 16):  # as it is, scaled up, scaled down
        views_of = lambda width, height, side=side: evaluation_views(side, crops, width, height)  # noqa: E731
        clips = [read_clip(store, number, lambda n: _all(n)[None], views_of).pixels for number in (0, 1)]
        assert np.array_equal(*clips)
        mirrored = lambda width, height, of=views_of: [replace(one, flip=True) for one in of(width, height)]  # noqa: E731
        assert np.array_equal(read_clip(store, 0, lambda n: _all(n)[None], mirrored).pixels, clips[0][:, :, :, ::-1])


def test_a_region_is_of_the_upright_frame(tmp_path: Path) -> None:
    write_as(tmp_path / "a.mp4", PIXELS, rotation=90)
    store = FileStore(_listed(tmp_path, "a.mp4,0,,,,", "a.mp4,0,11,3,20,30"), str(tmp_path))
    whole, part = (stored_clip(store, number, _all, all_of) for number in (0, 1))
    assert np.array_equal(part, whole[:, 3:33, 11:31])


def test_without_the_key_the_columns_are_not_read(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", PIXELS)
    plain, cut = (_listed(tmp_path, "a.mp4,0,11,3,20,-1", region=None), _listed(tmp_path, "a.mp4,0,11,3,20,30"))
    assert plain.clip(0).region == WHOLE_FRAME and cut.clip(0).region == Region(11, 3, 20, 30)
    assert stored_clip(FileStore(plain, str(tmp_path)), 0, _all, all_of).shape == (3, 48, 64, 3)
    others = [_listed(tmp_path, row) for row in ("a.mp4,0,11,3,20,31", "a.mp4,0,,,,")]
    prints = {one.fingerprint() for one in (plain, cut, *others)}
    assert len(prints) == 4


def test_a_region_outside_its_frame_is_named_with_its_line(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", PIXELS)
    store = FileStore(_listed(tmp_path, "a.mp4,0,0,0,64,48", "a.mp4,0,34,0,31,48"), str(tmp_path))
    assert stored_clip(store, 0, _all, all_of).shape == (3, 48, 64, 3)
    with pytest.raises(DecodeError, match=r"a.mp4: its region, 31 x 48 pixels at 34, 0, exceeds .*64 x 48 \(.*:3\)$"):
        stored_clip(store, 1, _all, all_of)
    assert Region(0, 0, 64, 1).problem(64, 48) is None
    assert "too narrow" in (Region(0, 0, 65, 1).problem(99, 48) or "")
    assert "exceeds" in (Region(0, 1, 64, 48).problem(64, 48) or "")


@pytest.mark.parametrize("cells", ["1,2,0,4", "1,2,3,0", "-1,2,3,4", "1,2,3,", "1.5,2,3,4", "2147483647,0,1,1"])
def test_a_cell_that_is_no_pixel_is_refused_with_its_line(tmp_path: Path, cells: str) -> None:
    with pytest.raises(UserError, match=r"list.csv:3: left,top,width,height must be whole pixels of the frame, .* got"):
        _listed(tmp_path, "a.mp4,0,1,2,3,4", f"a.mp4,0,{cells}")


def test_a_list_without_the_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label,left,top\na.mp4,0,1,2\n")
    with pytest.raises(UserError, match=r"must have left,top,width,height with data\.region columns; lacks width, h"):
        read_manifest(tmp_path / "list.csv", "columns")
