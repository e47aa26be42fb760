"""Clips that two lists share, by their columns, and classes that one of them lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.overlap import Leaks, class_warnings, shared_clips
from summit_train.data.manifest.reading import write_classes
from summit_train.data.manifest.tables import DTYPES
from summit_train.data.video.span import TO_THE_END, Span

A, B = "a" * 64, "b" * 64
CLASSES = ("bend", "run", "walk")


def _read(path: Path, *rows: ManifestRow) -> Manifest:
    path.parent.mkdir(exist_ok=True)
    write_manifest(path, rows)
    return read_manifest(path)


def _clip(path: str, sha256: str | None = None, start: int = 0, end: int = TO_THE_END) -> ManifestRow:
    return ManifestRow(path, 0, sha256=sha256, span=Span(start, end))


def _of_labels(path: Path, labels: list[int], names: tuple[str, ...] | None = CLASSES) -> Manifest:
    path.parent.mkdir(exist_ok=True)
    if names is not None:
        write_classes(path.parent, names)
    return _read(path, *(ManifestRow(f"{i}.mp4", label) for i, label in enumerate(labels)))


def test_a_file_is_shared_by_its_path_or_its_content(tmp_path: Path) -> None:
    train = _read(tmp_path / "train.csv", _clip("v/a.mp4", A), _clip("v/b.mp4", B), _clip("v/c.mp4"), _clip("d.mp4"))
    val = _read(tmp_path / "val.csv", _clip("v/c.mp4"), _clip("copy.mp4", B), _clip("e.mp4"), _clip("v/a.mp4", A))
    assert shared_clips(train, val, (None, None)) == {(2, 0): "path", (0, 3): "path", (1, 1): "sha256"}


def test_paths_are_compared_below_their_roots(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.mp4").touch()
    below = [_read(tmp_path / name / "list.csv", _clip("a.mp4")) for name in ("x", "y")]
    assert shared_clips(*below, (None, None)) == {}
    from_above = _read(tmp_path / "list.csv", _clip("x/a.mp4"))
    assert shared_clips(below[0], from_above, (None, str(tmp_path))) == {(0, 0): "path"}
    absolute = _read(tmp_path / "absolute.csv", _clip(str(tmp_path / "y/a.mp4")), _clip("x/a.mp4"))
    assert shared_clips(below[1], absolute, (None, None)) == {(0, 0): "path"}
    for roots in ((None, None), (None, str(tmp_path))):
        assert shared_clips(from_above, absolute, roots) == {(0, 1): "path"}


def test_clips_of_long_lists_are_found_at_their_places(tmp_path: Path) -> None:
    train = _read(tmp_path / "train.csv", *(_clip(f"{number}.mp4", f"{number:064x}") for number in range(9000)))
    val = _read(tmp_path / "val.csv", *(_clip(f"v/{number}.mp4", f"{number:064x}") for number in range(8999, 14_000)))
    assert shared_clips(train, val, (None, None)) == {(8999, 0): "sha256"}
    assert shared_clips(val, train, (None, None)) == {(0, 8999): "sha256"}
    val = _read(tmp_path / "val.csv", *(_clip(f"{number}.mp4") for number in range(-5000, 2)))
    assert shared_clips(train, val, (None, None)) == {(0, 5000): "path", (1, 5001): "path"}


@settings(max_examples=200, deadline=None)
@given(
    lists=st.tuples(*[st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(-1, 9)), min_size=1)] * 2)
)
def test_spans_of_a_file_are_shared_where_they_overlap(lists: tuple[list[tuple[int, int, int]], ...]) -> None:
    """lists: file, start and length of each clip; a length of 0 or less reaches to the end."""
    clips = [[(file, start, start + length if length > 0 else -1) for file, start, length in one] for one in lists]
    sides = []
    for one in clips:
        manifest = plain_manifest([f"/{file}.mp4" for file, _, _ in one])
        sides.append(replace(manifest, spans=np.array([span for _, *span in one], "i4").view(DTYPES["spans"])[:, 0]))
    expected = [
        (clip, other)
        for other, (their_file, begin, stop) in enumerate(clips[1])
        for clip, (file, start, end) in enumerate(clips[0])
        if file == their_file and (end == -1 or begin < end) and (stop == -1 or start < stop)
    ]
    assert list(shared_clips(*sides, ("/", "/"))) == expected


def test_packed_sets_are_compared_by_the_paths_that_they_store(tmp_path: Path) -> None:
    first, second = (
        replace(_read(tmp_path / f"{n}.csv", *(ManifestRow(f"{i}.mp4", 0, i + 20) for i in clips)), is_packed=True)
        for n, clips in enumerate(((1, 2, 3), (3, 4)))
    )
    assert shared_clips(first, second, ("x", "y")) == {(2, 0): "path"}
    listed = _read(tmp_path / "l.csv", ManifestRow("b.mp4", 0), ManifestRow("3.mp4", 0))  # of unknown lengths
    assert shared_clips(second, listed, (None, None)) == {(0, 1): "path"}
    second.frame_counts[0] += 1  # then it is another file of that name
    assert shared_clips(first, second, ("x", "y")) == {}


def test_the_warning_names_the_first_clip_and_counts_each_once(tmp_path: Path) -> None:
    val = _read(tmp_path / "val.csv", _clip("a.mp4", None, 3, 9), _clip("b.mp4"))
    leaks = Leaks({(0, 0): "path", (4, 0): "sha256"}, ["p1", "p2", "p3", "p4"])
    assert leaks.warnings(val) == [
        "data.val shares 1 clip with data.train, such as a.mp4 3:9 (same path): the accuracy will be too high; "
        "`summit-train data compare` lists them all",
        "data.val shares 4 groups (column group) with data.train, such as p1, p2, p3: the accuracy will be too high; "
        "`summit-train data split` keeps groups on one side",
    ]
    assert leaks.values() == {"shared_clips": 1, "shared_groups": 4} and Leaks({}).warnings(val) == []


# Clips per class, and what is said where training and validation have different classes.


def test_classes_of_one_side_alone_are_named_in_a_line_each(tmp_path: Path) -> None:
    train, val = _of_labels(tmp_path / "train.csv", [0, 0, 2]), _of_labels(tmp_path / "val.csv", [0, 1])
    assert train.clips_per_class == {"bend": 2, "run": 0, "walk": 1}
    assert class_warnings(train, val) == [
        "1 class (run) in data.val and not in data.train",
        "1 class (walk) in data.train and not in data.val",
    ]
    # A name of classes.txt without a clip on either side is no mistake.
    assert class_warnings(train, train) == []
    many = _of_labels(tmp_path / "many" / "train.csv", list(range(8)), None)
    few = _of_labels(tmp_path / "many" / "val.csv", [0, 9], None)
    assert few.clips_per_class == {"0": 1, **dict.fromkeys("12345678", 0), "9": 1}
    assert class_warnings(many, few) == [
        "1 class (9) in data.val and not in data.train",
        "7 classes (1, 2, 3, 4, 5 and 2 more) in data.train and not in data.val",
    ]


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    for name in ("bend/0.mp4", "run/no_video.txt", "walk/0.mp4"):
        for side in ("train", "val"):
            (tmp_path / side / name).parent.mkdir(parents=True)
            (tmp_path / side / name).touch()
    train, val = read_manifest(tmp_path / "train"), read_manifest(tmp_path / "val")
    assert class_warnings(train, val) == [
        f"1 class (run) without a video in data.{side}: the class folders in {tmp_path}/{side} are empty"
        for side in ("train", "val")
    ]
