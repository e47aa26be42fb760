"""Importers on small files in the formats that the data sets come with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from av.video.frame import VideoFrame

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import ManifestRow, read_manifest
from summit_train.data.manifest.importers import KINDS, Annotations, Request, locate
from summit_train.data.manifest.quarantine import read_quarantine
from summit_train.data.video.augment import View
from summit_train.spec import DataSpec
from tests.data.clips import stored_clip


@pytest.fixture
def touch(tmp_path: Path) -> Callable[..., Path]:
    """Makes empty files below a folder `set`, and returns that folder."""

    def make(*names: str) -> Path:
        for name in names:
            path = tmp_path / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path / "set"

    return make


def _frames(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(1, count + 1):
        picture = np.full((16, 24, 3), 10 * number, np.uint8)
        VideoFrame.from_ndarray(picture, "rgb24").save(str(folder / f"{number:05}.jpg"))


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _read(kind: str, source: Path, **more: Any) -> Annotations:
    return KINDS[kind][0](Request(source, **more))


def _located(annotations: Annotations, root: Path) -> list[tuple[str, int] | str]:
    """(path, label) of what is found, the message of what is not."""
    found = locate(annotations, str(root))
    return [(row.path, int(row.label)) if isinstance(row, ManifestRow) else str(row) for row in found]


# Kinetics.

KINETICS = """label,youtube_id,time_start,time_end,split
testifying,---QUuC4vJs,84,94,train
eating spaghetti,--3ouPhoy2A,20,30,train
dribbling basketball,-0-4ddpTiA8,2,12,train
eating spaghetti,twice,0,10,train
eating spaghetti,twice,30,40,train
testifying,gone_000000_x,7,17,train
"""


def test_kinetics_as_downloaders_name_the_files(tmp_path: Path, touch: Callable[..., Path]) -> None:
    root = touch(
        "---QUuC4vJs_000084_000094.mp4",
        "eating_spaghetti/--3ouPhoy2A.mkv",
        "train/-0-4ddpTiA8_000002_000012.mp4",
        "twice_000030_000040.mp4",
        "twice.mp4",  # of which of the two clips?
        "notes.txt",
    )
    annotations = _read("kinetics", _written(tmp_path / "train.csv", KINETICS))
    assert annotations.classes == ("dribbling basketball", "eating spaghetti", "testifying")
    assert _located(annotations, root) == [
        ("---QUuC4vJs_000084_000094.mp4", 2),
        ("eating_spaghetti/--3ouPhoy2A.mkv", 1),
        ("train/-0-4ddpTiA8_000002_000012.mp4", 0),
        "twice_000000_000010: No such file or directory",
        ("twice_000030_000040.mp4", 1),
        "gone_000000_x_000007_000017: No such file or directory",
    ]


def test_kinetics_600_and_700_have_the_same_columns_and_more(tmp_path: Path, touch: Callable[..., Path]) -> None:
    text = 'label,youtube_id,time_start,time_end,split,is_cc\n"a, b",x,0.0,10.0,validate,0\n'
    annotations = _read("kinetics", _written(tmp_path / "val.csv", text), classes=("a, b", "c"))
    assert annotations.classes == ("a, b", "c")
    assert _located(annotations, touch("x_000000_000010.mp4")) == [("x_000000_000010.mp4", 0)]


def test_a_clip_that_is_there_twice_is_not_guessed(tmp_path: Path, touch: Callable[..., Path]) -> None:
    text = "label,youtube_id,time_start,time_end,split\na,x,0,10,train\n"
    annotations = _read("kinetics", _written(tmp_path / "train.csv", text))
    [found] = _located(annotations, touch("a/x_000000_000010.mp4", "b/x_000000_000010.mp4"))
    assert "is there more than once" in str(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("youtube_id,time_start,time_end,split\nx,0,10,test\n", "train.csv:1: must have the columns label"),
        (
            "label,youtube_id,time_start,time_end,split\n,x,0,10,test\n",
            "train.csv:2: must have a youtube_id and a label",
        ),
        ("label,youtube_id,time_start,time_end,split\na,x,zero,10,train\n", "train.csv:2: time_start and time_end"),
        ("label,youtube_id,time_start,time_end,split\na,x\n", "train.csv:2: fewer fields"),
    ],
)
def test_a_kinetics_csv_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        _read("kinetics", _written(tmp_path / "train.csv", text))


# UCF101 and HMDB51.


def test_ucf101(tmp_path: Path, touch: Callable[..., Path]) -> None:
    _written(tmp_path / "classInd.txt", "1 ApplyEyeMakeup\n2 Archery\n")
    train = "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1\nArchery/v_Archery_g09_c02.avi 2\n"
    test = "Archery/v_Archery_g01_c01.avi\r\nArchery/v_Archery_g01_c02.avi\r\n"
    root = touch("ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi", "Archery/v_Archery_g01_c02.avi")
    annotations = _read("ucf101", _written(tmp_path / "trainlist01.txt", train))
    assert [clip.group for clip in annotations.clips] == ["ApplyEyeMakeup_g08", "Archery_g09"]
    assert _located(annotations, root) == [
        ("ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi", 0),
        "Archery/v_Archery_g09_c02.avi: No such file or directory",
    ]
    annotations = _read("ucf101", _written(tmp_path / "testlist01.txt", test))
    assert _located(annotations, root)[1] == ("Archery/v_Archery_g01_c02.avi", 1)
    with pytest.raises(UserError, match=r"trainlist01\.txt:1: 2 is not the number of ApplyEyeMakeup"):
        _read("ucf101", _written(tmp_path / "trainlist01.txt", train.replace("avi 1", "avi 2")))


def test_hmdb51(tmp_path: Path, touch: Callable[..., Path]) -> None:
    lists = tmp_path / "splits"
    lists.mkdir()
    _written(lists / "brush_hair_test_split1.txt", "a_brush.avi 1 \nb_brush.avi 2 \nc_brush.avi 0 \n")
    _written(lists / "wave_test_split1.txt", "d#wave.avi 1 \n")
    _written(lists / "wave_test_split2.txt", "d#wave.avi 2 \n")
    root = touch("brush_hair/a_brush.avi", "brush_hair/b_brush.avi", "d#wave.avi")
    annotations = _read("hmdb51", lists, split=1, part="train")
    assert annotations.classes == ("brush_hair", "wave")
    assert _located(annotations, root) == [("brush_hair/a_brush.avi", 0), ("d#wave.avi", 1)]
    assert _located(_read("hmdb51", lists, split=1, part="test"), root) == [("brush_hair/b_brush.avi", 0)]
    with pytest.raises(UserError, match=r"has no CLASS_test_split3\.txt"):
        _read("hmdb51", lists, split=3, part="train")


# Something-Something and Jester.


def test_something_v1_and_jester_are_folders_of_pictures(tmp_path: Path) -> None:
    _frames(tmp_path / "set" / "100218", 5)
    _frames(tmp_path / "set" / "24413", 7)
    _frames(tmp_path / "set" / "7", 3)
    (tmp_path / "set" / "7" / "00002.jpg").unlink()
    labels = _written(tmp_path / "labels.csv", "Holding something\nSomething falling like a feather or paper\n")
    text = "100218;Something falling like a feather or paper\n24413;Holding something\n"
    text += "7;Holding something\n9;Holding something\n"
    annotations = _read("something_v1", _written(tmp_path / "train.csv", text), labels=labels)
    found = list(locate(annotations, str(tmp_path / "set")))
    assert found[:2] == [ManifestRow("100218", 1, 5), ManifestRow("24413", 0, 7)]
    assert [str(error) for error in found[2:]] == [
        "7: the frame before 00003.jpg is missing, or there twice",
        "9: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("100218\n", "train.csv:1: must be ID;label"),
        ("1;Waving\n", "train.csv:1: the label 'Waving' is not one of the 1 classes"),
    ],
)
def test_a_something_csv_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    labels = _written(tmp_path / "labels.csv", "Holding something\n")
    with pytest.raises(UserError, match=reason):
        _read("something_v1", _written(tmp_path / "train.csv", text), labels=labels)
    with pytest.raises(UserError, match="by --labels"):
        _read("something_v1", tmp_path / "train.csv")


def test_something_v2(tmp_path: Path, touch: Callable[..., Path]) -> None:
    labels = {"Holding something next to something": "1", "Approaching something with your camera": "0"}
    clips = [
        {
            "id": "78687",
            "label": "holding potato next to vicks vaporub bottle",
            "template": "Holding [something] next to [something]",
            "placeholders": ["potato", "vicks vaporub bottle"],
        },
        {"id": "4", "label": "x", "template": "Approaching [something] with your camera", "placeholders": ["x"]},
    ]
    label_path = _written(tmp_path / "labels.json", json.dumps(labels))
    train = _written(tmp_path / "train.json", json.dumps(clips))
    annotations = _read("something_v2", train, labels=label_path)
    assert annotations.classes == ("Approaching something with your camera", "Holding something next to something")
    assert _located(annotations, touch("78687.webm")) == [("78687.webm", 1), "4.webm: No such file or directory"]
    for text, reason in (
        ('[{"id": "1"}]', "entry 0 has no id and template"),
        ('{"id": 1}', "must be a JSON list"),
        ("[", "is not JSON"),
        ('[{"id": "1", "template": "Waving"}]', "the label 'Waving' is not one of the 2 classes"),
    ):
        with pytest.raises(UserError, match=reason):
            _read("something_v2", _written(train, text), labels=label_path)
    with pytest.raises(UserError, match="the numbers 0 to 1, each once"):
        _read("something_v2", train, labels=_written(label_path, '{"a": "0", "b": "2"}'))


# Folders and lists.


def test_class_folders_of_videos_and_of_pictures(tmp_path: Path, touch: Callable[..., Path]) -> None:
    root = touch("run/a.mp4", "run/.hidden.mp4", "walk/notes.txt")
    _frames(root / "walk" / "clip", 4)
    annotations = _read("folders", root)
    assert list(locate(annotations, str(root))) == [ManifestRow("run/a.mp4", 0), ManifestRow("walk/clip", 1, 4)]


def test_folders_of_flow_count_their_fields(tmp_path: Path) -> None:
    for name, numbers in (("walk/whole", "1122"), ("walk/uneven", "112")):
        (tmp_path / name).mkdir(parents=True)
        for axis, number in zip("xyxy", numbers, strict=False):
            (tmp_path / name / f"flow_{axis}_0000{number}.jpg").touch()
    uneven, whole = locate(_read("folders", tmp_path), str(tmp_path))
    assert whole == ManifestRow("walk/whole", 0, 2)
    assert "holds 2 pictures flow_x_*.jpg and 1 pictures flow_y_*.jpg: number 2 is only in one" in str(uneven)


def test_lists(tmp_path: Path, touch: Callable[..., Path]) -> None:
    root = touch("a b.mp4", "c.mp4")
    _frames(root / "frames", 4)
    source = _written(tmp_path / "list.txt", "a b.mp4 2\nc.mp4 99 0\nframes 4 1\n")
    found = list(locate(_read("list", source), str(root)))
    assert found == [ManifestRow("a b.mp4", 2), ManifestRow("c.mp4", 0), ManifestRow("frames", 1, 4)]
    named = _read("list", _written(source, "c.mp4 walk\n"), classes=("run", "walk"))
    assert list(locate(named, str(root))) == [ManifestRow("c.mp4", 1)]
    with pytest.raises(UserError, match=r"list\.txt:1: label 'walk' must be a number"):
        _read("list", source)


# The command.


def test_a_set_is_imported_split_by_split_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jester, from its own files to frames in memory."""
    for clip in ("1", "2", "3"):
        _frames(tmp_path / "20bn-jester-v1" / clip, 4)
    labels = _written(tmp_path / "jester-v1-labels.csv", "Swiping Left\nSwiping Right\n")
    train = _written(tmp_path / "jester-v1-train.csv", "1;Swiping Right\n2;Swiping Left\n8;Swiping Left\n")
    val = _written(tmp_path / "jester-v1-validation.csv", "3;Swiping Right\n")
    root = tmp_path / "20bn-jester-v1"
    for source, name in ((train, "train.csv"), (val, "val.csv")):
        words = ["--root", str(root), "--labels", str(labels), "--out", str(tmp_path / name)]
        assert main(["data", "import", "jester", str(source), *words]) == 0
    printed = capsys.readouterr().out
    assert "3 clips listed, 2 classes: 2 found, 1 missing\n  8: No such file or directory" in printed
    assert "1 clips listed, 2 classes: 1 found, 0 missing" in printed
    assert list(map(str, read_quarantine(tmp_path / "train.left_out.csv"))) == ["8: No such file or directory"]
    manifest = read_manifest(tmp_path / "train.csv")
    assert manifest.classes == ("Swiping Left", "Swiping Right")
    store = open_store(DataSpec(train="x", val="x", root=str(root)), manifest)
    clip = stored_clip(store, 0, lambda n: np.arange(n), lambda w, h: View(w, h, 0, 0, w, h))
    assert [round(float(frame.mean()) / 10) for frame in clip] == [1, 2, 3, 4]


def test_an_import_of_nothing_writes_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _written(tmp_path / "list.txt", "a.mp4 0\n")
    assert main(["data", "import", "list", str(source), "--out", str(tmp_path / "list.csv")]) == 2
    assert "contains none of the 1 clips; check --root" in capsys.readouterr().err
    assert not (tmp_path / "list.csv").exists()
