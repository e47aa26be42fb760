from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, reading, tables, write_manifest
from summit_train.data.manifest.reading import check_beside, check_same_classes, read_classes, read_rows, write_classes
from summit_train.data.video.span import TO_THE_END, WHOLE, Span


def _read(folder: Path, text: str, classes: str | None = None) -> Manifest:
    (folder / "list.csv").write_text(text)
    if classes is not None:
        (folder / "classes.txt").write_text(classes)
    return read_manifest(folder / "list.csv")


def test_a_list_that_memory_does_not_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "free_memory", lambda: 3.0 * 2**20)
    _read(tmp_path, "a.mp4 0\n")
    with pytest.raises(UserError, match=r"list\.csv: a list of 2 MiB needs 3 to 6 times .*, and 3 MiB are free; try"):
        _read(tmp_path, "a.mp4 0\n" * (1 << 18))


def _clips(manifest: Manifest) -> list[tuple[str, int]]:
    return [(manifest.path(index), manifest.labels[index]) for index in range(len(manifest))]


# The three forms.


def test_a_csv_with_all_columns(tmp_path: Path) -> None:
    manifest = _read(
        tmp_path,
        "path,label,num_frames,fps,width,height,group,sha256,reversed\n"
        f"a/1.mp4,2,84,25,180,144,daria,{'78' * 31}00,0\n"
        '"a/2, b.mp4",0,,,,,,,1\n'
        "/abs/3.mp4,1,-1,,,,,,\n",
    )
    assert _clips(manifest) == [("a/1.mp4", 2), ("a/2, b.mp4", 0), ("/abs/3.mp4", 1)]
    assert [manifest.num_frames(index) for index in range(3)] == [84, None, None]
    assert [manifest.clip(index).is_reversed for index in range(3)] == [False, True, False]
    assert [manifest.sha256(index) for index in range(3)] == [b"x" * 31 + b"\0", None, None]
    assert (len(manifest), manifest.classes, manifest.class_names) == (3, None, ("0", "1", "2"))
    assert manifest.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("text", "clips"),
    [
        ("person, label ,path\ndaria,1,x.avi\n\nido,0,y z.avi\n", [("x.avi", 1, None), ("y z.avi", 0, None)]),
        ("\ufeffpath,label,num_frames\r\nx.avi,1,7\r\ny.avi,0,\r\n", [("x.avi", 1, 7), ("y.avi", 0, None)]),
        ('"path","label","num_frames"\n"a ""b"".mp4","1","7"\n', [('a "b".mp4', 1, 7)]),
        ("a b c.mp4 3\n\nfile\t0\nx, y  12\n", [("a b c.mp4", 3, None), ("file", 0, None), ("x, y", 12, None)]),
        ("a b.mp4 300 5\nc 7.mp4 1\nd/e 48 2\n", [("a b.mp4", 5, 300), ("c 7.mp4", 1, None), ("d/e", 2, 48)]),
    ],
)
def test_other_forms_of_lists(tmp_path: Path, text: str, clips: list[tuple[str, int, int | None]]) -> None:
    """With other columns, by a spreadsheet, in quotes, and header-less lists with and without frame counts."""
    manifest = _read(tmp_path, text)
    assert [(*clip, manifest.num_frames(index)) for index, clip in enumerate(_clips(manifest))] == clips


def test_cells_of_spans_are_read_and_empty_ones_are_the_videos_own(tmp_path: Path) -> None:
    for columns, rows, spans in (
        ("start_frame,end_frame", "a,0,3,9\na,1,,4\na,1,5,\na,0,,\na,0, 0 ,\n", [(3, 9), (0, 4), (5,), (), ()]),
        ("end_frame", "a,0,4\nb,1,\n", [(0, 4), ()]),
        ("group", "a,0,\n", [()]),
    ):
        manifest = _read(tmp_path, f"path,label,{columns}\n{rows}")
        assert [manifest.clip(clip).span for clip in range(len(manifest))] == [Span(*span) for span in spans]


def test_names_are_labels_by_their_place_in_classes_txt(tmp_path: Path) -> None:
    manifest = _read(tmp_path, "path,label\na,jump high\nb,run\nc,2\n", "run\njump high\nwalk\n")
    assert manifest.labels.tolist() == [1, 0, 2]
    assert manifest.classes == manifest.class_names == ("run", "jump high", "walk")


