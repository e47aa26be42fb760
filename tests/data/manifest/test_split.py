"""Splitting by groups: no group on both sides, every clip validated once, both directions of every clip."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.split import Fold, split_manifest
from summit_train.data.video.span import Span
from tests.worlds import Say, csv_rows, refused

PERSON = "^[^_]+"
ACTIONS = ("bend", "run", "walk")
# One clip of each of four persons and three actions, in folders by action: bend/p0_bend.avi ...
CLIPS = [
    ManifestRow(f"{action}/p{person}_{action}.avi", label, 20 + person)
    for label, action in enumerate(ACTIONS)
    for person in range(4)
]


def _clips(manifest: Manifest) -> list[tuple[str, int, bool]]:
    return [(manifest.path(i), manifest.labels[i], manifest.clip(i).is_reversed) for i in range(len(manifest))]


def _sides(folder: Path | str, fold: int) -> list[Manifest]:
    return [read_manifest(f"{folder}/out/fold{fold}/{side}.csv") for side in ("train", "val")]


def _split(
    folder: Path | str, rows: Sequence[ManifestRow] | str, folds: int, group: str | None = PERSON, **how: Any
) -> list[Fold]:
    """Write a list of these rows, or of this text, and split it into `folder`/out."""
    path = Path(folder) / "clips.csv"
    if isinstance(rows, str):
        path.write_text(rows)
    else:
        write_manifest(path, rows)
    return split_manifest(path, f"{folder}/out", folds, group, **how)


@settings(max_examples=25, deadline=None)
@given(clips_of=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=9), data=st.data())
def test_groups_stay_together_and_every_clip_is_validated_once(clips_of: list[list[int]], data: st.DataObject) -> None:
    """clips_of: the classes of each group's clips."""
    folds = data.draw(st.integers(2, len(clips_of)))
    clips = [(group, i, label) for group, labels in enumerate(clips_of) for i, label in enumerate(labels)]
    rows = [ManifestRow(f"v/g{group}_{i}.mp4", label) for group, i, label in clips]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = _split(folder, data.draw(st.permutations(rows)), folds)
        except UserError:
            assert not (Path(folder) / "out").exists()
            return
        source = Counter(_clips(read_manifest(f"{folder}/clips.csv")))
        validated: Counter[tuple[str, int, bool]] = Counter()
        for number, fold in enumerate(done, 1):
            train, val = _sides(folder, number)
            assert (len(train), len(val)) == (sum(fold.train.values()), sum(fold.val.values()))
            assert set(fold.train) == set(fold.val) == {str(row.label) for row in rows}
            groups = [{Path(path).name.split("_")[0] for path, _, _ in _clips(side)} for side in (train, val)]
            assert not groups[0] & groups[1]
            assert Counter(_clips(train)) + Counter(_clips(val)) == source
            validated += Counter(_clips(val))
        assert len(done) == folds and validated == source


@settings(max_examples=20, deadline=None)
@given(groups=st.lists(st.lists(st.integers(1, 5), min_size=4, max_size=9), min_size=1, max_size=4), data=st.data())
def test_classes_are_shared_out_as_evenly_as_their_groups_allow(groups: list[list[int]], data: st.DataObject) -> None:
    """groups: for each class the clips of each of its groups."""
    rows = [
        ManifestRow(f"c{label}g{group}_{i}.mp4", label)
        for label, sizes in enumerate(groups)
        for group, size in enumerate(sizes)
        for i in range(size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = _split(folder, rows, data.draw(st.integers(2, 4)), seed=data.draw(st.integers(0, 99)))
    for label, sizes in enumerate(groups):
        validated = [fold.val[str(label)] for fold in done]
        assert max(validated) - min(validated) <= max(sizes)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(30)), seed=st.integers(0, 2**63 - 1))
def test_a_seed_gives_one_split_whatever_the_manifests_order(order: list[int], seed: int) -> None:
    rows = [ManifestRow(f"v{i:02}.mp4", i % 3) for i in range(30)]
    found = []
    for shuffled, number in ((rows, seed), ([rows[i] for i in order], seed), (rows, seed ^ 1)):
        with tempfile.TemporaryDirectory() as folder:
            _split(folder, shuffled, 3, None, seed=number)
            found.append([{path for path, _, _ in _clips(_sides(folder, fold)[1])} for fold in (1, 2, 3)])
    assert found[0] == found[1] != found[2]


