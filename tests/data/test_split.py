"""Splitting by groups: no group on both sides, every clip validated once, both directions of every clip."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.__main__ import main
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.split import split_manifest
from summit_train.errors import UserError

PERSON = "^[^_]+"
ACTIONS = ("bend", "run", "walk")


def _manifest(folder: Path, persons: int = 4, classes: tuple[str, ...] | None = ACTIONS) -> Path:
    """One clip of every person and action, in folders by action: bend/p0_bend.avi ..."""
    path = folder / "clips.csv"
    rows = [
        ManifestRow(f"{action}/p{person}_{action}.avi", label, 20 + person)
        for label, action in enumerate(ACTIONS)
        for person in range(persons)
    ]
    write_manifest(path, rows)
    if classes is not None:
        (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes))
    return path


def _clips(manifest: Manifest) -> list[tuple[str, int, bool]]:
    return [(manifest.path(i), manifest.label(i), manifest.is_reversed(i)) for i in range(len(manifest))]


def _sides(out: Path, fold: int) -> tuple[Manifest, Manifest]:
    return read_manifest(out / f"fold{fold}/train.csv"), read_manifest(out / f"fold{fold}/val.csv")


def _persons(manifest: Manifest) -> set[str]:
    return {Path(path).name.split("_")[0] for path, _, _ in _clips(manifest)}


@settings(max_examples=30, deadline=None)
@given(clips_of=st.lists(st.integers(1, 4), min_size=2, max_size=9), data=st.data())
def test_groups_stay_together_and_every_clip_is_validated_once(clips_of: list[int], data: st.DataObject) -> None:
    folds = data.draw(st.integers(2, len(clips_of)))
    names = [f"v/g{group}_{clip}.mp4" for group, count in enumerate(clips_of) for clip in range(count)]
    order = data.draw(st.permutations(names))
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder) / "all.csv", [ManifestRow(name, i % 3) for i, name in enumerate(order)])
        sizes = split_manifest(f"{folder}/all.csv", f"{folder}/out", folds=folds, group=PERSON)
        source = Counter(_clips(read_manifest(f"{folder}/all.csv")))
        validated: Counter[tuple[str, int, bool]] = Counter()
        for fold, (num_train, num_val) in enumerate(sizes, 1):
            train, val = _sides(Path(folder) / "out", fold)
            assert (len(train), len(val)) == (num_train, num_val)
            assert _persons(train).isdisjoint(_persons(val))
            assert Counter(_clips(train)) + Counter(_clips(val)) == source
            validated += Counter(_clips(val))
        assert len(sizes) == folds and validated == source


def test_parts_are_as_equal_as_can_be(tmp_path: Path) -> None:
    sizes = split_manifest(_manifest(tmp_path, persons=9), tmp_path / "out", folds=4, group=PERSON)
    assert sorted(val // 3 for _, val in sizes) == [2, 2, 2, 3]


def test_frame_counts_groups_and_classes_are_kept(tmp_path: Path) -> None:
    split_manifest(_manifest(tmp_path), tmp_path / "out", folds=2, group="p([0-9])")
    _, val = _sides(tmp_path / "out", 2)
    assert val.classes == ACTIONS
    assert [(val.path(i), val.num_frames(i)) for i in (0, 1)] == [("bend/p2_bend.avi", 22), ("bend/p3_bend.avi", 23)]
    text = (tmp_path / "out/fold2/val.csv").read_text().splitlines()
    assert text[:2] == ["path,label,num_frames,group", "bend/p2_bend.avi,0,22,2"]


def test_labels_without_names_need_no_classes_file(tmp_path: Path) -> None:
    split_manifest(_manifest(tmp_path, classes=None), tmp_path / "out", folds=2, group=PERSON, only=("2",))
    train, val = _sides(tmp_path / "out", 1)
    assert {label for _, label, _ in _clips(train) + _clips(val)} == {2}
    assert not (tmp_path / "out/fold1/classes.txt").exists()


def test_both_directions_give_each_clip_twice_on_the_same_side(tmp_path: Path) -> None:
    out = tmp_path / "out"
    split_manifest(_manifest(tmp_path), out, folds=2, group=PERSON, only=("run", "walk"), both_directions=True)
    for side in _sides(out, 1):
        assert side.classes == ("forwards", "backwards")
        clips = _clips(side)
        assert len(clips) == 8 and {path.split("/")[0] for path, _, _ in clips} == {"run", "walk"}
        assert all(label == int(backwards) for _, label, backwards in clips)
        assert set(Counter(path for path, _, _ in clips).values()) == {2}


def test_reversed_clips_stay_reversed_and_cannot_be_reversed_again(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    write_manifest(path, [ManifestRow(f"p{i}_a.avi", 0, reversed=i == 1) for i in range(2)])
    split_manifest(path, tmp_path / "out", folds=2, group=PERSON)
    assert _clips(_sides(tmp_path / "out", 2)[1]) == [("p1_a.avi", 0, True)]
    with pytest.raises(UserError, match=r"p1_a\.avi is reversed already"):
        split_manifest(path, tmp_path / "both", folds=2, group=PERSON, both_directions=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folds", "2", "--group", "(p"], "the group '(p' is no regular expression"),
        (["--folds", "2", "--group", "q[0-9]"], "bend/p0_bend.avi: the group 'q[0-9]' matches nothing"),
        (["--folds", "5", "--group", PERSON], "5 folds of 4 groups (p0, p1, p2, p3)"),
        (["--folds", "1", "--group", PERSON], "1 folds of 4 groups"),
        (["--folds", "2", "--group", PERSON, "--only", "runn"], "no class 'runn'; valid: bend, run, walk"),
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
    words = ["--folds", "2", "--group", PERSON, "--only", "run", "--both-directions"]
    assert main(["data", "split", str(_manifest(tmp_path)), str(tmp_path / "out"), *words]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/out/fold2: 4 clips to train on, 4 to validate on" in output
    assert "data.root" in output


def test_an_output_that_is_a_file_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    words = ["--folds", "2", "--group", PERSON]
    assert main(["data", "split", str(_manifest(tmp_path)), str(tmp_path / "out"), *words]) == 2
    assert "out: cannot be written (Not a directory)" in capsys.readouterr().err
