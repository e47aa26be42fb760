from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestRow, read_classes, read_manifest, write_manifest
from summit_train.data.manifest.quarantine import (
    Kept,
    class_warnings,
    clips_per_class,
    kept_clips,
    quarantine_warnings,
    read_quarantine,
    write_quarantine,
)
from summit_train.data.manifest.reading import check_beside, write_classes
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import WHOLE, Span
from summit_train.spec import DataSpec

SPANS = "path,reason,start_frame,end_frame"
NAMES = ["a.mp4", "b, c.mp4", "ä 視.mp4", os.fsdecode(b"n\xff.mp4"), "e.mp4", "a.mp4"]


def _manifest(folder: Path) -> Manifest:
    write_manifest(folder / "list.csv", [ManifestRow(name, n, reversed=n == 5) for n, name in enumerate(NAMES)])
    return read_manifest(folder / "list.csv")


def _data(**changes: Any) -> DataSpec:
    return DataSpec(train="x", val="x", **changes)


def test_kept_places_are_the_clips_between_the_excluded_ones() -> None:
    for excluded in ([], [0], [9], [0, 1, 2], [3, 4, 9], [1, 3, 5, 7], list(range(9))):
        kept = Kept(10, np.array(excluded, np.int64))
        between = [clip for clip in range(10) if clip not in excluded]
        assert len(kept) == len(between)
        assert kept.ids(np.arange(len(kept))).tolist() == between


def test_what_is_written_is_found_in_the_manifest(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    assert (len(kept_clips(_data(), manifest)), kept_clips(_data(), manifest).fingerprint()) == (6, None)
    bad = [DecodeError(NAMES[n], f"reason, {n}") for n in (0, 1, 3)]
    write_quarantine(tmp_path / "bad.csv", bad)
    assert list(map(str, read_quarantine(tmp_path / "bad.csv"))) == list(map(str, bad))
    kept = kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest)
    # The clip that is listed in both directions is left out in both.
    assert kept.ids(np.arange(len(kept))).tolist() == [2, 4]
    assert kept.fingerprint() != Kept(6, np.array([0, 1, 5])).fingerprint()


def test_class_folders_are_found_too(tmp_path: Path) -> None:
    for name in ("run/a.mp4", "walk/b.mp4"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        (tmp_path / "set" / name).touch()
    manifest = read_manifest(tmp_path / "set")
    write_quarantine(tmp_path / "bad.csv", [DecodeError(manifest.path(1), "is empty")])
    assert kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest).excluded.tolist() == [1]


def test_rows_that_name_no_clip_of_either_list_are_counted_and_all_of_them_refused(tmp_path: Path) -> None:
    for part, name in (("train", "a"), ("val", "b")):
        (tmp_path / part / "run").mkdir(parents=True)
        (tmp_path / part / f"run/{name}.mp4").touch()
    train, val = read_manifest(tmp_path / "train"), read_manifest(tmp_path / "val")
    bad = tmp_path / "bad.csv"
    here = [DecodeError(manifest.path(0), "is empty") for manifest in (train, val)]
    elsewhere = [DecodeError("/elsewhere/run/a.mp4", "is empty"), DecodeError(here[0].path, "outside", Span(3, 5))]
    data = _data(quarantine=str(bad))
    write_quarantine(bad, here)
    assert quarantine_warnings(data, train, val) == quarantine_warnings(_data(), train, val) == []
    write_quarantine(bad, [here[1], *elsewhere])
    (line,) = quarantine_warnings(data, train, val)
    assert f"2 of 3 rows name no clip of {train.source} or {val.source}: the first is /elsewhere/run/a.mp4, " in line
    write_quarantine(bad, elsewhere[:1])
    with pytest.raises(UserError, match=r"no row names a clip of .* again with `summit-train data scan`$"):
        quarantine_warnings(data, train, val)


def test_a_bad_span_leaves_the_others_of_its_file_and_a_bad_file_none(tmp_path: Path) -> None:
    rows = [ManifestRow("a", 0).with_span(Span(2 * n, 2 * n + 2)) for n in range(3)]
    rows += [ManifestRow("b", 1).with_span(Span(2 * n)) for n in range(2)] + [ManifestRow("c", 0)]
    write_manifest(tmp_path / "list.csv", rows)
    for bad, lines, excluded in (
        ([("a", "outside", Span(2, 4)), ("b", "so", Span(2))], ["a,outside,2,4", "b,so,2,"], [1, 4]),
        ([("a", "empty", WHOLE), ("b", "outside", Span(7, 9))], ["a,empty,,", "b,outside,7,9"], [0, 1, 2]),
    ):
        write_quarantine(tmp_path / "bad.csv", [DecodeError(*one) for one in bad])
        assert (tmp_path / "bad.csv").read_text().splitlines() == [SPANS, *lines]
        assert [error.span for error in read_quarantine(tmp_path / "bad.csv")] == [span for _, _, span in bad]
        kept = kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), read_manifest(tmp_path / "list.csv"))
        assert kept.excluded.tolist() == excluded


