"""A clip in words, in order, and as its manifest stores it."""

from __future__ import annotations

import os
from pathlib import Path

from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import WHOLE, Span


def test_a_clip_in_words() -> None:
    clip = Clip(os.fsdecode(b"\xff.mp4"), Span(3, 7), is_reversed=True)
    assert str(clip) == "\\udcff.mp4 3:7 backwards" and str(Clip("a.mp4", Span(3))) == "a.mp4 3:"
    assert clip.values() == {"path": "\udcff.mp4", "reversed": True, "start_frame": 3, "end_frame": 7}
    assert Clip("a.mp4").values() == {"path": "a.mp4"}


def test_clips_are_sorted_by_path_then_frames_then_direction() -> None:
    clips = [Clip("a"), Clip("a", is_reversed=True), Clip("a", Span(2, 4)), Clip("a", Span(9, 3)), Clip("b")]
    assert sorted([clips[i] for i in (3, 4, 0, 2, 1)]) == clips


def test_a_clip_of_class_folders_has_the_path_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "set/hop").mkdir(parents=True)
    (tmp_path / "set/hop/x.mp4").touch()
    (tmp_path / "list.csv").write_text("path,label,start_frame,end_frame,reversed\nhop/x.mp4,0,,,0\nhop/x.mp4,0,3,,1\n")
    folders, listed = read_manifest(tmp_path / "set"), read_manifest(tmp_path / "list.csv")
    assert folders.stored_path(0) == listed.stored_path(0) == "hop/x.mp4" and folders.span(0) == listed.span(0) == WHOLE
    assert (listed.span(1), listed.is_reversed(0), listed.is_reversed(1)) == (Span(3), False, True)
