"""The videos among files and folders, and names for what is written of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from summit_train.errors import UserError
from summit_train.inference.cam_files import find_videos, output_names


def _touch(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(path)


def test_folders_give_the_videos_below_them(tmp_path: Path) -> None:
    b, c = _touch(tmp_path / "set/b.mp4"), _touch(tmp_path / "set/a/c.AVI")
    _touch(tmp_path / "set/notes.txt")
    _touch(tmp_path / "set/.hidden.mp4")
    assert find_videos([str(tmp_path / "set"), "no such.file"]) == [c, b, "no such.file"]


def test_a_folder_of_pictures_is_a_video(tmp_path: Path) -> None:
    _touch(tmp_path / "clip/00001.jpg")
    assert find_videos([str(tmp_path / "clip")]) == [str(tmp_path / "clip")]


def test_a_folder_without_a_video_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no video in it") as error:
        find_videos([str(tmp_path)])
    assert str(error.value).startswith(f"{tmp_path}: ") and "\n" not in str(error.value)


def test_no_two_videos_have_one_name() -> None:
    paths = ["x/a.mp4", "y/a.mp4", "a_2.avi", "a.webm", "x/b.c.mp4", "clips/"]
    assert output_names(paths) == ["a", "a_2", "a_2_2", "a_3", "b.c", "clips"]


def test_long_and_odd_names_stay_file_names(tmp_path: Path) -> None:
    names = output_names([f"{'ä' * 300}.mp4", f"{'ä' * 300}b.mp4", os.fsdecode(b"\xff.mp4")])
    assert len(set(names)) == 3
    for name in names:
        (tmp_path / f".{name}.npz.123456.writing").touch()
