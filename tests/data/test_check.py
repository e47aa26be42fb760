from __future__ import annotations

import csv
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.check import (
    Finding,
    Journal,
    LeftOut,
    Listing,
    copies,
    examine,
    index_clips,
    list_videos,
    reasons,
    scan_clips,
    spread,
)
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError, VideoInfo
from summit_train.data.video.span import Span
from tests.data.clips import CLIPS, needs_clips
from tests.worlds import PATIENCE_S

FACTS = VideoInfo(9, 29.97, 32, 16, 0.3003, "h264", "ab" * 32)


def _die_of_b(path: str) -> Finding:
    if path == "b":
        os._exit(1)
    return FACTS


NEVER_BACK = "its reader never came back"


def _hang_at_b(path: str) -> Finding:
    if path == "b":
        time.sleep(1000)
    return FACTS


@pytest.mark.parametrize(
    ("examine_b", "seconds", "message"),
    [
        (_die_of_b, PATIENCE_S, "kills the process that reads it (exit status 1)"),
        pytest.param(_hang_at_b, 1.5, f"takes longer than 1.5 s to read: {NEVER_BACK}", marks=pytest.mark.nightly),
    ],
)
def test_a_file_that_kills_or_holds_its_process_is_named_and_the_rest_follows(
    examine_b: Callable[[str], Finding], seconds: float, message: str
) -> None:
    found = list(spread(examine_b, "abc", workers=1, seconds=seconds))
    assert str(found[1]) == f"b: {message}"
    assert [found[0], *found[2:]] == [FACTS] * 2


def test_the_error_of_a_frame_says_which_frame(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "00001.jpg").touch()
    assert str(examine(str(tmp_path), "clip")) == "clip: 00001.jpg is empty"


# The journal.

BAD = "n\udcff.mp4"  # a name that is no UTF-8


def _nothing(folder: Path) -> None: ...


def _tear_the_first_line(folder: Path) -> None:
    part = folder / ".journal" / "000000.jsonl"
    part.write_bytes(part.read_bytes()[:-9])


def _change_the_files(folder: Path) -> None:
    (folder / "a.mp4").write_text("more")
    (folder / BAD).unlink()


@pytest.mark.parametrize(
    ("change", "left"), [(_nothing, ["a.mp4", BAD]), (_tear_the_first_line, [BAD]), (_change_the_files, [])]
)
def test_a_journal_knows_what_two_ranks_found_in_files_that_did_not_change(
    tmp_path: Path, change: Callable[[Path], None], left: list[str]
) -> None:
    for name in ("a.mp4", BAD, "c.mp4"):
        (tmp_path / name).write_text("x")
    journal = Journal(tmp_path / ".journal", str(tmp_path))
    journal.add(0, "a.mp4", FACTS)
    journal.add(1, BAD, DecodeError(BAD, "is damaged"))
    change(tmp_path)
    journal.add(0, "c.mp4", FACTS)  # whole, also after half a line
    found = {path: str(what) for path, what in journal.read(["a.mp4", BAD, "c.mp4"]).items()}
    known = {"a.mp4": str(FACTS), BAD: str(DecodeError(BAD, "is damaged"))}
    assert found == {path: known[path] for path in left} | {"c.mp4": str(FACTS)}
    assert list(journal.read(["c.mp4"])) == ["c.mp4"]


def test_a_line_of_another_journals_format_counts_as_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("x")
    journal = Journal(tmp_path / ".journal", str(tmp_path))
    journal.add(0, "a.mp4", FACTS)
    part = tmp_path / ".journal" / "000000.jsonl"
    record = json.loads(part.read_bytes())
    without = {key: value for key, value in record.items() if key != "format"}
    for other in (without, record | {"format": record["format"] + 1, "facts": {"unknown": 1}}, {"format": 0}, [1], 5):
        part.write_text(json.dumps(other))
        assert journal.read(["a.mp4"]) == {}, other
    part.write_text(json.dumps(record))
    assert journal.read(["a.mp4"]) == {"a.mp4": FACTS}


