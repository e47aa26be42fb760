"""Names for what is written of videos, and the table."""

from __future__ import annotations

import os
from pathlib import Path

from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import Span
from summit_train.inference.cam.videos import maps_csv, output_names


def test_no_two_videos_have_one_name() -> None:
    paths = ["x/a.mp4", "y/a.mp4", "a_2.avi", "a.webm", "x/b.c.mp4", "clips/"]
    assert output_names(paths) == ["a", "a_2", "a_2_2", "a_3", "b.c", "clips"]


def test_long_and_odd_names_stay_file_names(tmp_path: Path) -> None:
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