def test_a_class_that_cannot_be_on_both_sides_is_named(tmp_path: Path) -> None:
    rows = [ManifestRow(f"p{i}_a.mp4", 0) for i in range(6)] + [ManifestRow(f"p{i}_b.mp4", 1) for i in (0, 0, 1)]
    # Two of three groups have each class, so two are on one side, which leaves the other without a class.
    pairs = [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 0), ("c", 2)]
    for clips, folds, message in (
        (rows, 3, r"class '1' must have clips in 3 groups .* got 2 of 6 groups; try --folds 2, more groups \(another"),
        ([ManifestRow("p0_a.mp4", 0), *rows[-3:]], 2, "class '0' must have clips in 2 .* got 1 of 2 groups; try more"),
        ([ManifestRow(f"{group}_{label}.mp4", label) for group, label in pairs], 2, "no split .* the class '[012]' on"),
    ):
        with pytest.raises(UserError, match=message):
            _split(tmp_path, clips, folds)
    assert all(fold.train.keys() == fold.val.keys() for fold in _split(tmp_path, rows, 2))
    # The first order of the groups leaves a part without a class, another one does not.
    labels_of = ("024", "134", "014", "2", "03")
    several = [ManifestRow(f"p{i}_{n}.mp4", int(n)) for i, labels in enumerate(labels_of) for n in labels]
    assert all(fold.train.keys() == fold.val.keys() for fold in _split(tmp_path, several, 2))
    # Of ten persons two have a rare class: they must not come into one part.
    rows = [ManifestRow(f"p{i}_{n}.mp4", 0) for i in range(10) for n in range(i + 1)]
    rows += [ManifestRow("p0_x.mp4", 1), ManifestRow("p9_x.mp4", 1)]
    for seed in range(10):
        assert [fold.val["1"] for fold in _split(tmp_path, rows, 2, seed=seed)] == [1, 1]


def test_every_column_of_the_manifest_is_kept(tmp_path: Path) -> None:
    """Labels 3;17 and none, groups, spans, regions and columns of the user's own."""
    header = "path,label,num_frames,fps,group,sha256,reversed,start_frame,end_frame,duration,codec,"
    header += "place,left,top,width,height"
    rows = [
        f'"n,{n}_0.mp4",{("0;1", ";")[n % 2]},84,25.0,ido{n // 2},{n}{"a" * 63},1,{n},{n + 9},3.36,h264,'
        f'"lab ""{n}""",{n},2,30,40'
        for n in range(1, 7)
    ]
    _split(tmp_path, "\n".join([header, *rows]), 2, None)
    source = sorted(csv_rows(tmp_path / "clips.csv"), key=str)
    for fold in (1, 2):
        found = [row for side in ("train", "val") for row in csv_rows(tmp_path / f"out/fold{fold}/{side}.csv")]
        assert sorted(({name: row[name] for name in header.split(",")} for row in found), key=str) == source


@pytest.mark.parametrize("named", [False, True])
def test_classes_are_taken_with_their_labels_and_names(tmp_path: Path, named: bool) -> None:
    if named:
        (tmp_path / "classes.txt").write_text("".join(f"{name}\n" for name in ACTIONS))
    _split(tmp_path, CLIPS, 2, "p([0-9])", only=("walk" if named else "2",))
    train, val = _sides(tmp_path, 1)
    assert {label for _, label, _ in _clips(train) + _clips(val)} == {2}
    assert train.classes == (ACTIONS if named else None)
    lines = (tmp_path / "out/fold1/val.csv").read_text().splitlines()
    assert lines[0] == "path,label,num_frames,group" and re.fullmatch(r"walk/p([0-9])_walk.avi,2,2\1,\1", lines[1])


def test_both_directions_give_each_clip_and_span_twice_on_the_same_side(tmp_path: Path) -> None:
    spans = [ManifestRow(f"{n % 4}.mp4", n % 4 % 2, span=Span(n, n + 9)) for n in range(12)]
    for both in (False, True):
        _split(tmp_path, spans, 2, None, both_directions=both)
        sides = _sides(tmp_path, 1)
        found = [[(side.path(clip), side.clip(clip).span) for clip in range(len(side))] for side in sides]
        assert sorted({*found[0], *found[1]}) == sorted((row.path, row.span) for row in spans)
        assert not {path for path, _ in found[0]} & {path for path, _ in found[1]}
        assert sum(map(len, found)) == (24 if both else 12)
    _split(tmp_path, CLIPS, 2, only=("1", "2"), both_directions=True)
    for side in _sides(tmp_path, 1):
        assert side.classes == ("forwards", "backwards")
        clips = _clips(side)
        assert len(clips) == 8 and {path.split("/")[0] for path, _, _ in clips} == {"run", "walk"}
        assert all(label == int(backwards) for _, label, backwards in clips)
        assert set(Counter(path for path, _, _ in clips).values()) == {2}
    # Reversed clips stay reversed, and cannot be reversed again.
    rows = [ManifestRow(f"p{i}_a.avi", 0, reversed=i == 1) for i in range(2)]
    _split(tmp_path, rows, 2)
    validated = [clip for fold in (1, 2) for clip in _clips(_sides(tmp_path, fold)[1])]
    assert sorted(validated) == [("p0_a.avi", 0, False), ("p1_a.avi", 0, True)]
    with pytest.raises(UserError, match=r"--both-directions must have clips that are not reversed, got p1_a\.avi"):
        _split(tmp_path, rows, 2, both_directions=True)


