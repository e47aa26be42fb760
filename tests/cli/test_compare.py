"""`summit-train data compare`: pairs by path, content and what clips show, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.reading import read_rows
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.data.video.encode import write_video
from tests.data.clips import CLIPS, all_of, needs_clips, read_clip
from tests.worlds import Say, refused


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """a.csv; b.csv with the path of its first clip, the bytes of its second, its third mirrored, and a stranger."""
    folder = tmp_path_factory.mktemp("lists")
    list(write_motion_set(folder, 5, 4, MotionSet(size=64, num_frames=30)))
    rows = [ManifestRow(f"videos/train_{number:06}.mp4", 0, group=f"g{number}") for number in range(5)]
    write_manifest(folder / "a.csv", rows)
    shutil.copy(folder / rows[1].path, folder / "bytes.mp4")
    frames = read_clip(folder / rows[2].path, lambda n: np.arange(n), all_of)
    write_video(folder / "mirrored.mp4", np.ascontiguousarray(frames[:, :, ::-1]), quality=28)
    (folder / "bad.mp4").write_bytes(b"no video")
    others = ("bytes.mp4", "mirrored.mp4", "videos/val_000000.mp4", "bad.mp4", "missing.mp4")
    write_manifest(folder / "b.csv", [rows[0], *(ManifestRow(name, 0) for name in others)])
    return folder / "a.csv", folder / "b.csv"


def test_the_pairs_are_named_with_how_they_were_found(lists: tuple[Path, Path], say: Say) -> None:
    status, out, _ = say("data", "compare", *lists, "--near", "--workers", 0, "--json")
    found = json.loads(out)
    assert status == 0 and found["clips"] == [5, 6]
    first, second, third = found["pairs"]
    path = "videos/train_000000.mp4"
    pair = {"a": {"path": path, "group": "g0"}, "b": {"path": path, "group": "g0"}}
    assert first == {"by": "path", "distance": 0.0, "mirrored": False, **pair}
    assert (second["by"], second["a"]["group"], second["b"]) == ("sha256", "g1", {"path": "bytes.mp4"})
    assert (third["by"], third["a"]["group"], third["b"]) == ("near", "g2", {"path": "mirrored.mp4"})
    assert third["mirrored"] and 0 < third["distance"] <= 7
    assert [one["path"] for one in found["unreadable"]] == ["missing.mp4", "bad.mp4"]


def test_without_near_nothing_is_decoded(lists: tuple[Path, Path], say: Say) -> None:
    status, out, _ = say("data", "compare", *lists, "--workers", 0)
    printed = out.splitlines()
    assert status == 0 and printed[0].split() == ["A", "B", "by"]
    assert printed[3:] == [
        "2 pairs: 1 by path, 1 by SHA-256",
        f"{lists[0]}: 2 of 5 clips also in B",
        f"{lists[1]}: 2 of 6 clips also in A",
        "not compared: missing.mp4: No such file or directory",
    ]
    status, out, _ = say("data", "compare", lists[0], lists[1], "--workers", 0, "--json")
    assert json.loads(out)["same_scene"] is None and json.loads(out)["pairs"][0]["distance"] is None


@pytest.mark.parametrize("near", [(), ("--near",)])
@pytest.mark.parametrize("times", [1, 2])
def test_one_list_is_searched_for_clips_that_it_has_twice(
    lists: tuple[Path, Path], say: Say, near: tuple[str, ...], times: int
) -> None:
    both = lists[0].with_name("both.csv")
    write_manifest(both, [row for path in lists for row in read_rows(read_manifest(path))])
    status, out, _ = say("data", "compare", *[both] * times, *near, "--workers", 0, "--json")
    found = json.loads(out)
    pairs = [(one["by"], Path(one["a"]["path"]).name, Path(one["b"]["path"]).name) for one in found["pairs"]]
    expected = [
        ("path", "train_000000.mp4", "train_000000.mp4"), ("sha256", "train_000001.mp4", "bytes.mp4"),
        ("near", "train_000002.mp4", "mirrored.mp4"),
    ]  # fmt: skip
    assert status == 0 and found["clips"] == [11] and pairs == expected[: 3 if near else 2]
    _, out, _ = say("data", "compare", *[both] * times, "--workers", 0)
    assert f"{both}: 4 of 11 clips here twice or more" in out.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--near", "17"), "--near must be 0 to 16 bits, got 17"),
        (("--near", "-1"), "--near must be 0 to 16 bits, got -1"),
        (("c.csv",), "data compare takes one list or two, got 3"),
        (("--root", "x", "y", "z"), "--root must be one folder, or one for A and one for B, got 3"),
    ],
)
def test_mistakes_exit_2(lists: tuple[Path, Path], say: Say, words: tuple[str, ...], message: str) -> None:
    assert message in refused(say("data", "compare", *lists, *words))


@needs_clips
def test_copies_of_real_clips_are_found_on_one_background(tmp_path: Path, say: Say) -> None:
    source = CLIPS / "weizmann"
    names = [f"{action}/{person}_{action}.avi" for action in ("run", "wave2", "jack") for person in ("daria", "eli")]
    write_manifest(tmp_path / "a.csv", [ManifestRow(name, 0) for name in names])
    for number, name in enumerate(names):
        frames = read_clip(source / name, lambda n: np.arange(n), all_of)
        frames = (frames[:, 7:-7, 9:-9], frames[:, :, ::-1], frames[8:-8])[number % 3]
        write_video(tmp_path / f"{number}.mp4", np.ascontiguousarray(frames), quality=30)
    write_manifest(tmp_path / "b.csv", [ManifestRow(f"{number}.mp4", 0) for number in range(len(names))])
    lists = (tmp_path / "a.csv", tmp_path / "b.csv")
    _, out, _ = say("data", "compare", *lists, "--near", "--root", source, tmp_path, "--workers", 0, "--json")
    found = json.loads(out)
    pairs = sorted((names.index(one["a"]["path"]), one["b"]["path"], one["mirrored"]) for one in found["pairs"])
    assert pairs == [(number, f"{number}.mp4", number % 3 == 1) for number in range(len(names))]
    assert found["same_scene"] > 0  # the same lawn, other people and motion
