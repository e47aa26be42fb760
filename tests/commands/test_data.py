from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.data.decode import write_video
from summit_train.data.manifest import read_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders, a good video in each and a bad one in the first."""
    for name in ("jump/a.mp4", "walk/b.mp4"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        write_video(tmp_path / "set" / name, np.zeros((3, 16, 16, 3), np.uint8))
    (tmp_path / "set" / "jump" / "torn.mp4").write_text("x")
    return tmp_path / "set"


def test_motion_writes_a_set_and_says_how_to_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m"
    arguments = ["--train", "4", "--val", "2", "--size", "16", "--frames", "4"]
    arguments += ["--classes", "2", "--kind", "order", "--seed", "5"]
    assert main(["data", "motion", str(out), *arguments]) == 0
    assert len(read_manifest(out / "train.csv")) == 4 and len(read_manifest(out / "val.csv")) == 2
    assert len(list((out / "videos").glob("*.mp4"))) == 6
    printed = capsys.readouterr().out
    assert "6 videos of 2 classes: red-blue, blue-red" in printed and f"data.root={out}" in printed


def test_motion_refuses_what_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "motion", str(tmp_path / "m"), "--train", "4", "--val", "4", "--classes", "9"]) == 2
    assert "choose 2 to 8 directions" in capsys.readouterr().err


def test_index_writes_the_good_and_names_the_bad(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "list.csv"
    assert main(["data", "index", str(folder), "--out", str(out), "--workers", "0"]) == 0
    manifest = read_manifest(out)
    assert [manifest.path(index) for index in range(len(manifest))] == ["jump/a.mp4", "walk/b.mp4"]
    assert manifest.classes == ("jump", "walk")
    printed = capsys.readouterr().out
    assert "left out, 1 that cannot be used:\n  jump/torn.mp4: is no video" in printed
    assert "2 videos, 6 frames, 2 classes" in printed


def test_index_of_nothing_usable_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.mp4").write_text("x")
    out = tmp_path / "list.csv"
    assert main(["data", "index", str(tmp_path / "set"), "--out", str(out), "--workers", "0"]) == 2
    captured = capsys.readouterr()
    assert "a.mp4: is no video" in captured.out and "not one video in it can be used" in captured.err
    assert not out.exists()


def test_index_does_not_renumber_the_classes_of_a_neighbour(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "classes.txt").write_text("walk\njump\n")
    assert main(["data", "index", str(folder), "--out", str(folder.parent / "list.csv")]) == 2
    assert "has other classes" in capsys.readouterr().err
    assert (folder.parent / "classes.txt").read_text() == "walk\njump\n"


@pytest.mark.parametrize(("source", "out"), [("missing", "list.csv"), ("set", "missing/list.csv")])
def test_index_of_a_folder_that_is_not_there(
    folder: Path, source: str, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "index", str(folder.parent / source), "--out", str(folder.parent / out)]) == 2
    assert "missing" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["data", "motion", str(tmp_path / "file" / "m"), "--train", "4", "--val", "4"]) == 2
    assert f"{tmp_path}/file/m" in capsys.readouterr().err
