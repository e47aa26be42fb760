"""Importers on small files in the formats that the data sets come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import ManifestRow, read_manifest
from summit_train.data.manifest.importers import KINDS, Annotations, Request
from summit_train.data.video.augment import View
from summit_train.spec import DataSpec
from tests.data.clips import stored_clip

HEADER = "label,youtube_id,time_start,time_end,split"
KINETICS = f"""{HEADER}
testifying,---QUuC4vJs,84,94,train
eating spaghetti,--3ouPhoy2A,20,30,train
dribbling basketball,-0-4ddpTiA8,2,12,train
eating spaghetti,twice,0,10,train
eating spaghetti,twice,30,40,train
testifying,gone_000000_x,7,17,train
"""
UCF101 = {
    "ind.txt": "1 ApplyEyeMakeup\n2 Archery\n",
    "source": "ApplyEyeMakeup/v_A_g08_c01.avi 1\nArchery/v_B_g09_c02.avi 2\n",
}
HMDB51 = {
    "brush_hair_test_split1.txt": "a_brush.avi 1 \nb_brush.avi 2 \nc_brush.avi 0 \n",
    "wave_test_split1.txt": "d#wave.avi 1 \n",
    "wave_test_split2.txt": "d#wave.avi 2 \n",
}
V1 = {"labels": "Holding something\nSomething falling like a feather or paper\n"}
V2 = json.dumps({"Holding something next to something": "1", "Approaching something with your camera": "0"})
V2_CLIPS = [
    {"id": "78687", "label": "holding a potato next to x", "template": "Holding [something] next to [something]"},
    {"id": "4", "label": "x", "template": "Approaching [something] with your camera", "placeholders": ["x"]},
]
CHARADES = {
    "source": "id,subject,scene,objects,actions,length\n"
    '46GP8,HR43,"A person, cooks",food,c001 11.90 21.20;c000 0.00 12.60;c001 1.0 2.0,24.8\n'
    "N11GT,0KZ7,Stairs,x,,18.3\nGONE1,0KZ7,Stairs,x,c001 0.00 1.00,18.3\n",
    "labels": "c000 Holding some clothes\nc001 Holding a phone/camera\n",
}


def _read(folder: Path, kind: str, files: dict[str, str], **more: Any) -> Annotations:
    """Write a data set's own files and read them; the list is `source`, else the folder."""
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    if "labels" in files:
        more["labels"] = folder / "labels"
    if "ind.txt" in files:
        (folder / "ind.txt").rename(folder / "classInd.txt")
    source = folder / "source" if "source" in files else folder
    return KINDS[kind][0](Request(source, **more))


