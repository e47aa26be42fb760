from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.quarantine import read_quarantine
from summit_train.data.video.encode import write_video
from tests.worlds import PATIENCE_S, Say, start, succeed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders, a good video in each and a bad one in the first."""
    for name in ("jump/a.mp4", "walk/b.mp4"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        write_video(tmp_path / "set" / name, np.zeros((3, 16, 16, 3), np.uint8))
    (tmp_path / "set" / "jump" / "torn.mp4").write_text("x")
    return tmp_path / "set"


def test_motion_writes_a_set_and_says_how_to_use_it(tmp_path: Path, say: Say) -> None:
    out = tmp_path / "m"
    words = [
        "--train",
        "4",
        "--val",
        "2",
        "--size",
        "16",
        "--frames",
        "4",
        "--classes",
        "2",
        "--kind",
        "order",
        "--seed",
        "5",
    ]
    status, printed, _ = say("data", "motion", out, *words)
    assert status == 0
    assert len(read_manifest(out / "train.csv")) == 4 and len(read_manifest(out / "val.csv")) == 2
    assert len(list((out / "videos").glob("*.mp4"))) == 6
    assert "6 videos of 2 classes: red-blue, blue-red" in printed and f"data.root={out}" in printed


def test_index_writes_the_good_and_names_the_bad(folder: Path, say: Say) -> None:
    out = folder.parent / "list.csv"
    status, printed, _ = say("data", "index", folder, "--out", out, "--workers", 0)
    assert status == 0
    manifest = read_manifest(out)
    assert [manifest.path(index) for index in range(len(manifest))] == ["jump/a.mp4", "walk/b.mp4"]
    assert manifest.classes == ("jump", "walk")
    assert "left out, unreadable: 1\n  jump/torn.mp4: is not a video" in printed
    assert "2 videos, 6 frames, 2 classes" in printed
    assert "the same bytes as another: 1\n  walk/b.mp4 = jump/a.mp4" in printed
    assert read_quarantine(folder.parent / "list.left_out.csv")[0].path == "jump/torn.mp4"
    names = ["classes.txt", "list.csv", "list.left_out.csv", "set"]
    assert [path.name for path in sorted(folder.parent.iterdir())] == names


def test_index_of_nothing_usable_writes_nothing(tmp_path: Path, say: Say) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.mp4").write_text("x")
    status, out, err = say("data", "index", tmp_path / "set", "--out", tmp_path / "list.csv", "--workers", 0)
    assert status == 2 and "a.mp4: is not a video" in out and "contains no video that can be used" in err
    assert not (tmp_path / "list.csv").exists()


def test_index_does_not_renumber_the_classes_of_a_neighbour(folder: Path, say: Say) -> None:
    (folder.parent / "classes.txt").write_text("walk\njump\n")
    status, _, err = say("data", "index", folder, "--out", folder.parent / "list.csv")
    assert status == 2 and "has other classes" in err
    assert (folder.parent / "classes.txt").read_text() == "walk\njump\n"


def test_index_leaves_out_what_is_missing_or_too_short(folder: Path, say: Say) -> None:
    rows = [ManifestRow("jump/a.mp4", 0), ManifestRow("gone.mp4", 1), ManifestRow("walk/b.mp4", 1)]
    write_video(folder / "walk" / "b.mp4", np.zeros((9, 16, 16, 3), np.uint8))
    write_manifest(folder.parent / "old.csv", rows)
    out = folder.parent / "new.csv"
    words = ("--root", folder, "--out", out, "--workers", 0, "--min-frames", 8)
    status, printed, _ = say("data", "index", folder.parent / "old.csv", *words)
    assert status == 0
    assert "missing: 1\n  gone.mp4: No such file" in printed
    assert "too short: 1\n  jump/a.mp4: has 3 frames, fewer than 8" in printed
    assert len(read_manifest(out)) == 1 and len(read_quarantine(folder.parent / "new.left_out.csv")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("motion TMP/m --train 4 --val 4 --classes 9", "choose 2 to 8 directions"),
        ("motion TMP/set/jump/a.mp4/m --train 4 --val 4", "TMP/set/jump/a.mp4/m"),
        ("index TMP/missing --out TMP/list.csv", "missing"),
        ("index TMP/set --out TMP/missing/list.csv", "missing"),
        ("index TMP/set --out TMP/list.csv --root TMP/set/jump", "--root must be left out where SOURCE is a folder"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(folder: Path, say: Say, words: str, message: str) -> None:
    status, _, err = say("data", *words.replace("TMP", str(folder.parent)).split())
    assert status == 2 and message.replace("TMP", str(folder.parent)) in err
    assert [path.name for path in folder.parent.iterdir()] == ["set"]


# Scan.


def test_scan_lists_what_should_not_be_trained_on(folder: Path, say: Say) -> None:
    listed = folder.parent / "list.csv"
    assert say("data", "index", folder, "--out", listed, "--workers", 0)[0] == 0
    video = folder / "walk" / "b.mp4"
    video.write_bytes(video.read_bytes()[:-1] + b"?")  # in the title, which no decoder looks at
    bad = folder.parent / "bad.csv"
    status, printed, _ = say("data", "scan", listed, "--root", folder, "--out", bad, "--workers", 1)
    assert status == 0
    reason = "has changed since it was indexed: its SHA-256 is not the manifest's"
    assert list(map(str, read_quarantine(bad))) == [f"walk/b.mp4: {reason}"]
    assert f"2 videos decoded, 1 bad\n       1  {reason}\n" in printed and f"data.quarantine={bad}" in printed


# Killed, and on several ranks.


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twenty-four videos of three classes, two of them bad."""
    for number in range(24):
        path = tmp_path / "set" / f"class{number % 3}" / f"{number:02}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, np.full((4 + number, 16, 16, 3), 9 * number, np.uint8))
    (tmp_path / "set" / "class0" / "bad.mp4").write_text("x")
    (tmp_path / "set" / "class2" / "23.mp4").write_bytes((tmp_path / "set" / "class2" / "23.mp4").read_bytes()[:600])
    return tmp_path / "set"


def _results(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("list.csv", "list.left_out.csv", "classes.txt")]


def test_an_index_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(many: Path, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for out in (undisturbed, killed):
        out.mkdir()
    words = ["data", "index", str(many), "--workers", "1", "--out"]
    assert main([*words, str(undisturbed / "list.csv")]) == 0
    journal = killed / ".list.csv.journal" / "000000.jsonl"
    process = start(0, "-m", "summit_train", *words, str(killed / "list.csv"))
    deadline = time.monotonic() + PATIENCE_S
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (killed / "list.csv").exists() and journal.stat().st_size
    assert "resumes: " in succeed(0, *words, str(killed / "list.csv"))
    assert _results(killed) == _results(undisturbed)
    assert not journal.parent.exists()


def test_ranks_share_an_index(many: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for ranks, out in ((0, alone), (2, shared)):
        out.mkdir()
        output = succeed(ranks, "data", "index", str(many), "--workers", "0", "--out", str(out / "list.csv"))
        assert output.count("24 videos") == 0 and output.count("23 videos, ") == 1
    assert _results(shared) == _results(alone)
