"""`summit-train cam` on a trained run and real videos: the files that it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from summit_train.inference.cam.command import draw_strip, heated, output_names
from tests.worlds import Say

GIVEN = ("--threshold", "0.1")
VIDEO = "videos/val_000000.mp4"
COLUMNS = ["label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold", "strip", "maps"]
Cam = Callable[..., tuple[str, str]]


@pytest.fixture
def cam(say: Say, tmp_path: Path) -> Cam:
    """Runs `cam RUN ... --out out` in this process, which must end with `status`: (stdout, stderr)."""

    def cam(*words: object, status: int = 0, out: Path = tmp_path / "out") -> tuple[str, str]:
        found, text, err = say("cam", *words, "--out", out)
        assert found == status, err
        return text, err

    return cam


def table(folder: Path) -> list[dict[str, Any]]:
    with (folder / "out/cam.csv").open() as file:
        return list(csv.DictReader(file))


def test_strips_maps_and_a_table(cam: Cam, trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    out, val = tmp_path / "out", tmp_path / "val.csv"
    val.write_text("path,label\nvideos/val_000000.mp4,0\nvideos/val_000001.mp4,1\nvideos/val_000002.mp4,2\n")
    videos = [motion_set / f"videos/val_00000{number}.mp4" for number in range(2)]
    words = [trained_run, *videos, f"data.val={val}", f"data.root={motion_set}"]
    printed: dict[str, Any] = json.loads(cam(*words, "--json")[0])
    network = printed["network"]
    assert network["videos"] == 3 and printed["bad"] == []
    rows = table(tmp_path)
    assert list(rows[0]) == ["path", *COLUMNS] and len(rows) == 2
    for row, shown, video in zip(rows, printed["videos"], videos, strict=True):
        assert row == {name: str(value) for name, value in shown.items()} and row["path"] == str(video)
        assert (row["maps"], row["strip"]) == (str(out / f"{video.stem}.npz"), str(out / f"{video.stem}.png"))
        maps = np.load(row["maps"], allow_pickle=False)
        names = {"map", "frames", "slices", "path", "label", "class", "score", "logit", "threshold"}
        assert set(maps) == names and maps["map"].dtype == np.float32
        assert float(row["mean"]) == pytest.approx(float(maps["map"].mean())) and row["class"] == str(maps["class"])
        peak = np.unravel_index(maps["map"].argmax(), maps["map"].shape)[0]
        assert int(row["peak_frame"]) == maps["frames"][peak] and float(row["score"]) == float(maps["score"])
        assert float(maps["threshold"]) == float(row["threshold"]) == network["threshold"]
        assert Path(row["strip"]).read_bytes().startswith(b"\x89PNG")
    text, _ = cam(*words)
    skipped = f"--threshold {network['threshold']:.6g} skips this pass"
    assert f"keeps {100 * network['kept']:.1f} % of the pixels of 3 validation videos; {skipped}" in text
    assert "sees 4 frames (dense, every 1), the centre square at 32" in text and str(out / "val_000001.png") in text


def test_files_of_one_stem_get_names_of_their_own(
    cam: Cam, trained_run: Path, motion_set: Path, tmp_path: Path
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff.mp4")  # a name that is no UTF-8
    for video in (tmp_path / "a/clip.mp4", tmp_path / "b/clip.mp4", odd):
        video.parent.mkdir(exist_ok=True)
        shutil.copy(motion_set / VIDEO, video)
    text, _ = cam(trained_run, tmp_path / "a", tmp_path / "b/clip.mp4", odd, *GIVEN)
    paths = {name: str(np.load(tmp_path / f"out/{name}.npz")["path"]) for name in ("clip", "clip_2")}
    assert paths == {"clip": str(tmp_path / "a/clip.mp4"), "clip_2": str(tmp_path / "b/clip.mp4")}
    assert f"{tmp_path}/\\udcff.mp4" in text and os.fsencode(odd) in (tmp_path / "out/cam.csv").read_bytes()


def test_without_a_video_that_can_be_read_the_table_is_empty(cam: Cam, trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    printed = json.loads(cam(trained_run, tmp_path / "text.mp4", *GIVEN, "--json", status=1)[0])
    reason = "is not a video in a supported format, or its header is damaged"
    assert printed["bad"] == [{"path": str(tmp_path / "text.mp4"), "reason": reason}] and table(tmp_path) == []


def test_a_manifest_with_spans_and_directions(cam: Cam, trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    (tmp_path / "spans.csv").write_text(
        f"path,label,start_frame,end_frame,reversed\n{VIDEO},7,0,4,0\n{VIDEO},7,4,8,1\ngone.mp4,7,,,0\n"
    )
    words = [trained_run, tmp_path / "spans.csv", motion_set / VIDEO, *GIVEN, f"data.root={motion_set}"]
    text, err = cam(*words, status=1)
    # Labels are of no use here, so there is no note about a class that the network does not have.
    assert err == "gone.mp4: No such file or directory\nsummit-train: 1 of 4 videos could not be read\n"
    assert f"{VIDEO} 0:4 " in text and f"{VIDEO} 4:8 backwards " in text
    rows = table(tmp_path)
    assert [row["path"] for row in rows] == [VIDEO, VIDEO, str(motion_set / VIDEO)]
    spans = [(row["start_frame"], row["end_frame"], row["reversed"]) for row in rows]
    assert spans == [("", "4", "0"), ("4", "8", "1"), ("", "", "0")]
    frames = [np.load(row["maps"])["frames"].tolist() for row in rows]
    assert frames == [[0, 1, 2, 3], [7, 6, 5, 4], [2, 3, 4, 5]]
    names = [Path(row["maps"]).name for row in rows]
    assert names == ["val_000000.npz", "val_000000_2.npz", "val_000000_3.npz"]


def test_long_and_odd_names_stay_file_names(tmp_path: Path) -> None:
    paths = ["x/a.mp4", "y/a.mp4", "a_2.avi", "a.webm", "x/b.c.mp4", "clips/"]
    assert output_names(paths) == ["a", "a_2", "a_2_2", "a_3", "b.c", "clips"]
    names = output_names([f"{'ä' * 300}.mp4", f"{'ä' * 300}b.mp4", os.fsdecode(b"\xff.mp4")])
    assert len(set(names)) == 3
    for name in names:
        (tmp_path / f".{name}.npz.123456.writing").touch()


# Strips: the map is heat over the pictures, the foreground has a line, and texts fit.

BRIGHT, YELLOW = (200, 100, 40), (252, 255, 164)  # of a picture; of matplotlib's "inferno" at its end
ODD = "$Pretending$ to put \N{SNOWMAN} " + "something behind something, " * 9


def strip(
    path: Path, num_frames: int, height: int = 128, width: int = 128, title: str = "bend, score 0.97",
    colour: tuple[int, int, int] = BRIGHT, threshold: float = 3.0,
) -> Image:  # fmt: skip
    """The strip of frames of one colour; the map is 4 in their left half and -2 in the other."""
    maps = np.full((num_frames, height, width), -2.0, np.float32)
    maps[:, :, : width // 2] = 4
    pictures = np.full((num_frames, height, width, 3), colour, np.uint8)
    draw_strip(path, ("a.mp4", title), range(num_frames), pictures, maps, threshold)
    return Image.open(path).convert("RGB")


@pytest.mark.parametrize("colour", [BRIGHT, (0, 0, 0)])
@pytest.mark.parametrize(("frames", "height", "width"), [(1, 32, 64), (8, 128, 128), (4, 512, 256)])
def test_half_of_each_frame_is_hot(
    frames: int, height: int, width: int, colour: tuple[int, int, int], tmp_path: Path
) -> None:
    picture = strip(tmp_path / "strip.png", frames, height, width, colour=colour)
    colours = {colour: count for count, colour in picture.getcolors(1 << 24) or []}
    shown = min(max(height, 128), 256)
    half = frames * shown * (shown * width // height) / 2
    hot = tuple(int(0.5 * own + 0.5 * heat) for own, heat in zip(colour, YELLOW, strict=True))
    near = [count for found, count in colours.items() if max(abs(a - b) for a, b in zip(found, hot, strict=True)) < 3]
    assert colours[colour] == pytest.approx(sum(near), rel=0.1) and 0.7 * half < colours[colour] < 1.5 * half
    assert picture.getpixel((0, 0)) == picture.getpixel((picture.width - 1, picture.height - 1)) == (255, 255, 255)


def test_heat_by_hand() -> None:
    """None, a quarter and half of it at levels 0, 1/2 and 1 between the lowest value of all frames and the highest."""
    pictures = np.full((2, 1, 2, 3), 100, np.uint8)
    maps = np.array([[[-1.0, 0]], [[1, 1]]], np.float32)
    ((cold, half),), ((full, other),) = heated(pictures, maps).astype(float)
    assert (cold == 100).all() and (full == other).all()
    for found, level in ((half, 0.5), (full, 1.0)):
        expected = (1 - level / 2) * 100 + level / 2 * 255 * np.array(colormaps["inferno"](level)[:3])
        assert np.abs(found - expected).max() <= 1
    assert (heated(pictures, np.zeros_like(maps)) == 100).all(), "of equal values none"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("threshold", [-9.0, 1.0, 9.0])
def test_a_line_surrounds_the_foreground_where_it_has_an_edge(threshold: float, tmp_path: Path) -> None:
    picture = np.array(strip(tmp_path / "strip.png", 1, colour=(0, 0, 0), threshold=threshold))
    middle = picture[len(picture) * 3 // 4]  # a row of pixels through the frame
    places = np.flatnonzero((middle > 0).any(1) & (middle < 255).any(1))
    lines = (middle[places[0] : places[0] + 128].min(1) > 200).sum() if len(places) else 0
    assert (lines > 0) == (threshold == 1.0)


def test_texts_fit_whatever_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    picture = strip(tmp_path / "strip.png", 2, title=ODD)
    (figure,) = figures
    title = figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
    boxes = [title, *(axes.title.get_window_extent() for axes in figure.axes)]
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= picture.width and box.y1 <= picture.height
        assert not any(box.overlaps(other) for other in boxes[:number])