def _located(annotations: Annotations, root: Path, *names: str) -> list[tuple[str, int] | str]:
    """(path, label) of what is found among empty files of these names, the message of what is not."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    found = annotations.located(str(root))
    return [(row.path, int(row.label)) if isinstance(row, ManifestRow) else str(row) for row in found]


def _frames(folder: Path, *numbers: int) -> None:
    folder.mkdir(parents=True)
    for number in numbers:
        Image.fromarray(np.full((16, 24, 3), 10 * number, np.uint8)).save(folder / f"{number:05}.jpg")


def test_kinetics_as_downloaders_name_the_files(tmp_path: Path) -> None:
    annotations = _read(tmp_path, "kinetics", {"source": KINETICS})
    assert annotations.classes == ("dribbling basketball", "eating spaghetti", "testifying")
    names = ["---QUuC4vJs_000084_000094.mp4", "eating_spaghetti/--3ouPhoy2A.mkv", "train/-0-4ddpTiA8_000002_000012.mp4"]
    names.append("twice_000030_000040.mp4")
    # Of which of the two clips is twice.mp4?
    assert _located(annotations, tmp_path / "set", *names, "twice.mp4", "notes.txt") == [
        (names[0], 2),
        (names[1], 1),
        (names[2], 0),
        "twice_000000_000010: No such file or directory",
        (names[3], 1),
        "gone_000000_x_000007_000017: No such file or directory",
    ]


def test_kinetics_600_and_700_have_the_same_columns_and_more(tmp_path: Path) -> None:
    files = {"source": f'{HEADER},is_cc\n"a, b",x,0.0,10.0,validate,0\n'}
    annotations, name = _read(tmp_path, "kinetics", files, classes=("a, b", "c")), "a/x_000000_000010.mp4"
    assert annotations.classes == ("a, b", "c")
    assert _located(annotations, tmp_path / "set", name) == [(name, 0)]
    [found] = _located(annotations, tmp_path / "set", "b/x_000000_000010.mp4")
    assert str(found).endswith(": must be there once, got a/x_000000_000010.mp4, b/x_000000_000010.mp4")


def test_ucf101(tmp_path: Path) -> None:
    annotations = _read(tmp_path, "ucf101", UCF101)
    assert [clip.group for clip in annotations.clips] == ["ApplyEyeMakeup_g08", "Archery_g09"]
    first, second = "ApplyEyeMakeup/v_A_g08_c01.avi", "Archery/v_B_g09_c02.avi"
    assert _located(annotations, tmp_path, first) == [(first, 0), f"{second}: No such file or directory"]
    annotations = _read(tmp_path, "ucf101", {"source": f"{first}\r\n{second}\r\n"})  # a test list
    assert _located(annotations, tmp_path, second) == [(first, 0), (second, 1)]


def test_hmdb51(tmp_path: Path) -> None:
    annotations = _read(tmp_path, "hmdb51", HMDB51, split=1, part="train")
    assert annotations.classes == ("brush_hair", "wave")
    names = ("brush_hair/a_brush.avi", "brush_hair/b_brush.avi", "d#wave.avi")
    assert _located(annotations, tmp_path, *names) == [(names[0], 0), (names[2], 1)]
    assert _located(_read(tmp_path, "hmdb51", {}, split=1, part="test"), tmp_path) == [(names[1], 0)]


def test_something_v1_and_jester_are_folders_of_pictures(tmp_path: Path) -> None:
    for name, numbers in (("100218", (1, 2, 3, 4, 5)), ("24413", (1, 2)), ("7", (1, 3))):
        _frames(tmp_path / name, *numbers)
    text = "100218;Something falling like a feather or paper\n" + "".join(
        f"{n};Holding something\n" for n in (24413, 7, 9)
    )
    found = list(_read(tmp_path, "something_v1", V1 | {"source": text}).located(str(tmp_path)))
    assert found[:2] == [ManifestRow("100218", 1, 5), ManifestRow("24413", 0, 2)]
    assert [str(error) for error in found[2:]] == [
        "7: the frame before 00003.jpg is missing, or there twice",
        "9: No such file or directory",
    ]


def test_something_v2(tmp_path: Path) -> None:
    annotations = _read(tmp_path, "something_v2", {"source": json.dumps(V2_CLIPS), "labels": V2})
    assert annotations.classes == ("Approaching something with your camera", "Holding something next to something")
    assert _located(annotations, tmp_path, "78687.webm") == [("78687.webm", 1), "4.webm: No such file or directory"]


def test_charades(tmp_path: Path) -> None:
    """Several labels and none, and the list of classes beside the list."""
    annotations = _read(tmp_path, "charades", CHARADES)
    assert annotations.classes == ("Holding some clothes", "Holding a phone/camera")
    (tmp_path / "46GP8.mp4").touch()
    (tmp_path / "N11GT.mp4").touch()
    found = list(annotations.located(str(tmp_path)))
    rows = [(row.path, row.label, row.group) for row in found if isinstance(row, ManifestRow)]
    assert rows == [("46GP8.mp4", "0;1", "HR43"), ("N11GT.mp4", ";", "0KZ7")] and len(found) == 3
    (tmp_path / "labels").rename(tmp_path / "Charades_v1_classes.txt")
    assert main(["data", "import", "charades", str(tmp_path / "source"), "--out", str(tmp_path / "out/list.csv")]) == 0
    manifest = read_manifest(tmp_path / "out/list.csv")
    assert [manifest.labels_of(clip) for clip in range(2)] == [(0, 1), ()] and manifest.classes == annotations.classes


def test_class_folders_of_videos_pictures_and_flow(tmp_path: Path) -> None:
    for name in ("run/a.mp4", "run/.hidden.mp4", "walk/notes.txt", "walk/flow/flow_x_1.jpg", "walk/flow/flow_y_1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    _frames(tmp_path / "walk/clip", 1, 2, 3, 4)
    (tmp_path / "walk/uneven").mkdir()
    for name in ("x_1", "y_1", "x_2"):
        (tmp_path / f"walk/uneven/flow_{name}.jpg").touch()
    *found, uneven = _read(tmp_path, "folders", {}).located(str(tmp_path))
    assert found == [ManifestRow("run/a.mp4", 0), ManifestRow("walk/clip", 1, 4), ManifestRow("walk/flow", 1, 1)]
    assert "holds 2 pictures flow_x_*.jpg and 1 pictures flow_y_*.jpg: number 2 is only in one" in str(uneven)
    (tmp_path / "walk/z").symlink_to("not/mounted")
    with pytest.raises(UserError, match="walk/z: is a link to not/mounted, which is not there"):
        _read(tmp_path, "folders", {})


def test_a_set_is_imported_split_by_split_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jester, from its own files to frames in memory."""
    for clip in ("1", "2", "3"):
        _frames(tmp_path / "set" / clip, 1, 2, 3, 4)
    (tmp_path / "labels.csv").write_text("Swiping Left\nSwiping Right\n")
    (tmp_path / "train.txt").write_text("1;Swiping Right\n2;Swiping Left\n8;Swiping Left\n")
    (tmp_path / "val.txt").write_text("3;Swiping Right\n")
    words = ["--root", str(tmp_path / "set"), "--labels", str(tmp_path / "labels.csv"), "--out"]
    for name in ("train", "val"):
        source = str(tmp_path / f"{name}.txt")
        assert main(["data", "import", "jester", source, *words, str(tmp_path / f"{name}.csv")]) == 0
    printed = capsys.readouterr().out
    assert "3 clips listed, 2 classes: 2 found\nleft out: 1\n  8: No such file or directory" in printed
    assert "1 clip listed, 2 classes: 1 found\nwrote" in printed
    assert (tmp_path / "train.left_out.csv").read_text() == "path,reason\n8,No such file or directory\n"
    manifest = read_manifest(tmp_path / "train.csv")
    assert manifest.classes == ("Swiping Left", "Swiping Right")
    store = open_store(DataSpec(train="x", val="x", root=str(tmp_path / "set")), manifest)
    clip = stored_clip(store, 0, lambda n: np.arange(n), lambda w, h: View(w, h, 0, 0, w, h))
    assert [round(float(frame.mean()) / 10) for frame in clip] == [1, 2, 3, 4]


