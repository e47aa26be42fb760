"""Splitting by groups: no group on both sides, every clip validated once, both directions of every clip."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.split import Fold, split_manifest
from summit_train.data.video.span import Span

PERSON = "^[^_]+"
ACTIONS = ("bend", "run", "walk")


def _manifest(folder: Path, classes: bool = True) -> Path:
    """One clip of each of four persons and three actions, in folders by action: bend/p0_bend.avi ..."""
    clips = [(label, action, person) for label, action in enumerate(ACTIONS) for person in range(4)]
    rows = [ManifestRow(f"{action}/p{person}_{action}.avi", label, 20 + person) for label, action, person in clips]
    write_manifest(folder / "clips.csv", rows)
    if classes:
        (folder / "classes.txt").write_text("".join(f"{name}\n" for name in ACTIONS))
    return folder / "clips.csv"


def _clips(manifest: Manifest) -> list[tuple[str, int, bool]]:
    return [(manifest.path(i), manifest.labels[i], manifest.clip(i).is_reversed) for i in range(len(manifest))]


def _sides(out: Path, fold: int) -> tuple[Manifest, Manifest]:
    return read_manifest(out / f"fold{fold}/train.csv"), read_manifest(out / f"fold{fold}/val.csv")


def _split(folder: Path | str, folds: int, group: str | None = PERSON, **how: Any) -> list[Fold]:
    return split_manifest(f"{folder}/clips.csv", f"{folder}/out", folds, group, **how)


@settings(max_examples=25, deadline=None)
@given(clips_of=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=9), data=st.data())
def test_groups_stay_together_and_every_clip_is_validated_once(clips_of: list[list[int]], data: st.DataObject) -> None:
    """clips_of: the classes of each group's clips."""
    folds = data.draw(st.integers(2, len(clips_of)))
    clips = [(group, i, label) for group, labels in enumerate(clips_of) for i, label in enumerate(labels)]
    rows = [ManifestRow(f"v/g{group}_{i}.mp4", label) for group, i, label in clips]
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder) / "clips.csv", data.draw(st.permutations(rows)))
        try:
            done = _split(folder, folds)
        except UserError:
            assert not (Path(folder) / "out").exists()
            return
        source = Counter(_clips(read_manifest(f"{folder}/clips.csv")))
        validated: Counter[tuple[str, int, bool]] = Counter()
        for number, fold in enumerate(done, 1):
            train, val = _sides(Path(folder) / "out", number)
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
    folds = data.draw(st.integers(2, 4))
    rows = [
        ManifestRow(f"c{label}g{group}_{i}.mp4", label)
        for label, sizes in enumerate(groups)
        for group, size in enumerate(sizes)
        for i in range(size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder) / "clips.csv", rows)
        done = _split(folder, folds, seed=data.draw(st.integers(0, 99)))
    for label, sizes in enumerate(groups):
        validated = [fold.val[str(label)] for fold in done]
        assert max(validated) - min(validated) <= max(sizes)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(30)), seed=st.integers(0, 2**63 - 1))
def test_a_seed_gives_one_split_whatever_the_manifests_order(order: list[int], seed: int) -> None:
    rows = [ManifestRow(f"v{i:02}.mp4", i % 3) for i in range(30)]
    found = []
    for shuffled in (rows, [rows[i] for i in order]):
        with tempfile.TemporaryDirectory() as folder:
            write_manifest(Path(folder) / "clips.csv", shuffled)
            _split(folder, 3, None, seed=seed)
            found.append([{path for path, _, _ in _clips(_sides(Path(folder) / "out", k)[1])} for k in (1, 2, 3)])
            _split(folder, 3, None, seed=seed ^ 1)
            others = [{path for path, _, _ in _clips(_sides(Path(folder) / "out", k)[1])} for k in (1, 2, 3)]
    assert found[0] == found[1] != others


def test_a_class_that_cannot_be_on_both_sides_is_named(tmp_path: Path) -> None:
    rows = [ManifestRow(f"p{i}_a.mp4", 0) for i in range(6)] + [ManifestRow(f"p{i}_b.mp4", 1) for i in (0, 0, 1)]
    write_manifest(tmp_path / "clips.csv", rows)
    with pytest.raises(UserError, match=r"the class '1' has clips in 2 of 6 groups.* 3 folds; try --folds 2,"):
        _split(tmp_path, 3)
    assert all(fold.train.keys() == fold.val.keys() for fold in _split(tmp_path, 2))
    with pytest.raises(UserError, match=r"the class '0' has clips in 1 of .* try more groups"):
        write_manifest(tmp_path / "clips.csv", [ManifestRow("p0_a.mp4", 0), *rows[-3:]])
        _split(tmp_path, 2)
    # Two of three groups have each class, so two are on one side, which leaves the other without a class.
    pairs = [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 0), ("c", 2)]
    write_manifest(tmp_path / "clips.csv", [ManifestRow(f"{group}_{label}.mp4", label) for group, label in pairs])
    with pytest.raises(UserError, match=r"no split into 2 folds was found with the class '[012]' on both sides"):
        _split(tmp_path, 2)