def test_a_name_with_a_line_break_of_unicode_is_one_class(tmp_path: Path) -> None:
    write_classes(tmp_path, names := ("a\u2028b", "c\x85d", "e\x1cf", "走"))
    assert read_classes(tmp_path / "classes.txt") == names
    assert _read(tmp_path, "=a.mp4 0\n", "a\r\nb\r\n").classes == ("a", "b")
    with pytest.raises(UserError, match=r"a class must have a name of one line without a blank around it, got 'a\\nb'"):
        write_classes(tmp_path, ["a\nb"])


def test_class_folders(tmp_path: Path) -> None:
    for name in ("walk/b.mp4", "walk/a.AVI", "run/deep/c.webm", "run/notes.txt", "jump/.hidden.mp4", ".git/x.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    manifest = read_manifest(tmp_path)
    assert manifest.classes == ("jump", "run", "walk")
    listed = [("run/deep/c.webm", 1), ("walk/a.AVI", 2), ("walk/b.mp4", 2)]
    assert _clips(manifest) == [(str(tmp_path / path), label) for path, label in listed]


def test_folders_of_pictures_in_class_folders_are_clips(tmp_path: Path) -> None:
    """One with a clip below it is none, such as a folder of videos with its cover; nor is a class folder."""
    for name in ("walk/b/img_00001.jpg", "walk/b/.thumbs/1.jpg", "walk/deep/c/1.PNG", "walk/d/cover1.jpg",
                 "walk/d/e/f.mp4", "walk/1.jpg", "walk/notes/a.txt", "walk/g/h.mp4", "walk/g/2.jpg",
                 "walk/x/flow_x_1.jpg", "walk/x/flow_y_1.jpg", "walk/.hidden/1.jpg", "run/1.jpg"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    manifest = read_manifest(tmp_path)
    assert manifest.classes == ("run", "walk")
    paths = ["walk/b", "walk/d/e/f.mp4", "walk/deep/c", "walk/g/h.mp4", "walk/x"]
    assert _clips(manifest) == [(str(tmp_path / path), 1) for path in paths]
    with pytest.raises(UserError, match=r"walk/b: no clip found|walk/b: must be a manifest"):
        read_manifest(tmp_path / "walk/b")
    (tmp_path / "set/run").mkdir(parents=True)
    (tmp_path / "set/run/1.jpg").touch()
    with pytest.raises(UserError, match=r"set: no clip found in it; no videos by their names: 1 \.jpg$"):
        read_manifest(tmp_path / "set")


# Writing.

_TEXT = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
_SPANS = st.just(WHOLE) | st.builds(
    lambda start, length: Span(start, TO_THE_END if length is None else start + length),
    st.integers(0, 10**6),
    st.none() | st.integers(1, 10**6),
)
_ROWS = st.builds(
    lambda row, span: replace(row, span=span, num_frames=row.num_frames if span == WHOLE else None),
    st.builds(
        ManifestRow,
        path=_TEXT,
        label=st.integers(0, 400),
        num_frames=st.none() | st.integers(1, 10**6),
        group=st.none() | _TEXT,
        reversed=st.booleans(),
    ),
    _SPANS,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_ROWS, min_size=1, max_size=6))
def test_what_is_written_is_read(tmp_path: Path, rows: list[ManifestRow]) -> None:
    path = tmp_path / "m.csv"
    write_manifest(path, iter(rows))
    manifest, text = read_manifest(path), path.read_text()
    assert list(read_rows(manifest)) == list(read_rows(pickle.loads(pickle.dumps(manifest)))) == rows
    assert [manifest.clip(clip).span for clip in range(len(rows))] == [row.span for row in rows]
    write_manifest(path, list(read_rows(manifest)))
    assert path.read_text() == text


_LINES = st.lists(
    st.sampled_from(["a.mp4,1,x", '"b, c.mp4",2,x', 'd.mp4,0;1,"two\nlines"', "é.mp4,;,", "", '"e ""f"".mp4",3,y']),
    min_size=1, max_size=9,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=_LINES,
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.sampled_from(["", "\n", "x,1\n"]),
    block=st.integers(1, 40),
)
def test_the_size_of_blocks_changes_nothing(tmp_path: Path, lines: list[str], end: str, last: str, block: int) -> None:
    (tmp_path / "m.csv").write_text(f"\npath,label,note{end}{end.join(lines)}{end}{last}", newline="")

    def read() -> object:
        try:
            manifest = read_manifest(tmp_path / "m.csv")
        except UserError as error:
            return str(error)
        return list(read_rows(manifest)), manifest.lines.tolist(), manifest.fingerprint()

    expected = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK", block)
        patch.setattr(tables, "_ROWS", 2)
        assert read() == expected
        patch.setattr(tables, "_plain_cells", lambda block, width: None)
        assert read() == expected


def test_columns_that_no_row_fills_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_manifest(path, [ManifestRow("a.mp4", "run", num_frames=7), ManifestRow("b, c.mp4", 3, reversed=True)])
    assert path.read_text() == 'path,label,num_frames,reversed\na.mp4,run,7,0\n"b, c.mp4",3,,1\n'


def test_a_path_of_any_bytes_survives(tmp_path: Path) -> None:
    name = os.fsdecode(b"clip \xff\xe9.mp4")
    write_manifest(tmp_path / "m.csv", [ManifestRow(name, 0)])
    assert os.fsencode(read_manifest(tmp_path / "m.csv").path(0)) == b"clip \xff\xe9.mp4"


@pytest.mark.parametrize("name", ["labels", "paths", "second_label", "groups", "label_2", "label2", "widths", "foo"])
def test_columns_of_the_users_own_may_resemble_known_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / "list.csv").write_text(f"path,label,{name}\na.mp4,1,x\n")
    assert read_manifest(tmp_path / "list.csv").labels.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("num_frame", "num_frames"), ("reversedd", "reversed"), ("sha265", "sha256"), ("gruop", "group"),
        ("Group", "group"), ("endframe", "end_frame"),
    ],
)  # fmt: skip
def test_a_column_that_is_one_edit_from_a_known_one_is_named_where_the_list_lacks_that(
    tmp_path: Path, name: str, column: str
) -> None:
    """A letter less, more, swapped with its neighbour, or another."""
    with pytest.raises(UserError, match=rf"list\.csv:1: unknown column '{name}': did you mean '{column}'\?"):
        _read(tmp_path, f"path,label,{name}\na.mp4,1,\n")
    assert _read(tmp_path, f"path,label,{name},{column}\na.mp4,1,,\n").labels.tolist() == [1]
    two = f"{name[1:]}_{name[:1]}"  # two edits from it
    assert _read(tmp_path, f"path,label,{two}\na.mp4,1,\n").labels.tolist() == [1]