def test_the_size_of_a_frame_is_no_region(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("path,num_frames,width,height,reason\na.mp4,30,64,48,is damaged\n")
    (error,) = read_quarantine(tmp_path / "bad.csv")
    assert (error.path, error.region) == ("a.mp4", WHOLE_FRAME)


def test_a_bad_region_leaves_the_others_of_its_file(tmp_path: Path) -> None:
    """An empty cell stands for all spans, or for all regions."""
    rows = ["a,0,,,0,0,8,8", "a,1,,,8,0,8,8", "a,1,2,4,8,0,8,8", "a,0,2,4,,,,", "b,0,,,,,,"]
    (tmp_path / "list.csv").write_text("path,label,start_frame,end_frame,left,top,width,height\n" + "\n".join(rows))
    bad, manifest = tmp_path / "bad.csv", read_manifest(tmp_path / "list.csv", "columns")
    for part, line, excluded in (
        ((WHOLE, Region(8, 0, 8, 8)), "a,why,8,0,8,8", [1, 2]),
        ((Span(2, 4), Region(8, 0, 8, 8)), "a,why,2,4,8,0,8,8", [2]),
        ((Span(2, 4), WHOLE_FRAME), "a,why,2,4", [2, 3]),
        ((WHOLE, WHOLE_FRAME), "a,why", [0, 1, 2, 3]),
        ((WHOLE, Region(8, 0, 8, 9)), "a,why,8,0,8,9", []),
    ):
        write_quarantine(bad, [DecodeError("a", "why", *part)])
        assert bad.read_text().splitlines()[1] == line
        assert [(error.span, error.region) for error in read_quarantine(bad)] == [part]
        assert kept_clips(_data(quarantine=str(bad)), manifest).excluded.tolist() == excluded
    write_quarantine(bad, [DecodeError("a", "why", region=Region(8, 0, 8, 8))])
    # Without data.region each clip is the whole frame, of which the region is no clip.
    assert len(kept_clips(_data(quarantine=str(bad)), read_manifest(tmp_path / "list.csv"))) == len(rows)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("", "bad.csv:1: the header must be path,reason"),
        ("path,label\na,0\n", "bad.csv:1: the header must have one column 'reason', got path, label"),
        ("path,reason\na,b,c\n", "bad.csv:2: 3 fields where the header has 2"),
        (f"{SPANS}\na,b,4,2\n", "bad.csv:2: end_frame must be after start_frame, got 4 to 2"),
        ("path,reason,left,top,width,height\na,b,1,1,0,2\n", "bad.csv:2: left,top,width,height must be whole pixels"),
        (f"{SPANS}\na,b\n", "bad.csv:2: 2 fields where the header has 4"),
        ("path,reason\n" + "".join(f'"{name}",x\n' for name in NAMES), "names every clip"),
    ],
)
def test_a_list_that_cannot_be_used(tmp_path: Path, text: str | None, reason: str) -> None:
    manifest = _manifest(tmp_path)
    if text is not None:
        (tmp_path / "bad.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=reason):
        kept_clips(_data(quarantine=str(tmp_path / "bad.csv")), manifest)


# Clips per class, and what is said where training and validation have different classes.

CLASSES = ("bend", "run", "walk")


def _of_labels(path: Path, labels: list[int], names: tuple[str, ...] | None = CLASSES) -> Manifest:
    path.parent.mkdir(exist_ok=True)
    if names is not None:
        write_classes(path.parent, names)
    write_manifest(path, [ManifestRow(f"{i}.mp4", label) for i, label in enumerate(labels)])
    return read_manifest(path)


def test_clips_are_counted_by_class_without_those_in_quarantine(tmp_path: Path) -> None:
    manifest = _of_labels(tmp_path / "a.csv", [2, 0, 0, 2, 2])
    assert clips_per_class(manifest) == {"bend": 2, "run": 0, "walk": 3}
    assert clips_per_class(manifest, Kept(5, np.array([0, 1]))) == {"bend": 1, "run": 0, "walk": 2}
    assert clips_per_class(_of_labels(tmp_path / "b" / "b.csv", [1, 1], None)) == {"0": 0, "1": 2}


def test_classes_of_one_side_alone_are_named_in_a_line_each(tmp_path: Path) -> None:
    train, val = _of_labels(tmp_path / "train.csv", [0, 0, 2]), _of_labels(tmp_path / "val.csv", [0, 1])
    assert class_warnings(train, val) == [
        "1 class (run) in data.val and not in data.train",
        "1 class (walk) in data.train and not in data.val",
    ]
    # A name of classes.txt without a clip on either side is no mistake.
    assert class_warnings(train, train) == []
    many = _of_labels(tmp_path / "many" / "train.csv", list(range(8)), None)
    assert class_warnings(many, _of_labels(tmp_path / "many" / "val.csv", [0, 9], None)) == [
        "1 class (9) in data.val and not in data.train",
        "7 classes (1, 2, 3, 4, 5 and 2 more) in data.train and not in data.val",
    ]


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    for name in ("bend/0.mp4", "run/no_video.txt", "walk/0.mp4"):
        for side in ("train", "val"):
            path = tmp_path / side / name
            path.parent.mkdir(parents=True)
            path.touch()
    train, val = read_manifest(tmp_path / "train"), read_manifest(tmp_path / "val")
    assert class_warnings(train, val) == [
        f"1 class (run) without a video in data.train: the class folders in {tmp_path}/train are empty",
        f"1 class (run) without a video in data.val: the class folders in {tmp_path}/val are empty",
    ]


def test_a_manifest_is_not_put_beside_the_names_of_other_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, CLASSES)
    assert read_classes(tmp_path / "classes.txt") == CLASSES
    check_beside(tmp_path / "new.csv", CLASSES, tmp_path / "source")
    with pytest.raises(UserError, match=r"classes\.txt: has other classes than .*source; write to another folder"):
        check_beside(tmp_path / "new.csv", CLASSES[:2], tmp_path / "source")
