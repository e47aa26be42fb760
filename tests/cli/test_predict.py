"""`summit-train predict`: what it prints and writes, its exit status, and the same on any number of ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import Say, command, lines


@pytest.fixture
def say(say: Say, trained_run: Path) -> Say:
    """Runs `predict RUN ...` in this process: (status, stdout, stderr)."""
    return lambda *words, run=trained_run: say("predict", run, *words)


@pytest.fixture
def videos(motion_set: Path, tmp_path: Path) -> Path:
    """A folder of three videos; the second one is cut short."""
    (tmp_path / "videos").mkdir()
    for number in range(3):
        content = (motion_set / f"videos/val_00000{number}.mp4").read_bytes()
        (tmp_path / f"videos/{number}.mp4").write_bytes(content[: 300 if number == 1 else None])
    return tmp_path / "videos"


def test_two_ranks_say_what_one_says(
    say: Say, trained_run: Path, motion_set: Path, videos: Path, tmp_path: Path
) -> None:
    words = [motion_set / "val.csv", videos, "--json", "--csv"]
    status, one, _ = say(*words, tmp_path / "one.csv")
    assert status == 1
    status, output = command(2, "predict", str(trained_run), *map(str, words), f"{tmp_path}/two.csv")
    assert status == 1 and output.count("1 of 14 videos could not be read") == 1, output
    (two,) = (line for line in lines(output) if line.startswith("{"))
    assert json.loads(two) == json.loads(one) and len(json.loads(two)["videos"]) == 14
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()


def test_a_mistake_is_said_once_by_all_ranks(trained_run: Path) -> None:
    status, output = command(2, "predict", str(trained_run), "gone.mp4")
    assert status == 2 and output.count("gone.mp4: No such file or directory") == 1


def test_a_bad_file_is_named_and_the_status_is_1(say: Say, videos: Path, tmp_path: Path) -> None:
    status, out, err = say(videos, "--top", "2", "--csv", tmp_path / "new/out.csv")
    assert status == 1
    assert [line.split()[0] for line in lines(out)[1:]][::2] == [f"{videos}/0.mp4", f"{videos}/2.mp4"]
    reason = "is not a video in a supported format, or its header is damaged"
    assert err == f"{videos}/1.mp4: {reason}\nsummit-train: 1 of 3 videos could not be read\n"
    _, out, _ = say(videos, "--top", "2", "--json")
    found = json.loads(out)["videos"]
    assert found[1] == {"path": f"{videos}/1.mp4", "error": reason}
    rows = list(csv.DictReader((tmp_path / "new/out.csv").open()))
    assert [(row["path"], row["error"]) for row in rows] == [(video["path"], video.get("error", "")) for video in found]
    assert rows[0]["label_2"] == str(found[0]["predictions"][1]["label"])


def test_many_bad_files_are_counted(say: Say, tmp_path: Path) -> None:
    for number in range(22):
        (tmp_path / f"{number:02}.mp4").touch()
    status, out, err = say(tmp_path)
    assert (status, out) == (1, "")
    assert lines(err)[19:] == [
        f"{tmp_path}/19.mp4: is empty",
        "... and 2 more; --json and --csv name all",
        "summit-train: 22 of 22 videos could not be read",
    ]


def test_names_reach_the_terminal_without_their_control_characters(say: Say, videos: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\x1b[31mred\nÖl\u2028l\n走\nd\n")
    for number, name in ((0, "a\nb.mp4"), (1, "\x1b]0;bad.mp4")):
        (videos / f"{number}.mp4").rename(videos / name)
    words = (videos, "--classes", tmp_path / "names.txt")
    status, out, err = say(*words)
    assert status == 1 and "\x1b" not in out + err and r"/a\nb.mp4" in out and r"/\x1b]0;bad.mp4: " in err
    assert {line.split()[-3] for line in lines(out)[1:]} == {r"\x1b[31mred", r"Öl\u2028l", "走", "d"}
    named = {one["name"] for one in json.loads(say(*words, "--json")[1])["videos"][1]["predictions"]}
    assert named == {"\x1b[31mred", "Öl\u2028l", "走", "d"}


def test_a_disk_that_fails_in_the_end_leaves_the_old_csv_and_the_printed_result(
    say: Say, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.csv").write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("summit_train.core.files.os.fsync", full)
    status, out, err = say(videos / "0.mp4", "--csv", tmp_path / "out.csv", "--json")
    assert status == 1 and json.loads(out)["videos"]
    assert f"{tmp_path}/out.csv: cannot be written: No space left on device" in err
    assert (tmp_path / "out.csv").read_text() == "old"