def test_a_rare_class_within_mixed_groups_comes_on_both_sides(tmp_path: Path) -> None:
    # Of ten persons two have the rare class: they must not come into one part.
    rows = [ManifestRow(f"p{i}_{n}.mp4", 0) for i in range(10) for n in range(i + 1)]
    write_manifest(tmp_path / "clips.csv", [*rows, ManifestRow("p0_x.mp4", 1), ManifestRow("p9_x.mp4", 1)])
    for seed in range(10):
        assert [fold.val["1"] for fold in _split(tmp_path, 2, seed=seed)] == [1, 1]


def test_every_column_of_the_manifest_is_kept(tmp_path: Path) -> None:
    header = "path,label,num_frames,fps,width,height,group,sha256,reversed,start_frame,end_frame,duration,codec,place"
    rows = [f"p{n}_0.mp4,0,84,25.0,180,144,ido{n},{n}{'a' * 63},1,{n},{n + 9},3.36,h264,lab" for n in (1, 2)]
    (tmp_path / "clips.csv").write_text("\n".join([header, *rows]))
    _split(tmp_path, 2, None)
    for fold in (1, 2):
        sides = [(tmp_path / f"out/fold{fold}/{side}.csv").read_text().splitlines() for side in ("train", "val")]
        assert sorted(sides) == [[header, row] for row in rows]
    val = _sides(tmp_path / "out", 1)[1]
    assert val.sha256(0) == bytes.fromhex(f"{val.path(0)[1]}{'a' * 63}")  # so training refuses a swapped file


@pytest.mark.parametrize("named", [False, True])
def test_classes_are_taken_with_their_labels_and_names(tmp_path: Path, named: bool) -> None:
    _manifest(tmp_path, named)
    _split(tmp_path, 2, "p([0-9])", only=("walk" if named else "2",))
    train, val = _sides(tmp_path / "out", 1)
    assert {label for _, label, _ in _clips(train) + _clips(val)} == {2}
    assert train.classes == (ACTIONS if named else None)
    lines = (tmp_path / "out/fold1/val.csv").read_text().splitlines()
    assert lines[0] == "path,label,num_frames,group" and re.fullmatch(r"walk/p([0-9])_walk.avi,2,2\1,\1", lines[1])


@pytest.mark.parametrize("both", [False, True])
def test_a_split_keeps_spans_and_never_divides_a_files(tmp_path: Path, both: bool) -> None:
    rows = [ManifestRow(f"{n % 4}.mp4", n % 4 % 2, span=Span(n, n + 9)) for n in range(12)]
    write_manifest(tmp_path / "clips.csv", rows)
    _split(tmp_path, 2, None, both_directions=both)
    sides = _sides(tmp_path / "out", 1)
    found = [[(side.path(clip), side.clip(clip).span) for clip in range(len(side))] for side in sides]
    assert sorted({*found[0], *found[1]}) == sorted((row.path, row.span) for row in rows)
    assert not {path for path, _ in found[0]} & {path for path, _ in found[1]}
    assert sum(map(len, found)) == (24 if both else 12)