# Links.


def _classes(folder: Path, *videos: str) -> None:
    for video in videos:
        (folder / video).parent.mkdir(parents=True, exist_ok=True)
        (folder / video).touch()


def test_videos_behind_links_are_clips(tmp_path: Path) -> None:
    _classes(tmp_path, "set/walk/1.mp4", "set/run/1.mp4", "disk/session/2.mp4", "disk/session/deeper/3.mp4")
    _classes(tmp_path, "elsewhere/4.mp4")
    (tmp_path / "set/walk/session").symlink_to(tmp_path / "disk/session")
    (tmp_path / "set/jump").symlink_to("../elsewhere")
    (tmp_path / "set/run/5.mp4").symlink_to("../walk/1.mp4")
    manifest = read_manifest(tmp_path / "set")
    assert manifest.classes == ("jump", "run", "walk")
    paths = ["jump/4.mp4", "run/1.mp4", "run/5.mp4", "walk/1.mp4", "walk/session/2.mp4", "walk/session/deeper/3.mp4"]
    assert [manifest.clip(clip).path for clip in range(len(manifest))] == paths


@pytest.mark.parametrize(
    ("link", "target", "wrong"),
    [
        ("jump", "/not/mounted", r"set/jump: is a link to /not/mounted, which is not there; mount it, or remove"),
        ("walk/session", "../gone", r"set/walk/session: is a link to ../gone, which is not there"),
        ("walk/2.mp4", "gone.mp4", r"set/walk/2.mp4: is a link to gone.mp4, which is not there"),
        ("walk/up", "..", r"set/walk/up/walk: leads to .*set/walk once more, through a link; remove one of the two"),
        ("walk/again", ".", r"set/walk/again: leads to .*set/walk once more, through a link"),
    ],
)
def test_links_that_lead_nowhere_or_in_a_loop_are_named(tmp_path: Path, link: str, target: str, wrong: str) -> None:
    _classes(tmp_path, "set/walk/1.mp4", "set/run/1.mp4")
    (tmp_path / "set" / link).symlink_to(target)
    with pytest.raises(UserError, match=wrong):
        read_manifest(tmp_path / "set")


