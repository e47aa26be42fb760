"""ImageNet VID, DET and MOTChallenge as lists with boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from summit_train.core.errors import UserError
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.manifest.importers import KINDS
from summit_train.tasks.detection.boxes import Boxes
from summit_train.tasks.detection.importers import VID_CLASSES, LabelledPictures, read_mot, read_vid
from tests.data.packed.conftest import all_frames
from tests.worlds import Say

TUD = Path(__file__).parents[4] / "shared" / "data" / "mot"
OBJECT = """<object><trackid>{}</trackid><name>{}</name><bndbox><xmax>{}</xmax><xmin>{}</xmin><ymax>{}</ymax>
<ymin>{}</ymin></bndbox><occluded>{}</occluded><generated>0</generated></object>"""


def _pictures(folder: Path, *names: str, size: tuple[int, int] = (40, 30)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.fromarray(np.full((*size[::-1], 3), 40 * number, np.uint8)).save(folder / name, "JPEG")


def _annotation(path: Path, *objects: str, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    about = f"<size><width>{width}</width><height>{height}</height></size>"
    path.write_text(f"<annotation><folder>x</folder>{about}{''.join(objects)}</annotation>\n")


def _vid(folder: Path) -> Path:
    """A snippet of three frames, and two pictures of DET, of which one has no object of the classes."""
    pictures, notes = folder / "Data", folder / "Annotations"
    _pictures(pictures / "VID" / "train" / "a" / "v0", "000000.JPEG", "000001.JPEG", "000002.JPEG")
    note = notes / "VID" / "train" / "a" / "v0"
    fox, whale = ("n02118333", "n02062744")
    _annotation(note / "000000.xml", OBJECT.format(3, fox, 19, 10, 29, 5, 0), OBJECT.format(1, whale, 4, 0, 4, 0, 1))
    _annotation(note / "000001.xml")
    _annotation(note / "000002.xml", OBJECT.format(3, fox, 39, 11, 29, 5, 0))
    _pictures(pictures / "DET" / "train", "n1_10.JPEG", "n1_12.JPEG")
    for name, synset in (("n1_10", whale), ("n1_12", "n00007846")):
        item = OBJECT.format(0, synset, 9, 0, 9, 0, 0).replace("<trackid>0</trackid>", "")
        _annotation(notes / "DET" / "train" / f"{name}.xml", item, item)
    return pictures


def _rows(found: LabelledPictures, root: Path) -> list[ManifestRow]:
    rows = list(found.located(str(root)))
    assert all(isinstance(row, ManifestRow) for row in rows), rows
    return [row for row in rows if isinstance(row, ManifestRow)]


def test_a_snippet_of_vid_has_its_tracks_and_its_empty_frames(tmp_path: Path) -> None:
    data = _vid(tmp_path)
    (row,) = _rows(read_vid(data / "VID" / "train"), data)
    assert (row.path, row.num_frames) == ("VID/train/a/v0", 3) and isinstance(row.boxes, Boxes)
    fox, whale = (list(VID_CLASSES.values()).index(name) for name in ("fox", "whale"))
    names = ["frame", "track", "label", "ignored", "hidden"]
    assert row.boxes.rows[names].tolist() == [
        (0, 1, whale, False, True), (0, 3, fox, False, False), (2, 3, fox, False, False),
    ]  # fmt: skip
    # Both ends belong to a box.
    assert row.boxes.rows["box"].tolist() == [[0, 0, 5, 5], [10, 5, 20, 30], [11, 5, 40, 30]]


def test_the_command_imports_pictures_of_det_as_videos_of_one_frame(tmp_path: Path, say: Say) -> None:
    data, out = _vid(tmp_path), tmp_path / "lists" / "det.csv"
    out.parent.mkdir()
    status, printed, _ = say("data", "import", "vid", data / "DET" / "train", "--root", data, "--out", out)
    assert status == 0 and "2 clips listed, 30 classes: 1 found" in printed
    assert "DET/train/n1_12.JPEG: has no object of the 30 classes" in printed
    manifest = read_manifest(out)
    assert (manifest.path(0), manifest.num_frames(0), manifest.classes) == (
        "DET/train/n1_10.JPEG", 1, tuple(VID_CLASSES.values()),
    )  # fmt: skip
    assert isinstance(manifest.boxes, Boxes) and manifest.boxes.of(0)["track"].tolist() == [0, 1]
    assert all_frames(FileStore(manifest, str(data)), 0).shape == (1, 30, 40, 3)
    status, printed, _ = say("data", "scan", out, "--root", data, "--out", out.parent / "bad.csv", "--workers", 0)
    assert status == 0 and "1 video decoded, 0 bad" in printed


BOMB = '<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;">]><annotation><folder>&c;</folder></annotation>'
OUTSIDE = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation><folder>&b;</folder></annotation>'
FOX = OBJECT.format(3, "n02118333", "{}", 10, 20, 5, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (BOMB.encode(), "must be plain XML without a document type"),
        (OUTSIDE.encode(), "must be plain XML without a document type"),
        (BOMB.encode("utf-16"), "must be plain XML without a document type"),
        (b"<annotation><size></annotation>", "is not XML: mismatched tag: line 1"),
        (b'<?xml version="1.0" encoding="nonsense-7"?><annotation/>', "is not XML: unknown encoding"),
        (FOX.format(19).replace("<trackid>3", "<trackid>99999999999"), "from 0 to 2147483647, got 99999999999"),
        (FOX.format(19).replace("<xmin>10", "<xmin>-1e40"), "width and height of a box must be above 0"),
        (b"<annotation/>", "invalid number: '' is not an integer"),
        (FOX.format("x"), "invalid number: 'x' is not a number"),
        (FOX.format("nan"), "invalid number: 'nan' is not a number"),
        (FOX.format(9), "width and height of a box must be above 0"),
        (FOX.format(19) * 2, "track 3 already has a box in frame 1"),
        (FOX.format(60).replace("<xmin>10", "<xmin>40"), "its box of track 3 in frame 1 lies outside the frame of 40"),
        (None, "has 3 frames, which do not match its 2 annotations"),
        ((41, 30), "says 41 x 30 pixels, but the frame has 40 x 30"),
    ],
)  # fmt: skip
def test_a_wrong_annotation_leaves_its_snippet_out(tmp_path: Path, content: object, reason: str) -> None:
    data = _vid(tmp_path)
    path = tmp_path / "Annotations" / "VID" / "train" / "a" / "v0" / "000001.xml"
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, tuple):
        _annotation(path, size=content)
    else:
        _annotation(path, str(content))
    (error,) = read_vid(data / "VID" / "train").located(str(data))
    assert not isinstance(error, ManifestRow) and error.path == "VID/train/a/v0" and reason in error.reason


def test_a_source_without_annotations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Data" / "x").mkdir(parents=True)
    with pytest.raises(UserError, match="must be a folder below Data"):
        read_vid(tmp_path)
    with pytest.raises(UserError, match=r"Annotations/x: must have the annotations of .*Data/x; has no XML file"):
        read_vid(tmp_path / "Data" / "x")
    with pytest.raises(UserError, match="must have sequences with img1/ and gt/gt"):
        read_mot(tmp_path)
    assert {"vid", "mot"} <= set(KINDS)


MOT = """1,4,-2.5,11,12,13,1,1,1
2,4,3,11,12,13,0,1,0.24
2,5,3,11,12,13,0,8,0.25
2,6,3,11,12,13,1,3,1
"""
INFO = "[Sequence]\nname=s\nseqLength=3\nimWidth=40\nimHeight=30\n"


def _mot(folder: Path, text: str, info: str = INFO) -> Path:
    _pictures(folder / "s" / "img1", "000001.jpg", "000002.jpg", "000003.jpg")
    (folder / "s" / "gt").mkdir()
    (folder / "s" / "gt" / "gt.txt").write_text(text)
    (folder / "s" / "seqinfo.ini").write_text(info)
    return folder


def test_mot_counts_from_1_and_ignores_what_looks_like_a_person(tmp_path: Path) -> None:
    (row,) = _rows(read_mot(_mot(tmp_path, MOT)), tmp_path)
    assert (row.path, row.num_frames) == ("s/img1", 3) and isinstance(row.boxes, Boxes)
    names = ["frame", "track", "label", "ignored", "hidden"]
    assert row.boxes.rows[names].tolist() == [
        (0, 4, 0, False, False), (1, 4, 0, True, True), (1, 5, 0, True, False),
    ]  # fmt: skip
    assert row.boxes.rows["box"][:2].tolist() == [[-3.5, 10, 8.5, 23], [2, 10, 14, 23]]
    # The older sets have no class: their last three columns are places in the world.
    older = _mot(tmp_path / "older", "1,4,3,11,12,13,-1\n1,5,3,11,12,13,1,-7,0.1,8\n", "")
    (row,) = _rows(read_mot(older / "s"), older / "s")
    assert row.path == "img1" and isinstance(row.boxes, Boxes)
    assert row.boxes.rows[names].tolist() == [(0, 4, 0, False, False), (0, 5, 0, False, False)]


@pytest.mark.parametrize(
    ("text", "info", "reason"),
    [
        ("1,4,3,1,2,3,1\n0,4,3,1,2,3,1\n", "", "gt.txt:2: must be frame,id,left,top,width,height,flag, ..., got '0,4,"),
        ("1,4,3,x,12,13,1\n", "", "gt.txt:1: must be frame,id,left,top,width,height,flag, ..., got '1,4,3,x"),
        *(
            (f"{row}\n", "", "gt.txt:1: must be frame,id,left,top,width,height,flag, ..., got '1,")
            for row in ("1,4,3,1,2,3,nan", "1,4,3,1,2,3,1,nan,1", "1,4,3,1,2,3,1,1,nan", "1,4,3,1_0,2,3,1",
                        "1,4,\N{FULLWIDTH DIGIT THREE},1,2,3,1", f"1,4,{'1' * 1_000_000}x,1,2,3,1")
        ),
        ("1,4,3\n", "", "gt.txt:1: must be frame,id,left,top,width,height,flag, ..., got '1,4,3'"),
        ("1,4,3,11,0,13,1\n", "", "gt.txt:1: width and height of a box must be above 0"),
        ("1,-1,3,11,12,13,1\n", "", "gt.txt:1: a track must be a number from 0 to 2147483647, got -1"),
        ("4,4,3,11,12,13,1\n", "", "its box of track 4 in frame 3 has no frame: the video has 3, numbered from 0"),
        ("1,4,41,11,12,13,1\n", "", "its box of track 4 in frame 0 lies outside the frame of 40 x 30: 40, 10"),
        (MOT, INFO.replace("3", "4"), "has frames, width and height [3, 40, 30], but seqinfo.ini says [4, 40, 40]"),
        (MOT, "seqLength=3", "its seqinfo.ini is wrong: File contains no section headers"),
    ],
)  # fmt: skip
def test_a_wrong_sequence_of_mot_is_left_out(tmp_path: Path, text: str, info: str, reason: str) -> None:
    (error,) = read_mot(_mot(tmp_path, text, info)).located(str(tmp_path))
    assert not isinstance(error, ManifestRow) and error.path == "s/img1" and reason in error.reason


@pytest.mark.skipif(not TUD.is_dir(), reason="the real sequence in ../shared/data/mot is not here")
def test_a_real_sequence(tmp_path: Path) -> None:
    rows = _rows(read_mot(TUD), TUD)
    write_manifest(tmp_path / "list.csv", rows)
    manifest = read_manifest(tmp_path / "list.csv")
    assert isinstance(manifest.boxes, Boxes)
    assert (len(manifest.boxes.rows), manifest.num_frames(0)) == (359, 71)
    assert manifest.boxes.rows["box"][0].tolist() == [398, 181, 519, 410]
