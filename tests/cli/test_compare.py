"""`summit-train data compare`: pairs by path and by SHA-256, as text and as JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.reading import read_rows
from summit_train.data.motion import MotionSet, write_motion_set
from tests.worlds import Say, json_of, stdout_of


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """a.csv; b.csv with the path of its first clip, the bytes of its second, and a stranger."""
    folder = tmp_path_factory.mktemp("lists")
    list(write_motion_set(folder, 5, 4, MotionSet(size=64, num_frames=30)))
    rows = [ManifestRow(f"videos/train_{number:06}.mp4", 0, group=f"g{number}") for number in range(5)]
    write_manifest(folder / "a.csv", rows)
    shutil.copy(folder / rows[1].path, folder / "bytes.mp4")
    (folder / "bad.mp4").write_bytes(b"no video")
    others = ("bytes.mp4", "videos/val_000000.mp4", "bad.mp4", "missing.mp4")
    write_manifest(folder / "b.csv", [rows[0], *(ManifestRow(name, 0) for name in others)])
    return folder / "a.csv", folder / "b.csv"


def test_the_pairs_are_named_with_how_they_were_found(lists: tuple[Path, Path], say: Say) -> None:
    found = json_of(say("data", "compare", *lists, "--workers", 0, "--json"))
    first, second = found["pairs"]
    clip = {"path": "videos/train_000000.mp4", "group": "g0"}
    assert found["clips"] == [5, 5] and first == {"by": "path", "a": clip, "b": clip}
    assert (second["by"], second["a"]["group"], second["b"]) == ("sha256", "g1", {"path": "bytes.mp4"})
    assert [one["path"] for one in found["unreadable"]] == ["missing.mp4"]


def test_the_text_counts_the_pairs_and_the_clips(lists: tuple[Path, Path], say: Say) -> None:
    printed = stdout_of(say("data", "compare", *lists, "--workers", 0)).splitlines()
    assert printed[0].split() == ["A", "B", "by"] and printed[3:] == [
        "2 pairs: 1 by path, 1 by SHA-256",
        f"{lists[0]}: 2 of 5 clips also in B",
        f"{lists[1]}: 2 of 5 clips also in A",
        "not compared: missing.mp4: No such file or directory",
    ]


@pytest.mark.parametrize("times", [1, 2])
def test_one_list_is_searched_for_clips_that_it_has_twice(lists: tuple[Path, Path], say: Say, times: int) -> None:
    both = lists[0].with_name("both.csv")
    write_manifest(both, [row for path in lists for row in read_rows(path)[1]])
    words = ("data", "compare", *[both] * times, "--workers", 0)
    found = json_of(say(*words, "--json"))
    pairs = [(one["by"], Path(one["a"]["path"]).name, Path(one["b"]["path"]).name) for one in found["pairs"]]
    assert pairs == [("path", "train_000000.mp4", "train_000000.mp4"), ("sha256", "train_000001.mp4", "bytes.mp4")]
    assert found["clips"] == [10] and f"{both}: 4 of 10 clips here twice or more\n" in stdout_of(say(*words))