def test_a_journal_forgets_a_folder_in_which_a_picture_changed(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    picture = tmp_path / "clip" / "1.jpg"
    picture.write_text("x")
    journal = Journal(tmp_path / ".journal", str(tmp_path))
    journal.add(0, "clip", FACTS)
    assert list(journal.read(["clip"])) == ["clip"]
    before = picture.stat().st_mtime_ns
    with picture.open("r+") as file:  # in place: the folder's own state stays
        file.write("y")
    os.utime(picture, ns=(before + 1_000_000, before + 1_000_000))
    assert journal.read(["clip"]) == {}
    os.utime(picture, ns=(before, before))
    assert list(journal.read(["clip"])) == ["clip"]
    picture.write_text("xy")
    os.utime(picture, ns=(before, before))
    assert journal.read(["clip"]) == {}


# Indexing: from videos to rows.


def _indexed(listing: Listing, workers: int = 0) -> tuple[list[ManifestRow], list[LeftOut]]:
    paths = list(dict.fromkeys(row.path for row in listing.rows))
    found = spread(partial(examine, str(listing.root)), paths, workers)
    return index_clips(listing.rows, dict(zip(paths, found, strict=True)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders with three good videos and two that are none."""
    for name, num_frames in (("walk/b.mp4", 5), ("walk/a.mkv", 4), ("run/deep/c.avi", 3)):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(tmp_path / "set" / name, np.full((num_frames, 16, 32, 3), 90, np.uint8), 10)
    (tmp_path / "set" / "run" / "bad.mp4").write_text("no video at all")
    (tmp_path / "set" / "run" / "empty.mp4").touch()
    (tmp_path / "set" / "notes.txt").write_text("x")
    return tmp_path / "set"


@pytest.mark.parametrize("workers", [0, 2])
def test_class_folders_become_rows_with_what_decoding_found(folder: Path, workers: int) -> None:
    listing = list_videos(folder)
    rows, bad = _indexed(listing, workers)
    assert (listing.manifest.classes, listing.manifest.skipped) == (("run", "walk"), Counter({".txt": 1}))
    expected = [("run/deep/c.avi", 0, 3), ("walk/a.mkv", 1, 4), ("walk/b.mp4", 1, 5)]
    assert [(row.path, row.label, row.num_frames) for row in rows] == expected
    assert [error.path for _, error in bad] == ["run/bad.mp4", "run/empty.mp4"] and bad[1][1].reason == "is empty"
    digest = hashlib.sha256((folder / "walk/b.mp4").read_bytes()).hexdigest()
    assert rows[2] == ManifestRow("walk/b.mp4", 1, 5, 10.0, 32, 16, sha256=digest, duration=0.5, codec="h264")


def test_a_manifest_keeps_its_labels_groups_and_directions(tmp_path: Path, folder: Path) -> None:
    old = [
        ManifestRow("walk/b.mp4", "stroll", group="ann", reversed=True),
        ManifestRow("run/deep/c.avi", "dash", num_frames=99),
    ]
    write_manifest(tmp_path / "old.csv", old)
    (tmp_path / "classes.txt").write_text("dash\nstroll\n")
    listing = list_videos(tmp_path / "old.csv", root=folder)
    assert listing.manifest.classes == ("dash", "stroll")
    rows, _ = _indexed(listing)
    found = [(row.label, row.group, row.reversed, row.num_frames) for row in rows]
    assert found == [(1, "ann", True, 5), (0, None, False, 3)]


def test_videos_outside_class_folders_and_folders_without_any_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="must be a manifest, or have a sub-folder of videos for each class"):
        list_videos(tmp_path)
    for name in ("walk/a.mp4", "stray.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"stray\.mp4: each video must be in the folder of its class"):
        list_videos(tmp_path)


# What becomes of them.


def test_clips_are_sorted_into_good_ones_and_errors_each_once() -> None:
    found: dict[str, Finding] = dict.fromkeys("acd", FACTS) | {"f": DecodeError("f", "is empty")}
    rows = [ManifestRow(path, 0) for path in "ffacd"]
    # A video in both directions is not a copy of itself; of a file with a bad span the others are good.
    rows += [replace(rows[2], reversed=True), replace(rows[2], span=Span(8, 10)), replace(rows[2], span=Span(5))]
    good, bad = index_clips(rows, found)
    assert [(row.path, row.span) for row in good] == [(path, Span()) for path in "acda"] + [("a", Span(5))]
    outside = "a: has 9 frames, and the span 8:10 does not lie among them"
    assert [row.path for row, _ in bad if row] == ["f", "f", "a"]
    assert list(map(str, reasons(bad))) == ["f: is empty", outside]
    assert copies(good) == [("c", "a"), ("d", "a")]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(FACTS, sha256="cd" * 32), "has changed since it was indexed: its SHA-256 is not the manifest's"),
        (replace(FACTS, num_frames=8), "has 8 frames, but the manifest says 9"),
        (FACTS, None),
    ],
)
def test_a_scan_compares_the_files_with_the_manifest(tmp_path: Path, facts: VideoInfo, reason: str | None) -> None:
    """A clip that can be used stays as it is listed."""
    rows = [ManifestRow("a", 0, 9, sha256="ab" * 32), ManifestRow("b", 0)]
    write_manifest(tmp_path / "list.csv", rows)
    good, bad = scan_clips(list_videos(tmp_path / "list.csv"), {"a": facts, "b": facts})
    assert good == (rows if reason is None else rows[1:])
    assert [(error.path, error.reason) for _, error in bad] == ([] if reason is None else [("a", reason)])


@needs_clips
def test_every_codec_clip_is_indexed_as_ffprobe_found_it(tmp_path: Path) -> None:
    (tmp_path / "codecs").symlink_to(CLIPS / "codecs")
    with open(CLIPS / "codecs" / "codecs.csv", newline="") as file:
        wanted = {f"codecs/{row['file']}": row for row in csv.DictReader(file)}
    rows, bad = _indexed(list_videos(tmp_path))
    ((_, error),) = bad
    assert error.path == "codecs/40_corrupted.mp4" and "49 frames decoded" in error.reason
    assert {row.path for row in rows} | {error.path} == wanted.keys()
    for row in rows:
        known = wanted[row.path]
        stored = int(known["w"]), int(known["h"])
        upright = stored[::-1] if known["rot"] in ("90", "-90") else stored
        numerator, denominator = map(int, known["avg_fps"].split("/"))
        assert (row.num_frames, row.width, row.height) == (int(known["decoded"]), *upright), row.path
        assert row.fps == pytest.approx(numerator / denominator, abs=1e-6), row.path


@needs_clips
def test_the_weizmann_clips_have_the_frames_and_hashes_that_are_known() -> None:
    with open(CLIPS / "weizmann" / "clips.csv", newline="") as file:
        wanted = {row["path"]: (int(row["num_frames"]), row["sha256"]) for row in csv.DictReader(file)}
    listing = list_videos(CLIPS / "weizmann")
    assert listing.manifest.classes is not None and len(listing.manifest.classes) == 10
    rows, _ = _indexed(listing)
    assert {row.path: (row.num_frames, row.sha256) for row in rows} == wanted
