"""`summit-train cam` on a trained run and real videos: the files that it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from summit_train.data.manifest.clip import Clip
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import Span
from summit_train.inference.cam.command import maps_csv, output_names
from tests.data.video.test_stream import noise
from tests.runs import changed_copy
from tests.worlds import main_said

GIVEN = ("--threshold", "0.1")
VIDEO = "videos/val_000000.mp4"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _cam(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> tuple[str, str]:
    found, out, err = main_said(capsys, "cam", *words)
    assert found == status, err
    return out, err


def test_strips_maps_and_a_table(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = shutil.copytree(trained_run, tmp_path / "run"), tmp_path / "out"
    val = tmp_path / "val.csv"
    val.write_text("path,label\nvideos/val_000000.mp4,0\nvideos/val_000001.mp4,1\nvideos/val_000002.mp4,2\n")
    videos = [motion_set / f"videos/val_00000{number}.mp4" for number in range(2)]
    words = [run, *videos, "--out", out, "--json", f"data.val={val}", f"data.root={motion_set}"]
    printed: dict[str, Any] = json.loads(_cam(capsys, *words)[0])
    assert [video["path"] for video in printed["videos"]] == [str(video) for video in videos] and printed["bad"] == []
    (network,) = printed["networks"]
    assert network["file"] == str(run / "cam.json") and not network["was_saved"] and network["videos"] == 3
    assert network["threshold"] == json.loads((run / "cam.json").read_text())["threshold"]
    assert network["views"]["crop"] == "centre square"

    table = list(csv.DictReader((out / "cam.csv").open()))
    names = ["path", "network", "label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold"]
    assert list(table[0]) == [*names, "strip", "maps"] and len(table) == 2
    for row, video, name in zip(table, printed["videos"], ("val_000000", "val_000001"), strict=True):
        assert row["path"] == video["path"] and row["network"] == "tsm resnet18 (run)"
        maps = np.load(out / f"{name}.npz", allow_pickle=False)
        names = {"map", "frames", "slices", "path", "label", "class", "score", "logit", "threshold"}
        assert set(maps) == names and maps["map"].dtype == np.float32
        assert row["maps"] == str(out / f"{name}.npz") and row["strip"] == str(out / f"{name}.png")
        assert float(row["mean"]) == pytest.approx(float(maps["map"].mean())) and row["class"] == str(maps["class"])
        peak = np.unravel_index(maps["map"].argmax(), maps["map"].shape)[0]
        assert int(row["peak_frame"]) == maps["frames"][peak] and float(row["score"]) == float(maps["score"])
        assert float(maps["threshold"]) == float(row["threshold"]) == network["threshold"]
        assert matplotlib.image.imread(row["strip"]).shape == (220, 544, 4)  # four frames of 128 pixels

    text, _ = _cam(capsys, *[word for word in words if word != "--json"])
    assert f"keeps {100 * network['kept']:.1f} % of the pixels of 3 validation videos, from {run / 'cam.json'}" in text
    assert "sees 4 frames (dense, every 1), the centre square at 32" in text and str(out / "val_000001.png") in text


def test_two_networks_a_named_class_and_all_frames(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [trained_run, motion_set / VIDEO, "--out", tmp_path, "--beside", trained_run, "--class", "left"]
    words += [*GIVEN, "--threshold", "-100", "--frames", "3", "--json", "evaluate.short_side=64"]
    printed = json.loads(_cam(capsys, *words)[0])
    first, second = printed["videos"][0]["networks"]
    assert (first["class"], first["threshold"]) == ("left", 0.1) and second["foreground"] == 1.0
    assert [network["threshold"] for network in printed["networks"]] == [0.1, -100.0]
    assert len(list(csv.DictReader((tmp_path / "cam.csv").open()))) == 2
    maps = np.load(tmp_path / "val_000000.npz", allow_pickle=False)
    assert set(maps) == {prefix + name for name in maps if not name.startswith("b") for prefix in ("", "beside_")}
    assert (maps["map"] == maps["beside_map"]).all() and float(maps["beside_threshold"]) == -100
    strip = matplotlib.image.imread(tmp_path / "val_000000.png")
    assert strip.shape[:2] == (394, 500)  # two rows; three frames are narrower than a title
    dark, bright = strip[62:190, 10:138, :3], strip[236:364, 10:138, :3]
    assert bright.mean() > dark.mean()  # at -100 all is foreground
    assert not (trained_run / "cam.json").exists()


def test_files_of_one_stem_get_names_of_their_own(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff.mp4")  # a name that is no UTF-8
    shutil.copy(motion_set / VIDEO, odd)
    for number, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        shutil.copy(motion_set / f"videos/val_00000{number}.mp4", tmp_path / folder / "clip.mp4")
    out = tmp_path / "out"
    text, _ = _cam(capsys, trained_run, tmp_path / "a", tmp_path / "b/clip.mp4", odd, "--out", out, *GIVEN)
    paths = {name: str(np.load(out / f"{name}.npz")["path"]) for name in ("clip", "clip_2")}
    assert paths == {"clip": str(tmp_path / "a/clip.mp4"), "clip_2": str(tmp_path / "b/clip.mp4")}
    assert f"{tmp_path}/\\udcff.mp4" in text and str(odd).encode("utf-8", "surrogateescape") in (
        (out / "cam.csv").read_bytes()
    )


def test_a_bad_file_is_named_and_the_rest_goes_on(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    write_video(tmp_path / "two.mp4", noise(2))
    words = [trained_run, tmp_path / "text.mp4", tmp_path / "two.mp4", "--out", tmp_path / "out"]
    out, err = _cam(capsys, *words, *GIVEN, "--json", status=1)
    printed = json.loads(out)
    reason = "is not a video of a kind that is read here, or its header is damaged"
    assert printed["bad"] == [{"path": str(tmp_path / "text.mp4"), "reason": reason}]
    assert [video["path"] for video in printed["videos"]] == [str(tmp_path / "two.mp4")]
    assert np.load(tmp_path / "out/two.npz")["frames"].tolist() == [0, 1, 0, 1]
    assert err == f"{tmp_path}/text.mp4: {reason}\nsummit-train: 1 of 2 videos could not be read\n"
    _, err = _cam(capsys, *words[:2], *words[-2:], *GIVEN, status=1)
    assert len(list(csv.reader((tmp_path / "out/cam.csv").open()))) == 1 and "text.mp4" in err


def test_a_manifest_with_spans_and_directions(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spans.csv").write_text(
        f"path,label,start_frame,end_frame,reversed\n{VIDEO},7,0,4,0\n{VIDEO},7,4,8,1\ngone.mp4,7,,,0\n"
    )
    words = [trained_run, tmp_path / "spans.csv", motion_set / VIDEO, "--out", tmp_path / "out", *GIVEN]
    text, err = _cam(capsys, *words, f"data.root={motion_set}", status=1)
    # Labels are of no use here, so nothing is said of a class that the network has not.
    assert err == "gone.mp4: No such file or directory\nsummit-train: 1 of 4 videos could not be read\n"
    assert f"{VIDEO} 0:4 " in text and f"{VIDEO} 4:8 backwards " in text
    rows = list(csv.DictReader((tmp_path / "out/cam.csv").open()))
    assert [row["path"] for row in rows] == [VIDEO, VIDEO, str(motion_set / VIDEO)]
    spans = [(row["start_frame"], row["end_frame"], row["reversed"]) for row in rows]
    assert spans == [("", "4", "0"), ("4", "8", "1"), ("", "", "0")]
    frames = [np.load(row["maps"])["frames"].tolist() for row in rows]
    assert frames == [[0, 1, 2, 3], [7, 6, 5, 4], [2, 3, 4, 5]]
    names = [Path(row["maps"]).name for row in rows]
    assert names == ["val_000000.npz", "val_000000_2.npz", "val_000000_3.npz"]


def test_names_of_the_classes(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = changed_copy(trained_run, tmp_path / "alone.pt", classes=None)
    words = [alone, motion_set / VIDEO, "--out", tmp_path / "out", *GIVEN, "--json", "--class"]
    _, err = _cam(capsys, *words, "2")
    assert err == f"{alone}: has no names of its classes: they are shown as numbers; --classes FILE gives them names\n"
    out, err = _cam(capsys, *words, "left", "--classes", motion_set / "classes.txt")
    assert err == "" and json.loads(out)["videos"][0]["networks"][0]["class"] == "left"


def test_what_is_wrong_is_said_before_the_work(
    trained_run: Path, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    alone = changed_copy(trained_run, tmp_path / "alone.pt")
    video, out = motion_set / VIDEO, ["--out", tmp_path / "out"]
    for words, reason in (
        ([trained_run, video, "--out", tmp_path / "file/out", *GIVEN], "--out .*/out: cannot be written: Not a dir"),
        ([trained_run, video, "--out", tmp_path / "file", *GIVEN], "--out .*file: cannot be written: Not a directory"),
        ([trained_run, tmp_path / "empty", *out, *GIVEN], "empty: no video in this folder"),
        ([trained_run, "data.val=x", *out, *GIVEN], "there is no VIDEO"),
        ([trained_run, video, *out, *GIVEN, "--class", "lift"], "there is no class 'lift'; did you mean 'left'"),
        ([trained_run, video, "gone.mp4", *out, *GIVEN], "gone.mp4: No such file or directory"),
        ([alone, video, *out, "data.val=gone.csv"], "no gone.csv .*--threshold VALUE"),
        ([trained_run, video, *out, *GIVEN, *GIVEN], "--threshold must be given once for each network: 1, got 2"),
        ([tmp_path / "empty", video, *out, *GIVEN], "empty: there is no checkpoint in it"),
    ):
        printed, err = _cam(capsys, *words, status=2)
        assert printed == "" and len(err.splitlines()) == 1
        assert re.search(reason, err), err
    assert not (tmp_path / "out/cam.csv").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--frames", "0"), ("--frames", "some"), ("--threshold", "nan"), ("--threshold", "x")]
)
def test_options_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = _cam(capsys, "run", "a.mp4", "--out", "out", option, value, status=2)
    assert f"argument {option}: must be " in err and err.endswith(f", got '{value}'\n")


def test_long_and_odd_names_stay_file_names(tmp_path: Path) -> None:
    paths = ["x/a.mp4", "y/a.mp4", "a_2.avi", "a.webm", "x/b.c.mp4", "clips/"]
    assert output_names(paths) == ["a", "a_2", "a_2_2", "a_3", "b.c", "clips"]
    names = output_names([f"{'ä' * 300}.mp4", f"{'ä' * 300}b.mp4", os.fsdecode(b"\xff.mp4")])
    assert len(set(names)) == 3
    for name in names:
        (tmp_path / f".{name}.npz.123456.writing").touch()


def test_the_table_names_spans_and_directions() -> None:
    row = dict.fromkeys(("label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold"), 1)
    video = {"strip": "a.png", "maps": "a.npz", "networks": [{"network": "one", **row}, {"network": "two", **row}]}
    names = "network,label,class,score,logit,mean,peak_frame,foreground,threshold,strip,maps"
    values = f"{'1,' * 8}a.png,a.npz"
    assert maps_csv([]) == f"path,{names}\n"
    assert maps_csv([(Clip("a.mp4"), video)]) == f"path,{names}\na.mp4,one,{values}\na.mp4,two,{values}\n"
    lines = maps_csv([(Clip("a.mp4", Span(2, 5)), video), (Clip("b.mp4", is_reversed=True), video)]).splitlines()
    assert lines[0] == f"path,start_frame,end_frame,reversed,{names}"
    assert lines[1] == f"a.mp4,2,5,0,one,{values}" and lines[4] == f"b.mp4,,,1,two,{values}"