def test_several_labels_are_split_by_each_and_kept(tmp_path: Path) -> None:
    rows = [
        ManifestRow(f"g{group}_{i}.mp4", label) for group in range(4) for i, label in enumerate(("0;1", "1;2", ";"))
    ]
    folds = _split(tmp_path, rows, 2)
    assert [(fold.train, fold.val) for fold in folds] == [({"0": 2, "1": 4, "2": 2},) * 2] * 2
    both = [_sides(tmp_path, fold)[1] for fold in (1, 2)]
    found = sorted((side.path(i), side.labels_of(i)) for side in both for i in range(len(side)))
    assert found == sorted((row.path, row.labels) for row in rows)
    _split(tmp_path, rows, 2, only=["0"])
    assert [_sides(tmp_path, 1)[0].labels_of(i) for i in range(2)] == [(0, 1)] * 2  # labels stay


# The command.


@pytest.mark.parametrize(
    ("words", "groups", "grouping"),
    [
        ((), 6, "groups: the list's column 'group'"),
        (("--group", r"\d+"), 24, r"groups: what --group '\d+' matches in the files' names"),
    ],
)
def test_the_lists_groups_stay_together_unless_an_expression_is_given(
    tmp_path: Path, say: Say, words: tuple[str, ...], groups: int, grouping: str
) -> None:
    """Six persons, who are in no file's name, each with two clips of both classes; then also files without a group."""
    path = tmp_path / "clips.csv"
    rows = [f"{n:02}.mp4,{n % 2},p{n % 6},{n}" for n in range(24)]
    path.write_text("\n".join(["path,label,group,own", *rows]))
    status, out, _ = say("data", "split", path, tmp_path / "out", "--folds", 3, *words)
    sizes = f"16 clips to train on, 8 to validate on; groups: {groups * 2 // 3} and {groups // 3}"
    assert status == 0 and {grouping, f"{tmp_path}/out/fold1: {sizes}"} <= set(out.splitlines())
    for fold in (1, 2, 3):
        sides = [{side.group(clip) for clip in range(len(side))} for side in _sides(tmp_path, fold)]
        assert not set.intersection(*sides) and len(set.union(*sides)) == groups
        assert (tmp_path / f"out/fold{fold}/val.csv").read_text().startswith("path,label,group,own\n")
    if words:
        return
    path.write_text("\n".join([path.read_text(), "x.mp4,0,,", "y.mp4,0,,"]))
    assert "p0, p1, p2, p3, p4, p5, x.mp4, y" in refused(say("data", "split", path, tmp_path / "more", "--folds", 99))
    _, out, _ = say("data", "split", path, tmp_path / "more", "--folds", 2)
    assert f"{grouping}; 2 files without a group, each a group of its own" in out.splitlines()


GROUPS = "(p0, p1, p2, p3)"
NO_MATCH = "bend/p0_bend.avi: --group must match in each file's name, got"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--folds 2 --group (p", "--group must be a regular expression, got '(p'"),
        ("--folds 2 --group q[0-9]", f"{NO_MATCH} 'q[0-9]', which"),
        ("--folds 2 --group p|(q)", f"{NO_MATCH} 'p|(q)', which"),
        (f"--folds 5 --group {PERSON}", f"--folds must be 2 to 4, the number of groups {GROUPS}, got 5"),
        (f"--folds 1 --group {PERSON}", "--folds must be 2 to 4"),
        ("--folds 2 --group ^(p)", "must be in at least two groups, got one, p; try another --group"),
        (f"--folds 2 --group {PERSON} --only 7", "must have the class '7'; valid: 0, 1, 2"),
    ],
)
def test_mistakes_exit_2_say_what_is_right_and_write_nothing(
    tmp_path: Path, say: Say, words: str, message: str
) -> None:
    write_manifest(tmp_path / "clips.csv", CLIPS)
    assert message in refused(say("data", "split", tmp_path / "clips.csv", tmp_path / "out", *words.split()))
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote(tmp_path: Path, say: Say) -> None:
    write_manifest(tmp_path / "clips.csv", CLIPS)
    words = ("data", "split", tmp_path / "clips.csv")
    status, out, _ = say(*words, tmp_path / "out", "--folds", 2, "--group", PERSON, "--only", 1, "--both-directions")
    assert status == 0 and f"{tmp_path}/out/fold2: 4 clips to train on, 4 to validate on" in out
    lines = [f"{name:<9}              2/2              2/2" for name in ("forwards", "backwards")]
    assert "\n".join(["class      fold1 train/val  fold2 train/val", *lines]) in out and "data.root" in out
    _, out, _ = say(*words, tmp_path / "other", "--folds", 2)
    assert "groups: each file is one (no column 'group', no --group)" in out