def test_both_directions_give_each_clip_twice_on_the_same_side(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _manifest(tmp_path)
    _split(tmp_path, 2, only=("run", "walk"), both_directions=True)
    for side in _sides(out, 1):
        assert side.classes == ("forwards", "backwards")
        clips = _clips(side)
        assert len(clips) == 8 and {path.split("/")[0] for path, _, _ in clips} == {"run", "walk"}
        assert all(label == int(backwards) for _, label, backwards in clips)
        assert set(Counter(path for path, _, _ in clips).values()) == {2}


def test_reversed_clips_stay_reversed_and_cannot_be_reversed_again(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    write_manifest(path, [ManifestRow(f"p{i}_a.avi", 0, reversed=i == 1) for i in range(2)])
    _split(tmp_path, 2)
    validated = [clip for fold in (1, 2) for clip in _clips(_sides(tmp_path / "out", fold)[1])]
    assert sorted(validated) == [("p0_a.avi", 0, False), ("p1_a.avi", 0, True)]
    with pytest.raises(UserError, match=r"p1_a\.avi is reversed already"):
        _split(tmp_path, 2, both_directions=True)


def _grouped(folder: Path, more: str = "") -> str:
    """Six persons, who are in no file's name, each with two clips of both classes."""
    rows = [f"{n:02}.mp4,{n % 2},p{n % 6},{n}" for n in range(24)]
    (folder / "clips.csv").write_text("\n".join(["path,label,group,own", *rows, more]))
    return str(folder / "clips.csv")


@pytest.mark.parametrize(
    ("words", "groups", "grouping"),
    [
        ([], 6, "groups: the list's column 'group'"),
        (["--group", r"\d+"], 24, r"groups: what --group '\d+' matches in the files' names"),
    ],
)
def test_the_lists_groups_stay_together_unless_an_expression_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], groups: int, grouping: str
) -> None:
    assert main(["data", "split", _grouped(tmp_path), f"{tmp_path}/out", "--folds", "3", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert grouping in printed
    sizes = f"16 clips to train on, 8 to validate on; groups: {groups * 2 // 3} and {groups // 3}"
    assert f"{tmp_path}/out/fold1: {sizes}" in printed
    for fold in (1, 2, 3):
        train, val = _sides(tmp_path / "out", fold)
        sides = [{side.group(clip) for clip in range(len(side))} for side in (train, val)]
        assert not set.intersection(*sides) and len(set.union(*sides)) == groups
        assert (tmp_path / f"out/fold{fold}/val.csv").read_text().startswith("path,label,group,own\n")


def test_files_without_a_group_are_counted_and_too_few_groups_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "split", _grouped(tmp_path, "x.mp4,0,,\ny.mp4,0,,"), f"{tmp_path}/out", "--folds"]
    assert main([*words, "9"]) == 2
    assert "--folds must be 2 to 8, the number of groups (p0, p1, p2, p3, p4, p5, x.mp4, y" in capsys.readouterr().err
    assert main([*words, "2"]) == 0
    alone = "groups: the list's column 'group'; 2 files without a group, each a group of its own"
    assert alone in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folds", "2", "--group", "(p"], "--group must be a regular expression, got '(p'"),
        (["--folds", "2", "--group", "q[0-9]"], "bend/p0_bend.avi: the group 'q[0-9]' matches nothing"),
        (["--folds", "2", "--group", "p|(q)"], "bend/p0_bend.avi: the group 'p|(q)' matches nothing"),
        (["--folds", "5", "--group", PERSON], "--folds must be 2 to 4, the number of groups (p0, p1, p2, p3), got 5"),
        (["--folds", "1", "--group", PERSON], "--folds must be 2 to 4"),
        (["--folds", "2", "--group", "^(p)"], "must be in at least two groups, got one, p; try another --group"),
        (["--folds", "2", "--group", PERSON, "--only", "runn"], "must have the class 'runn'; valid: bend, run, walk"),
    ],
)
def test_mistakes_exit_2_say_what_is_right_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status = main(["data", "split", str(_manifest(tmp_path)), str(tmp_path / "out"), *words])
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["data", "split", str(_manifest(tmp_path)), str(out), "--folds", "2", "--group", PERSON, "--only", "run"]
    assert main([*words, "--both-directions"]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/out/fold2: 4 clips to train on, 4 to validate on" in output
    lines = [f"{name:<9}              2/2              2/2" for name in ("forwards", "backwards")]
    assert "\n".join(["class      fold1 train/val  fold2 train/val", *lines]) in output
    assert "data.root" in output
    main(["data", "split", str(tmp_path / "clips.csv"), f"{tmp_path}/other", "--folds", "2"])
    assert "groups: each file is one (no column 'group', no --group)" in capsys.readouterr().out


def test_a_list_of_several_labels_with_all_columns_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels 3;17 and none, groups, spans, regions and columns of the user's own, in a list of two clips a person."""
    header = "path,label,num_frames,group,start_frame,end_frame,left,top,width,height,note"
    rows = [f'"{n}, {n}.mp4",{("0;1", ";")[n % 2]},84,p{n // 2},{n},{n + 9},{n},2,30,40,"n ""{n}"""' for n in range(8)]
    (tmp_path / "clips.csv").write_text("\n".join([header, *rows]))
    assert main(["data", "split", f"{tmp_path}/clips.csv", f"{tmp_path}/out", "--folds", "2"]) == 0
    assert "fold1: 4 clips to train on, 4 to validate on; groups: 2 and 2" in capsys.readouterr().out
    source = read_manifest(tmp_path / "clips.csv", "columns")
    for fold in (1, 2):
        found = []
        for side in ("train", "val"):
            text = (tmp_path / f"out/fold{fold}/{side}.csv").read_text().splitlines()
            manifest = read_manifest(tmp_path / f"out/fold{fold}/{side}.csv", "columns")
            assert sorted(text[0].split(",")) == sorted(header.split(","))
            assert all(line.endswith(f'"n ""{manifest.path(n)[0]}"""') for n, line in enumerate(text[1:]))
            found += [(manifest.row(clip), manifest.clip(clip).region) for clip in range(4)]
        assert sorted(found, key=str) == [(source.row(clip), source.clip(clip).region) for clip in range(8)]


def test_several_labels_are_split_by_each_and_kept(tmp_path: Path) -> None:
    rows = [
        ManifestRow(f"g{group}_{i}.mp4", label) for group in range(4) for i, label in enumerate(("0;1", "1;2", ";"))
    ]
    write_manifest(tmp_path / "clips.csv", rows)
    folds = _split(tmp_path, 2)
    assert [(fold.train, fold.val) for fold in folds] == [({"0": 2, "1": 4, "2": 2},) * 2] * 2
    both = [manifest for fold in (1, 2) for manifest in _sides(tmp_path / "out", fold)[1:]]
    found = sorted((side.path(i), side.labels_of(i)) for side in both for i in range(len(side)))
    assert found == sorted((row.path, row.labels) for row in rows)
    _split(tmp_path, 2, only=["0"])
    assert [_sides(tmp_path / "out", 1)[0].labels_of(i) for i in range(2)] == [(0, 1)] * 2  # labels stay
