"""A clip in words, in order, and as its manifest stores it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from summit_train.core.text import csv_text
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.span import Span


def test_a_clip_in_words() -> None:
    clip = Clip(os.fsdecode(b"\xff.mp4"), Span(3, 7), is_reversed=True)
    assert str(clip) == "\\udcff.mp4 3:7 backwards" and str(Clip("a.mp4", Span(3))) == "a.mp4 3:"
    assert clip.values() == {"path": "\udcff.mp4", "reversed": True, "start_frame": 3, "end_frame": 7}
    assert Clip("a.mp4").values() == {"path": "a.mp4"}
    clip = replace(clip, path="a", region=Region(0, 1, 8, 6))
    assert str(clip) == "a 3:7 (8 x 6 pixels at 0, 1) backwards"
    assert clip.values() == {
        "path": "a", "reversed": True, "start_frame": 3, "end_frame": 7, "left": 0, "top": 1, "width": 8, "height": 6
    }  # fmt: skip


def test_clips_are_sorted_by_path_then_frames_then_direction_then_region() -> None:
    clips = [Clip("a"), Clip("a", is_reversed=True), Clip("a", Span(2, 4)), Clip("a", Span(9, 3)), Clip("b")]
    clips.insert(1, Clip("a", region=Region(0, 0, 8, 8)))
    assert sorted([clips[i] for i in (3, 4, 0, 5, 2, 1)]) == clips


def test_a_table_of_clips_is_a_manifest_of_them(tmp_path: Path) -> None:
    clips = [Clip("a", Span(3)), Clip("a", region=Region(0, 1, 8, 6)), Clip("a", Span(1, 3), True, WHOLE_FRAME)]
    rows = zip(clip_columns(clips), ["label", 0, 1, 2], strict=True)
    (tmp_path / "list.csv").write_text(csv_text((*row, label) for row, label in rows))
    listed = read_manifest(tmp_path / "list.csv", "columns")
    assert [listed.clip(number) for number in range(3)] == clips
    assert clip_columns([Clip("a")]) == [("path",), ("a",)]


def test_a_clip_of_class_folders_has_the_path_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "set/hop").mkdir(parents=True)
    (tmp_path / "set/hop/x.mp4").touch()
    (tmp_path / "list.csv").write_text("path,label,start_frame,end_frame,reversed\nhop/x.mp4,0,,,0\nhop/x.mp4,0,3,,1\n")
    folders, listed = read_manifest(tmp_path / "set"), read_manifest(tmp_path / "list.csv")
    assert folders.clip(0).path == listed.clip(0).path == "hop/x.mp4"
    assert folders.clip(0) == listed.clip(0) and listed.clip(1) == Clip("hop/x.mp4", Span(3), is_reversed=True)
