from __future__ import annotations

import csv
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.check import (
    Examine,
    Facts,
    Found,
    Journal,
    Listing,
    bad_clips,
    examine,
    list_videos,
    spread,
    summarise,
    survey,
    with_facts,
)
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError

CLIPS = Path(__file__).parents[2].parent / "shared" / "clips"
needs_clips = pytest.mark.skipif(not CLIPS.is_dir(), reason="the real clips in ../shared/clips are not here")
FACTS = Facts(1, None, 2, 2, None, "x", "")


def _die_of_b(root: str, path: str) -> Found:
    if path == "b":
        os._exit(1)
    return FACTS


def _hang_at_b(root: str, path: str) -> Found:
    if path == "b":
        time.sleep(1000)
    return FACTS


@pytest.mark.parametrize(
    ("examine_b", "message"),
    [
        (_die_of_b, "decoding it kills the process"),
        (_hang_at_b, "is not read within 1.5 s: its reader never came back"),
    ],
)
def test_a_file_that_kills_or_holds_its_process_is_named_and_the_rest_follows(
    monkeypatch: pytest.MonkeyPatch, examine_b: Examine, message: str
) -> None:
    monkeypatch.setattr("summit_train.data.check._PATHS_PER_WORKER", 2)  # "c" needs a new pool
    found = list(spread(examine_b, "", "abc", workers=1, seconds=1.5))
    assert str(found[1]) == f"b: {message}"
    assert [found[0], *found[2:]] == [FACTS] * 2


def test_the_error_of_a_frame_says_which_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", np.zeros((1, 16, 16, 3), np.uint8))
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "00001.jpg").touch()
    error = examine(str(tmp_path), "clip")
    assert isinstance(error, DecodeError) and str(error) == "clip: 00001.jpg is empty"
    found = examine(str(tmp_path), "a.mp4")
    assert isinstance(found, Facts) and (found.num_frames, found.codec) == (1, "h264")


# The journal.


NOTED = Facts(9, 29.97, 32, 16, 0.3003, "h264", "ab" * 32)
BAD = "n\udcff.mp4"  # a name that is no UTF-8


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Three files of which two are noted, by two ranks."""
    for name in ("a.mp4", BAD, "c.mp4"):
        (tmp_path / name).write_text("x")
    journal = Journal(tmp_path / ".list.csv.journal", str(tmp_path))
    journal.add(0, "a.mp4", NOTED)
    journal.add(1, BAD, DecodeError(BAD, "is damaged"))
    return journal


def _read(journal: Journal) -> dict[str, Found | str]:
    found = journal.read(["a.mp4", BAD, "c.mp4"])
    return {path: str(what) if isinstance(what, DecodeError) else what for path, what in found.items()}


def test_what_was_noted_is_read(journal: Journal) -> None:
    assert _read(journal) == {"a.mp4": NOTED, BAD: f"{BAD}: is damaged"}
    assert list(journal.read(["a.mp4"])) == ["a.mp4"]


def test_half_a_line_is_passed_over_and_the_next_one_is_whole(journal: Journal, tmp_path: Path) -> None:
    part = tmp_path / ".list.csv.journal" / "000000.jsonl"
    part.write_bytes(part.read_bytes()[:-9])
    assert _read(journal) == {BAD: f"{BAD}: is damaged"}
    journal.add(0, "c.mp4", NOTED)
    assert _read(journal) == {BAD: f"{BAD}: is damaged", "c.mp4": NOTED}


def test_a_file_that_has_changed_is_looked_at_again(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("more")
    (tmp_path / BAD).unlink()
    assert _read(journal) == {}


# Indexing: from videos to rows.


def index_videos(listing: Listing, workers: int) -> Iterator[ManifestRow | DecodeError]:
    """Decode the listed videos, as `data index` does."""
    paths = list(dict.fromkeys(row.path for row in listing.rows))
    found = dict(zip(paths, survey(str(listing.root), paths, workers), strict=True))
    return (with_facts(row, found[row.path]) for row in listing.rows)


def _video(path: Path, num_frames: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, np.full((num_frames, 16, 32, 3), 90, np.uint8), 10)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders with three good videos and two that are none."""
    _video(tmp_path / "set" / "walk" / "b.mp4", 5)
    _video(tmp_path / "set" / "walk" / "a.mkv", 4)
    _video(tmp_path / "set" / "run" / "deep" / "c.avi")
    (tmp_path / "set" / "run" / "bad.mp4").write_text("no video at all")
    (tmp_path / "set" / "run" / "empty.mp4").touch()
    (tmp_path / "set" / "notes.txt").write_text("x")
    return tmp_path / "set"


def test_class_folders_become_rows_with_what_decoding_found(folder: Path) -> None:
    listing = list_videos(folder)
    found = list(index_videos(listing, workers=0))
    assert listing.classes == ("run", "walk")
    assert listing.skipped == Counter({".txt": 1})
    digest = hashlib.sha256((folder / "walk/b.mp4").read_bytes()).hexdigest()
    rows = [row for row in found if isinstance(row, ManifestRow)]
    expected = [("run/deep/c.avi", 0, 3), ("walk/a.mkv", 1, 4), ("walk/b.mp4", 1, 5)]
    assert [(row.path, row.label, row.num_frames) for row in rows] == expected
    bad = [error for error in found if isinstance(error, DecodeError)]
    assert [error.path for error in bad] == ["run/bad.mp4", "run/empty.mp4"] and bad[1].reason == "is empty"
    assert rows[2] == ManifestRow("walk/b.mp4", 1, 5, 10.0, 32, 16, sha256=digest, duration=0.5, codec="h264")


