"""Lists with boxes: reading, what is refused, writing."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, read_manifest, write_manifest
from summit_train.data.manifest.reading import read_rows
from summit_train.data.video.source import DecodeError
from summit_train.tasks.detection.boxes import Boxes

HEADER = "video,frame,track,label,left,top,width,height"
BOX = "a.mp4,0,0,cat,1,2,3,4"


def _read(folder: Path, *rows: str, header: str = HEADER, classes: str = "cat\ndog\ncow\n") -> Manifest:
    (folder / "list.csv").write_text("\n".join([header, *rows, ""]))
    (folder / "classes.txt").write_text(classes)
    return read_manifest(folder / "list.csv")


def test_a_list_is_sorted_by_video_frame_and_track_and_keeps_its_lines(tmp_path: Path) -> None:
    rows = (
        "b.mp4,1,3,dog,1.5,2,10,20", '"c, d",,,,,,,', "a.mp4,2,0,cow,0,0,5,5", "b.mp4,0,4,cat,-2,3,4,5",
        "a.mp4,0,7,2,1,1,1,1", "b.mp4,1,2,1,0.25,0,1,1", "b.mp4,7,,,,,,",
    )  # fmt: skip
    manifest = _read(tmp_path, *rows)
    boxes = manifest.boxes
    assert isinstance(boxes, Boxes)
    assert [manifest.path(video) for video in range(3)] == ["b.mp4", "c, d", "a.mp4"]
    assert boxes.ends.tolist() == [0, 3, 3, 5] and boxes.lines.tolist() == [5, 7, 2, 6, 4]
    assert boxes.of(0)[["frame", "track", "label"]].tolist() == [(0, 4, 0), (1, 2, 1), (1, 3, 1)]
    assert boxes.of(0)["box"].tolist() == [[-2, 3, 2, 8], [0.25, 0, 1.25, 1], [1.5, 2, 11.5, 22]]
    assert [manifest.labels_of(video) for video in range(3)] == [(0, 1), (), (2,)]
    assert [manifest.place(video) for video in range(3)] == [f"{tmp_path}/list.csv:{line}" for line in (2, 3, 4)]
    assert manifest.class_names == ("cat", "dog", "cow")


def test_flags_and_facts_of_videos_are_columns_in_any_order(tmp_path: Path) -> None:
    names = "hidden,height,width,top,left,label,track,frame,video,ignore,num_frames,more"
    manifest = _read(
        tmp_path, ",,,,,,,,a.mp4,,9,", "1,4,3,2,1,0,0,8,a.mp4,,,x", "no,4,3,2,1,1,1,8,a.mp4,1,9,", header=names
    )
    assert isinstance(manifest.boxes, Boxes) and manifest.num_frames(0) == 9
    assert manifest.boxes.of(0)[["hidden", "ignored"]].tolist() == [(True, False), (False, True)]
    assert manifest.boxes.of(0)["box"].tolist() == [[1, 2, 4, 6]] * 2
    assert manifest.labels_of(0) == (0,)  # that of the ignored box does not count


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("a.mp4,0,0,cat,nan,2,3,4", "left must be a number of pixels, got 'nan'"),
        ("a.mp4,0,0,cat,1,inf,3,4", "top must be a number of pixels, got 'inf'"),
        ("a.mp4,0,0,cat,1_0,2,3,4", "left must be a number of pixels, got '1_0'"),
        ("a.mp4,0,\N{FULLWIDTH DIGIT ONE},cat,1,2,3,4", "track must be a whole number from 0 on, got "),
        ("a.mp4,0,0,cat,1,2,x,4", "width must be a number of pixels above 0, got 'x'"),
        ("a.mp4,0,0,cat,1,2,0,4", "width must be a number of pixels above 0, got '0'"),
        ("a.mp4,0,0,cat,1,2,3,-4", "height must be a number of pixels above 0, got '-4'"),
        ("a.mp4,0,0,cat,1,2,3,1e7", "height must be a number of pixels above 0, got '1e7'"),
        ("a.mp4,-1,0,cat,1,2,3,4", "frame must be a whole number from 0 on, got '-1'"),
        ("a.mp4,-1,,,,,,", "frame must be a whole number from 0 on, got '-1'"),
        ("a.mp4,1.5,0,cat,1,2,3,4", "frame must be a whole number from 0 on, got '1.5'"),
        ("a.mp4,,0,cat,1,2,3,4", "frame must be a whole number from 0 on, got ''"),
        ("a.mp4,0,x,cat,1,2,3,4", "track must be a whole number from 0 on, got 'x'"),
        ("a.mp4,0,4294967296,cat,1,2,3,4", "track must be a whole number from 0 on, got '4294967296'"),
        ("a.mp4,0,0,cta,1,2,3,4", "label must be one of the 3 classes in classes.txt, got 'cta': did you mean 'cat'?"),
        ("a.mp4,0,0,3,1,2,3,4", "label must be from 0 to 2, as classes.txt has 3 classes, got 3"),
        ("a.mp4,0,0,cat,1,,3,4", "must have all cells of a box, or none"),
        ("a.mp4,0,0,cat,1,2,3", "must have 8 cells, as the header has, got 7; put a path with a comma in"),
        (",0,0,cat,1,2,3,4", "path must name a video or a folder of pictures, got an empty cell"),
        (BOX.replace("4,0,0", "4,5,1"), "track 1 already has a box in frame 5, in line 3"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_with_its_line(tmp_path: Path, row: str, wrong: str) -> None:
    with pytest.raises(UserError) as raised:
        _read(tmp_path, BOX, "a.mp4,5,1,dog,1,2,3,4", row)
    assert str(raised.value).startswith(f"{tmp_path}/list.csv:4: {wrong}")


@pytest.mark.parametrize(
    ("names", "rows", "wrong"),
    [
        (HEADER.replace(",track", ""), [BOX], "1: the header must have one column 'track', got video,"),
        (f"{HEADER},ignored", [f"{BOX},1"], "1: unknown column 'ignored': did you mean 'ignore'?"),
        (HEADER, ["a.mp4,0,0,cat,999999,2,0.001,4"], "2: width or height is too small for a box"),
        (f"{HEADER},ignore", [f"{BOX},2"], "2: ignore must be 0 or 1, got '2'"),
        (f"{HEADER},num_frames", [f"{BOX},3", f"{BOX},4"], "3: num_frames must be 3 as in the rows before, got 4"),
        (f"{HEADER},num_frames", [f"{BOX},0"], "2: num_frames must be a positive integer, or empty, got '0'"),
        (f"{HEADER},num_frames", [f"{BOX},2", "a.mp4,2,0,cat,1,2,3,4,"], "3: frame 2 must be below num_frames, 2"),
        (HEADER, [], " must have a clip, got none"),
    ],
)  # fmt: skip
def test_a_wrong_header_or_fact_is_refused(tmp_path: Path, names: str, rows: list[str], wrong: str) -> None:
    with pytest.raises(UserError) as raised:
        _read(tmp_path, *rows, header=names)
    assert str(raised.value).startswith(f"{tmp_path}/list.csv:{wrong}")


def test_boxes_are_part_of_the_fingerprint_and_of_the_pickled_list(tmp_path: Path) -> None:
    first = _read(tmp_path, BOX)
    assert pickle.loads(pickle.dumps(first)).fingerprint() == first.fingerprint()
    changed = [BOX.replace(cells, others) for cells, others in (("3,4", "3,5"), ("0,0", "1,0"), ("0,0", "0,1"))]
    found = {_read(tmp_path, row).fingerprint() for row in (*changed, f"{BOX}\na.mp4,1,0,cat,1,2,3,4")}
    assert len(found) == 4 and first.fingerprint() not in found
    assert _read(tmp_path, BOX, "a.mp4,4,,,,,,").fingerprint() == first.fingerprint()  # no other boxes


def test_a_list_that_was_written_is_read_again(tmp_path: Path) -> None:
    header = f"{HEADER},ignore,hidden,num_frames,sha256"
    manifest = _read(
        tmp_path, f"b.mp4,,,,,,,,,,7,{'ab' * 32}", "b.mp4,3,1,dog,0.1,20.125,3.3,4,1,0,,", "empty,,,,,,,,,,12,",
        "a.mp4,0,0,cow,-1,2,123.456,4,0,1,,", header=header,
    )  # fmt: skip
    (tmp_path / "again").mkdir()
    write_manifest(tmp_path / "again" / "list.csv", read_rows(manifest.source)[1])
    again = read_manifest(tmp_path / "again" / "list.csv")
    assert isinstance(again.boxes, Boxes) and isinstance(manifest.boxes, Boxes)
    np.testing.assert_allclose(again.boxes.rows["box"], manifest.boxes.rows["box"], atol=1e-3)
    names = ["frame", "track", "label", "ignored", "hidden"]
    assert again.boxes.rows[names].tolist() == manifest.boxes.rows[names].tolist()
    assert again.boxes.ends.tolist() == manifest.boxes.ends.tolist() == [0, 1, 1, 2]
    assert again.frame_counts.tolist() == [7, 12, -1] and again.sha256(0) == bytes.fromhex("ab" * 32)
    assert (tmp_path / "again" / "list.csv").read_text().splitlines() == [
        header, f"b.mp4,,,,,,,,,,7,{'ab' * 32}", "b.mp4,3,1,1,0.1,20.125,3.3,4,1,0,,", "empty,,,,,,,,,,12,",
        "a.mp4,,,,,,,,,,,", "a.mp4,0,0,2,-1,2,123.456,4,0,1,,",
    ]  # fmt: skip


def test_a_box_that_is_not_in_its_video_is_named(tmp_path: Path) -> None:
    rows = (BOX, "a.mp4,5,0,cat,19.5,2,30,4", "a.mp4,6,0,cat,20,2,30,4", "a.mp4,7,0,cat,0,-4,3,4")
    boxes = _read(tmp_path, *rows).boxes
    assert boxes is not None
    box = "its box of track 0 in frame {} ({}/list.csv:{}) {}"
    outside, more = "lies outside the frame of {} x 10: {}", "; 2 boxes are wrong"
    wrong = [
        ((8, 21, 10), (7, tmp_path, 5, outside.format(21, "0, -4 to 3, 0"))),
        ((8, 20, 10), (6, tmp_path, 4, outside.format(20, "20, 2 to 50, 6") + more)),
        ((6, 21, 10), (6, tmp_path, 4, "has no frame: the video has 6, numbered from 0" + more)),
    ]
    for video, what in wrong:
        with pytest.raises(DecodeError) as raised:
            boxes.check(0, "a.mp4", *video)
        assert (raised.value.path, raised.value.reason) == ("a.mp4", box.format(*what))
    _read(tmp_path, BOX).boxes.check(0, "a.mp4", 1, 2, 3)  # type: ignore[union-attr]
    with pytest.raises(DecodeError, match="-3, 2 to 0, 6"):
        _read(tmp_path, "a.mp4,0,0,cat,-3,2,3,4").boxes.check(0, "a.mp4", 1, 9, 9)  # type: ignore[union-attr]


def test_boxes_are_drawn_at_their_places_in_the_scaled_frames(tmp_path: Path) -> None:
    """In the third of three frames, half as large, one box has the colour of its class, an ignored one none."""
    boxes, nothing = _read(tmp_path, BOX).boxes, np.zeros((0, 5), np.float32)
    targets = [nothing, nothing, np.array([[20, 40, 60, 80, 0], [100, 100, 140, 140, -2]], np.float32)]
    assert boxes is not None
    first, last = boxes.drawn(np.zeros((2, 80, 80, 3), np.uint8), targets, [0, 2], 0.5)
    rows, columns = np.nonzero(last.any(-1))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 39, 10, 29) and not first.any()
    assert not last[25:35, 15:25].any() and (last[20, 10:30] == last[20, 10]).all()
