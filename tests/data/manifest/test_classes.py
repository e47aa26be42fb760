"""Clips per class, and what is said where training and validation have different classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest import Manifest, ManifestError, ManifestRow, read_classes, read_manifest, write_manifest
from summit_train.data.manifest.classes import check_beside, class_warnings, clips_per_class, write_classes
from summit_train.data.manifest.quarantine import Kept

NAMES = ("bend", "run", "walk")


def _manifest(path: Path, labels: list[int], names: tuple[str, ...] | None = NAMES) -> Manifest:
    path.parent.mkdir(exist_ok=True)
    if names is not None:
        write_classes(path.parent, names)
    write_manifest(path, [ManifestRow(f"{i}.mp4", label) for i, label in enumerate(labels)])
    return read_manifest(path)


def _folders(root: Path, **videos: int) -> Manifest:
    for name, count in videos.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.mp4").touch()
    return read_manifest(root)


def test_clips_are_counted_by_class_without_those_in_quarantine(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path / "a.csv", [2, 0, 0, 2, 2])
    assert clips_per_class(manifest) == {"bend": 2, "run": 0, "walk": 3}
    assert clips_per_class(manifest, Kept(5, np.array([0, 1]))) == {"bend": 1, "run": 0, "walk": 2}
    assert clips_per_class(_manifest(tmp_path / "b" / "b.csv", [1, 1], None)) == {"0": 0, "1": 2}


def test_classes_of_one_side_alone_are_named_in_a_line_each(tmp_path: Path) -> None:
    train, val = _manifest(tmp_path / "train.csv", [0, 0, 2]), _manifest(tmp_path / "val.csv", [0, 1])
    assert class_warnings(train, val) == [
        "1 class (run) in data.val and not in data.train",
        "1 class (walk) in data.train and not in data.val",
    ]
    assert class_warnings(train, train) == []


def test_many_classes_are_counted_and_five_named(tmp_path: Path) -> None:
    train = _manifest(tmp_path / "train.csv", list(range(8)), None)
    val = _manifest(tmp_path / "val.csv", [0, 9], None)
    assert class_warnings(train, val) == [
        "1 class (9) in data.val and not in data.train",
        "7 classes (1, 2, 3, 4, 5 and 2 more) in data.train and not in data.val",
    ]


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    train = _folders(tmp_path / "train", bend=1, run=0, walk=2)
    val = _folders(tmp_path / "val", bend=1, run=0, walk=1)
    assert class_warnings(train, val) == [
        f"1 class (run) without a video in data.train: the class folders in {tmp_path}/train are empty",
        f"1 class (run) without a video in data.val: the class folders in {tmp_path}/val are empty",
    ]


def test_names_of_classes_txt_without_a_clip_on_either_side_are_no_mistake(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path / "a.csv", [0, 2])
    assert class_warnings(manifest, manifest) == []


def test_a_manifest_is_not_put_beside_the_names_of_other_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, NAMES)
    assert read_classes(tmp_path / "classes.txt") == NAMES
    check_beside(tmp_path / "new.csv", NAMES, tmp_path / "source")
    with pytest.raises(ManifestError, match=r"classes\.txt: has other classes than .*source; write to another folder"):
        check_beside(tmp_path / "new.csv", NAMES[:2], tmp_path / "source")
    with pytest.raises(ManifestError, match="missing: no such folder; make it first"):
        check_beside(tmp_path / "missing" / "new.csv", NAMES, tmp_path / "source")