# What is wrong, where, and what would be right.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "list.csv: no clip found in it") for text in ("", "\n \n", "path,label\n", "path,label\n\n\n")),
        ("path,class\na,1\n", "list.csv:1: the header must have one column 'label', got path, class"),
        ("\nlabel,youtube_id\n", "list.csv:2: the header must have one column 'path'"),
        ("path,label,path\n", "list.csv:1: the header must have one column 'path'"),
        ("path,label,num_frame\na,0,1\n", "list.csv:1: unknown column 'num_frame': did you mean 'num_frames'"),
        ("path,label\na,0\n\nb,1,2\n", "list.csv:4: 3 fields where the header has 2"),
        ('path,label\na,0\n"b,1\nc,2\n', "list.csv:3: a double quote is not closed"),
        ('path,label\n"a\n\nb",0\n,1\n', "list.csv:5: the path is empty"),
        ("path,label\na,0\nb,-1\n", "list.csv:3: label -1 is out of range: labels start from 0"),
        (f"path,label\na,{10**20}\n", f"list.csv:2: label {10**20} is out of range"),
        ("path,label\na,0\nb,\n", "list.csv:3: the label is empty"),
        ("path,label\na,1.0\n", "list.csv:2: label '1.0' is a name, but classes.txt is missing next to the manifest"),
        *(
            (f"path,label,num_frames\na,0,12\nb,0,{count}\n", f"list.csv:3: num_frames {must}, got '{count}'")
            for must in ("must be a positive integer, or empty",)
            for count in ("12.5", "0", "many", "9" * 20)
        ),
        ("path,label,reversed\na,0,1\nb,0,maybe\n", "list.csv:3: reversed must be 0 or 1, got 'maybe'"),
        ("a.mp4,3\n", "list.csv:1: 'a.mp4,3' is neither `path label` nor below a header"),
        ("a.mp4 1\nb.mp4\n", "list.csv:2: 'b.mp4' is neither"),
        ("a.mp4, 0\n", "list.csv:1: 'a.mp4, 0' is neither"),
        ("a.mp4 0\nb.mp4 ,0\n", "list.csv:2: 'b.mp4 ,0' is neither"),
        ("path,lable,label_2\na,0,1\n", "list.csv:1: the header must have one column 'label'"),
        ("path,label,star_frame\na,0,1\n", "list.csv:1: unknown column 'star_frame': did you mean 'start_frame'?"),
        ("a.mp4 jump\n", "list.csv:1: label 'jump' is a name, but classes.txt is missing"),
        *(
            (f"path,label,sha256\na.mp4,0,\nb.mp4,0,{text}\n", "list.csv:3: sha256 must be 64 hexadecimal digits")
            for text in ("ab", "z" * 64, "ab" * 31 + " a", "ab" * 31 + "  ")
        ),
        *(
            (f"path,label,num_frames,start_frame,end_frame\na,0,20,0,20\nb,1,{cells}\n", f"list.csv:3: {message}")
            for cells, message in (
                (",x,9", "start_frame must be the number of a frame, 0 or more, or empty, got 'x'"),
                (",1.5,9", "start_frame must be the number of a frame, 0 or more, or empty, got '1.5'"),
                (",-1,9", "start_frame must be the number of a frame, 0 or more, or empty, got '-1'"),
                (",,-1", "end_frame must be the number of a frame, 0 or more, or empty, got '-1'"),
                (",0,99999999999", "end_frame must be the number of a frame, 0 or more, or empty, got '99999999999'"),
                (",5,5", "end_frame must be after start_frame, got 5 to 5"),
                (",,0", "end_frame must be after start_frame, got 0 to 0"),
                ("20,10,21", "a video has 20 frames, and the span 10:21 does not lie among them"),
                ("20,20,", "a video has 20 frames, and the span 20: does not lie among them"),
            )
        ),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "classes", "message"),
    [
        ("jmup", "jump\nrun\n", "list.csv:3: the class 'jmup' is not in classes.txt: did you mean 'jump'?"),
        ("zzz", "jump\nrun\n", "list.csv:3: the class 'zzz' is not in classes.txt with its 2 classes"),
        ("2", "jump\nrun\n", "list.csv:3: label 2 is out of range: classes.txt has 2 classes"),
        ("run", "run\njump\nrun\n", "classes.txt:3: the class 'run' is listed twice"),
        ("run", "run\n\njump\n", "classes.txt:2: an empty line among the classes"),
    ],
)
def test_mistakes_in_classes_are_named_with_their_place(tmp_path: Path, label: str, classes: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(tmp_path, f"path,label\na,run\nb,{label}\n", classes)
    assert message in str(caught.value)


def test_manifests_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.csv: the manifest cannot be read: No such file"):
        read_manifest(tmp_path / "absent.csv")
    with pytest.raises(UserError, match="must be a manifest, or have a sub-folder"):
        read_manifest(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="no clip found in it"):
        read_manifest(tmp_path)


# What a manifest can say of itself.


def test_check_labels(tmp_path: Path) -> None:
    manifest = _read(tmp_path, "path,label\na,0\n\nb,4\nc,7\n")
    manifest.check_labels(8)
    message = r"list\.csv:4: label 4 is out of range: model.num_classes is 4, .*this manifest needs 8"
    with pytest.raises(UserError, match=message):
        manifest.check_labels(4)
    manifest = _read(tmp_path, "path,label\na,run\nb,walk\n", "run\nwalk\nsit\nbend\n")
    manifest.check_labels(4)
    for number in (3, 10):
        with pytest.raises(UserError, match=rf"must be 4, got {number}: .*list\.csv has 4 classes by its classes\.txt"):
            manifest.check_labels(number)


def test_check_classes(tmp_path: Path) -> None:
    manifests = []
    for name, classes in zip("abcde", ("run\nwalk\n", "run\nwalk\n", "walk\nrun\n", "run\n", None), strict=True):
        (tmp_path / name).mkdir()
        manifests.append(_read(tmp_path / name, "path,label\nx,0\n", classes))
    first, same, swapped, fewer, nameless = manifests
    for one, other in ((first, same), (first, nameless), (nameless, first)):
        check_same_classes(one.source, one.classes, other.source, other.classes)
    for other, difference in ((swapped, "'only in their order'"), (fewer, "'walk'")):
        with pytest.raises(UserError, match=rf"a/list\.csv and {other.source} do not .* differ in {difference}$"):
            check_same_classes(first.source, first.classes, other.source, other.classes)


def test_the_fingerprint_is_of_paths_labels_directions_and_spans(tmp_path: Path) -> None:
    header = "path,label,reversed,num_frames,start_frame,end_frame\n"
    # As before there were spans, with and without their columns, and whatever the number of frames.
    same = ("a.mp4,0,0,7,,\nb.mp4,1,1,,0,\n", "a.mp4,0,,9,,\n\nb.mp4,1,1,,,\n")
    old = _read(tmp_path, "path,label,reversed,num_frames\na.mp4,0,0,7\nb.mp4,1,1,\n").fingerprint()
    assert [_read(tmp_path, header + rows).fingerprint() for rows in same] == [old] * 2
    assert old == "d531fd8c03b05cdca4f8e6fb82537620"
    others = ["a.mp,0,0,7,,\n4b.mp4,1,1,,,\n", "a.mp4,1,0,,,\nb.mp4,1,1,,,\n", "a.mp4,0,1,,,\nb.mp4,1,1,,,\n"]
    others += ["b.mp4,1,1,,,\na.mp4,0,0,7,,\n"]
    for first, second in (("1,", ","), (",6", ","), (",", "1,"), ("1,6", ","), ("1,5", ","), (",", "1,6"), (",7", ",")):
        others.append(f"a.mp4,0,0,7,{first}\nb.mp4,1,1,,{second}\n")
    assert len({_read(tmp_path, header + rows).fingerprint() for rows in others} | {old}) == len(others) + 1


def test_class_folders_have_the_same_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    for root in ("here", "there/deeper"):
        (tmp_path / root / "run").mkdir(parents=True)
        (tmp_path / root / "run" / "a.mp4").touch()
    here, there = (read_manifest(tmp_path / root) for root in ("here", "there/deeper"))
    assert here.fingerprint() == there.fingerprint()
    assert here.path(0) != there.path(0)


# Several labels.


def test_a_clip_may_have_several_labels_or_none(tmp_path: Path) -> None:
    classes = "sit\nstand\na;b\nrun\n"
    manifest = _read(tmp_path, "path,label\nx,3;0\ny,2\nz,;\nu, stand ; 3\nv,a;b\n", classes)
    assert [manifest.labels_of(clip) for clip in range(5)] == [(0, 3), (2,), (), (1, 3), (2,)]
    assert manifest.labels.tolist() == [0, 2, -1, 1, 2] and manifest.num_labels == 4
    hot = manifest.class_labels(np.array([0, 2, 3]), 4)
    assert hot.tolist() == [[True, False, False, True], [False] * 4, [False, True, False, True]]
    assert hot.dtype == np.bool_
    # Class 3 is not one of three.
    assert manifest.class_labels(np.array([0, 1]), 3).tolist() == [[True, False, False], [False, False, True]]
    single = manifest.class_labels(np.array([4, 1, 3]), None)
    assert single.tolist() == [2, 2, 1] and single.dtype == np.int64
    clips, labels = manifest.label_pairs()
    assert sorted(zip(clips.tolist(), labels.tolist(), strict=True)) == [(0, 0), (0, 3), (1, 2), (3, 1), (3, 3), (4, 2)]
    assert manifest.clips_per_class == {"sit": 1, "stand": 1, "a;b": 2, "run": 2}
    assert [row.label for row in read_rows(manifest)] == ["0;3", 2, ";", "1;3", 2]
    assert [row.labels for row in read_rows(manifest)] == [(0, 3), (2,), (), (1, 3), (2,)]
    write_manifest(tmp_path / "again.csv", read_rows(manifest))
    assert read_manifest(tmp_path / "again.csv").fingerprint() == manifest.fingerprint()
    assert manifest.not_single() == f"{tmp_path}/list.csv:4: has no labels"
    bare = _read(tmp_path, "a b.mp4 2;1\nc 3\n")  # header-less lists too
    assert [(bare.path(clip), bare.labels_of(clip)) for clip in (0, 1)] == [("a b.mp4", (1, 2)), ("c", (3,))]


def test_one_label_a_clip_is_stored_and_fingerprinted_as_ever(tmp_path: Path) -> None:
    one = _read(tmp_path, "path,label\nx,3\ny,0\n")
    assert one.not_single() is None and len(one.more_labels) == 0
    assert one.fingerprint() == "ac730681c36356611de70e8787d23b0b"
    fingerprints = {_read(tmp_path, f"path,label\nx,{x}\ny,{y}\n").fingerprint() for x, y in PAIRS}
    assert len(fingerprints) == len(PAIRS)


PAIRS = (("3", "0"), ("3;4", "0"), ("3", "0;4"), ("3;5", "0"), (";", "0"), ("3;4", "0;4"))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("3;3", r"list\.csv:3: a label must name each class once, got '3;3'"),
        ("3;", r"list\.csv:3: the label is empty"),
        ("3;x", r"list\.csv:3: label 'x' is a name, but classes\.txt is missing"),
        ("3;-1", r"list\.csv:3: label -1 is out of range"),
    ],
)
def test_bad_lists_of_labels_are_refused(tmp_path: Path, label: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _read(tmp_path, f"path,label\ny,1\nx,{label}\n")
    with pytest.raises(UserError, match=r"list\.csv:2: label 7 is out of range: model\.num_classes is 7"):
        _read(tmp_path, "path,label\nx,2;7\n").check_labels(7)
    with pytest.raises(UserError, match="must have a label, and no clip has one"):
        _read(tmp_path, "path,label\nx,;\n").check_labels(7)


def test_a_manifest_is_not_put_beside_the_names_of_other_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, ("bend", "run", "walk"))
    assert read_classes(tmp_path / "classes.txt") == ("bend", "run", "walk")
    check_beside(tmp_path / "new.csv", ("bend", "run", "walk"), tmp_path / "source")
    with pytest.raises(UserError, match=r"classes\.txt: has other classes than .*source; write to another folder"):
        check_beside(tmp_path / "new.csv", ("bend", "run"), tmp_path / "source")