def test_an_import_of_nothing_writes_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text(KINETICS)
    assert main(["data", "import", "kinetics", str(tmp_path / "train.csv"), "--out", str(tmp_path / "list.csv")]) == 2
    assert "must have the 6 clips, got none; try another --root" in capsys.readouterr().err
    assert not (tmp_path / "list.csv").exists()


# A kind, the files of its set, and the end of a message, which begins with the file.
TIMES = "time_start and time_end must be seconds, got"
ONE = '[{"id": "1"'
BROKEN: list[tuple[str, dict[str, str], str]] = [
    ("kinetics", {"source": "youtube_id,time_start\nx,0\n"}, "source:1: must have the columns label, .*; lacks label"),
    ("kinetics", {"source": f"{HEADER}\n,x,0,10,test\n"}, "source:2: must have a youtube_id and a label"),
    *(("kinetics", {"source": f"{HEADER}\na,{row}\n"}, f"source:2: {TIMES}") for row in ("x,zero,1", "x", "x,nan,1_0")),
    ("ucf101", UCF101 | {"source": "Archery/a.avi 1\n"}, "source:1: the number of Archery must be 2, .*, got 1"),
    ("ucf101", UCF101 | {"source": "a.avi 1\n"}, "source:1: must be Class/video.avi, got 'a.avi 1'"),
    ("ucf101", UCF101 | {"source": "Waving/a.avi 1\n"}, "source:1: label must be one of the 2 classes, got 'Waving'"),
    ("ucf101", UCF101 | {"ind.txt": "1\n"}, "classInd.txt:1: must be `1 Name of the class`, got '1'"),
    ("ucf101", UCF101 | {"ind.txt": "1 A\n3 B\n"}, "classInd.txt:2: must be `2 Name of the class`, got '3 B'"),
    ("hmdb51", {"wave_test_split3.txt": ""}, r"must have files CLASS_test_split1\.txt, got none; try another --split"),
    ("hmdb51", {"wave_test_split1.txt": "a.avi 3\n"}, "split1.txt:1: must be a video and 0, 1 or 2, got 'a.avi 3'"),
    ("something_v1", V1 | {"source": "100218\n"}, "source:1: must be ID;label"),
    ("something_v1", V1 | {"source": "1;Waving\n"}, "source:1: label must be one of the 2 classes, got 'Waving'"),
    ("something_v1", {"source": ""}, "source: --labels must name .*-v1-labels.*, got none"),
    ("something_v2", {"source": ""}, "source: --labels must name .*-v2-labels.*, got none"),
    ("something_v2", {"labels": V2, "source": f"{ONE}}}]"}, "source: entry 0: must have an id and a template"),
    ("something_v2", {"labels": V2, "source": '{"id": 1}'}, "source: must be a JSON list"),
    ("something_v2", {"labels": V2, "source": "["}, "source: must be JSON: "),
    ("something_v2", {"labels": V2, "source": "[" * 100_000}, "source: must be JSON: its values are nested too deeply"),
    ("something_v2", {"labels": V2, "source": f'{ONE}, "template": "Waving"}}]'}, "entry 0: label must be .*'Waving'"),
    ("something_v2", {"labels": '{"a": "1_0"}', "source": "[]"}, "labels: must be a JSON object from each label to"),
    ("something_v2", {"labels": '{"a": "0", "b": "2"}', "source": "[]"}, "labels: must have the numbers 0 to 1, each"),
    ("charades", CHARADES | {"labels": "c000 A\nc002 B\n"}, "labels:2: must be `c001 Name of the class`, got 'c002 B'"),
    ("charades", CHARADES | {"labels": "c000 A\n"}, "source:2: label must be one of the 1 classes, got 'c001'"),
]


@pytest.mark.parametrize(("kind", "files", "reason"), BROKEN)
def test_a_broken_list_is_named_with_its_line(tmp_path: Path, kind: str, files: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        _read(tmp_path, kind, files, part="train")
    assert str(caught.value).startswith(str(tmp_path))


def test_hmdb51_needs_a_part(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--part must be train or test, got none"):
        _read(tmp_path, "hmdb51", HMDB51)