def test_worker_processes_find_the_same_in_the_same_order(folder: Path) -> None:
    listing = list_videos(folder)
    alone, spread = (list(map(str, index_videos(listing, workers))) for workers in (0, 2))
    assert spread == alone


def test_a_folder_of_videos_is_one_class_with_its_name(tmp_path: Path) -> None:
    _video(tmp_path / "clips" / "b.mp4")
    _video(tmp_path / "clips" / "A.MP4")
    (tmp_path / "clips" / "thumbnails").mkdir()
    listing = list_videos(tmp_path / "clips")
    assert listing.classes == ("clips",)
    assert [(row.path, row.label) for row in listing.rows] == [("A.MP4", 0), ("b.mp4", 0)]


def test_a_manifest_keeps_its_labels_groups_and_directions(tmp_path: Path, folder: Path) -> None:
    old = [
        ManifestRow("walk/b.mp4", "stroll", group="ann", reversed=True),
        ManifestRow("run/deep/c.avi", "dash", num_frames=99),
    ]
    write_manifest(tmp_path / "old.csv", old)
    (tmp_path / "classes.txt").write_text("dash\nstroll\n")
    listing = list_videos(tmp_path / "old.csv", root=folder)
    assert listing.classes == ("dash", "stroll")
    first, second = index_videos(listing, workers=0)
    assert isinstance(first, ManifestRow) and isinstance(second, ManifestRow)
    assert (first.label, first.group, first.reversed, first.num_frames) == (1, "ann", True, 5)
    assert (second.label, second.group, second.reversed, second.num_frames) == (0, None, False, 3)


def test_videos_next_to_class_folders_and_folders_without_any_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="no video in it"):
        list_videos(tmp_path)
    for name in ("walk/a.mp4", "stray.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"stray\.mp4: is next to class folders"):
        list_videos(tmp_path)


# What becomes of them.


def test_the_summary_sorts_out_what_is_left_out_and_why() -> None:
    found = [("a", 9, "1"), ("b", 3, "2"), ("c", 9, "1"), ("d", 9, "1")]
    rows = [ManifestRow(path, 0, num_frames, sha256=digest) for path, num_frames, digest in found]
    rows.append(replace(rows[0], reversed=True))  # a video in both directions is not a copy of itself
    bad = [DecodeError("e", "No such file or directory"), DecodeError("f", "is empty")]
    summary = summarise([*bad, *rows], min_frames=4)
    assert [row.path for row in summary.rows] == ["a", "c", "d", "a"]
    assert [str(error) for error in summary.left_out] == [
        "e: No such file or directory",
        "f: is empty",
        "b: has 3 frames, fewer than 4",
    ]
    assert summary.copies == (("c", "a"), ("d", "a"))


def test_a_scan_holds_the_files_to_the_manifest(tmp_path: Path) -> None:
    facts = Facts(9, 25.0, 32, 16, 0.36, "h264", "ab" * 32)
    write_manifest(tmp_path / "list.csv", [ManifestRow("a", 0, 9, sha256="ab" * 32), ManifestRow("b", 0)])
    manifest = read_manifest(tmp_path / "list.csv")
    assert bad_clips(manifest, {"a": facts, "b": facts}) == []
    for found, reason in (
        (replace(facts, sha256="cd" * 32), "has changed since it was indexed: its SHA-256 is not the manifest's"),
        (replace(facts, num_frames=8), "has 8 frames, but the manifest says 9"),
        (DecodeError("elsewhere", "is empty"), "is empty"),
    ):
        (error,) = bad_clips(manifest, {"a": found, "b": facts})
        assert (error.path, error.reason) == ("a", reason)


@needs_clips
def test_every_codec_clip_is_indexed_as_ffprobe_found_it() -> None:
    listing = list_videos(CLIPS / "codecs")
    with open(CLIPS / "codecs" / "codecs.csv", newline="") as file:
        wanted = {row["file"]: row for row in csv.DictReader(file)}
    found = list(index_videos(listing, workers=0))
    bad = {error.path: error.reason for error in found if isinstance(error, DecodeError)}
    assert list(bad) == ["40_corrupted.mp4"]
    assert "49 frames decoded" in bad["40_corrupted.mp4"]
    rows = {row.path: row for row in found if isinstance(row, ManifestRow)}
    assert rows.keys() | bad.keys() == wanted.keys()
    for path, row in rows.items():
        stored = int(wanted[path]["w"]), int(wanted[path]["h"])
        upright = stored[::-1] if wanted[path]["rot"] in ("90", "-90") else stored
        numerator, denominator = map(int, wanted[path]["avg_fps"].split("/"))
        assert (row.num_frames, row.width, row.height) == (int(wanted[path]["decoded"]), *upright), path
        assert row.fps == pytest.approx(numerator / denominator, abs=1e-6), path


@needs_clips
def test_the_weizmann_clips_have_the_frames_and_hashes_that_are_known() -> None:
    with open(CLIPS / "weizmann" / "clips.csv", newline="") as file:
        wanted = {row["path"]: (int(row["num_frames"]), row["sha256"]) for row in csv.DictReader(file)}
    listing = list_videos(CLIPS / "weizmann")
    assert listing.classes is not None and len(listing.classes) == 10
    rows = [row for row in index_videos(listing, workers=0) if isinstance(row, ManifestRow)]
    assert {row.path: (row.num_frames, row.sha256) for row in rows} == wanted
