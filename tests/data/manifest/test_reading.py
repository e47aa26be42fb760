"""Lists in all forms, what is wrong in them, what a manifest can say of itself, and that writing is read back."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.core.text import csv_text
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, reading, tables, write_manifest
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.data.manifest.reading import check_beside, check_same_classes, read_classes, read_rows, write_classes
from summit_train.data.video.region import Region
from summit_train.data.video.span import TO_THE_END, WHOLE, Span
from tests.data.manifest.test_tables import touch


def _read(folder: Path, text: str, classes: str | None = None) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "list.csv").write_text(text)
    if classes is not None:
        (folder / "classes.txt").write_text(classes)
    return read_manifest(folder / "list.csv")


def _clips(manifest: Manifest) -> list[tuple[str, int]]:
    return [(manifest.path(index), manifest.labels[index]) for index in range(len(manifest))]


# The forms of a list.


def test_a_csv_with_all_columns(tmp_path: Path) -> None:
    manifest = _read(
        tmp_path,
        "path,label,num_frames,fps,width,height,group,sha256,reversed\n"
        f"a/1.mp4,2,84,25,180,144, daria,{'78' * 31}00,0\n"
        '"a/2, b.mp4",0,,,,,da ria,,1\n'
        "/abs/3.mp4,1,-1,,,,daria ,,\nd,0,,,,, ,,\n",
    )
    assert _clips(manifest) == [("a/1.mp4", 2), ("a/2, b.mp4", 0), ("/abs/3.mp4", 1), ("d", 0)]
    assert [manifest.num_frames(index) for index in range(4)] == [84, None, None, None]
    assert [manifest.clip(index).is_reversed for index in range(4)] == [False, True, False, False]
    assert [manifest.sha256(index) for index in range(4)] == [b"x" * 31 + b"\0", None, None, None]
    # Blanks around a group are no part of it.
    assert [manifest.group(index) for index in range(4)] == ["daria", "da ria", "daria", None]
    assert (len(manifest), manifest.classes, manifest.class_names) == (4, None, ("0", "1", "2"))
    assert manifest.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("text", "clips"),
    [
        ("person, label ,path\ndaria,1,x.avi\n\nido,0,y z.avi\n", [("x.avi", 1, None), ("y z.avi", 0, None)]),
        ("\ufeffpath,label,num_frames\r\nx.avi,1,7\r\ny.avi,0,\r\n", [("x.avi", 1, 7), ("y.avi", 0, None)]),
        ('"path","label","num_frames"\n"a ""b"".mp4","1","7"\n', [('a "b".mp4', 1, 7)]),
        ("path,label,end_frame,start_frame\na,0,9,3\nb,1,, 0 \n", [("a", 0, None), ("b", 1, None)]),
        ("a b c.mp4 3\n\nfile\t0\nx, y  12\n", [("a b c.mp4", 3, None), ("file", 0, None), ("x, y", 12, None)]),
        ("a b.mp4 300 5\nc 7.mp4 1\nd/e 48 2\n", [("a b.mp4", 5, 300), ("c 7.mp4", 1, None), ("d/e", 2, 48)]),
    ],
)
def test_other_forms_of_lists(tmp_path: Path, text: str, clips: list[tuple[str, int, int | None]]) -> None:
    """With other columns, by a spreadsheet, in quotes, and header-less lists with and without frame counts."""
    manifest = _read(tmp_path, text)
    assert [(*clip, manifest.num_frames(index)) for index, clip in enumerate(_clips(manifest))] == clips
    spans = [Span(3, 9), WHOLE] if "end_frame" in text else [WHOLE] * len(clips)
    assert [manifest.clip(index).span for index in range(len(clips))] == spans


def test_names_are_labels_by_their_place_in_classes_txt(tmp_path: Path) -> None:
    manifest = _read(tmp_path, "path,label\na,jump high\nb,run\nc,2\n", "run\njump high\nwalk\n")
    assert manifest.labels.tolist() == [1, 0, 2]
    assert manifest.classes == manifest.class_names == ("run", "jump high", "walk")
    assert _read(tmp_path, "=a.mp4 0\n", "a\r\nb\r\n").classes == ("a", "b")
    names = ("a\u2028b", "c\x85d", "e\x1cf", "走")  # line breaks of Unicode are none here
    write_classes(tmp_path, names)
    assert read_classes(tmp_path / "classes.txt") == names


def test_other_columns_may_resemble_known_ones(tmp_path: Path) -> None:
    """One edit from a column that the list has, two edits from one that it lacks, or in the plural."""
    misspelt = {name: right for names, right in EDITS.items() for name in names.split()}
    two_edits = [f"{name[1:]}_{name[:1]}" for name in misspelt]
    others = ["labels", "paths", "second_label", "groups", "label_2", "label2", "widths", "foo"]
    for names in ([*others, *two_edits], [*others, *misspelt, *EDITS.values()]):
        assert _read(tmp_path, f"path,label,{','.join(names)}\na,1{',' * len(names)}\n").labels.tolist() == [1]


def test_what_is_no_list_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "pictures/run/1.jpg", "empty/run/.hidden.mp4")
    for name, wrong in (
        ("absent.csv", "absent.csv: the manifest cannot be read: No such file"),
        ("empty/run", "empty/run: must be a manifest, or have a sub-folder of videos for each class; has none"),
        ("empty", "empty: must have a clip, got none$"),
        ("pictures", r"pictures: must have a clip, got none; no videos by their names: 1 \.jpg$"),
    ):
        with pytest.raises(UserError, match=wrong):
            read_manifest(tmp_path / name)
    # What memory does not hold is refused before it is read.
    monkeypatch.setattr(reading, "free_memory", lambda: 3.0 * 2**20)
    _read(tmp_path, "a.mp4 0\n")
    with pytest.raises(UserError, match=r"list\.csv: must have 3 to 6 times its 2 MiB as free memory, got 3 MiB; try"):
        _read(tmp_path, "a.mp4 0\n" * (1 << 18))


# What is wrong, where, and what would be right: the text of the list, and the message after its name.

# Known columns, and what is one edit from them: a letter less, more, swapped with its neighbour, or another.
EDITS = {"num_frames": "num_frame", "reversed": "reversedd", "sha256": "sha265", "group": "gruop Group",
         "end_frame": "endframe", "start_frame": "star_frame"}  # fmt: skip
NO_NAMES = "label must be an integer, as classes.txt is missing next to the manifest, got"
PLAIN = "must be `path label` in a list without a header, got"
COUNT = "num_frames must be a positive integer, or empty, got"
FRAME = "must be the number of a frame, 0 or more, or empty, got"
SPANS = "path,label,num_frames,start_frame,end_frame\na,0,20,0,20\nb,1,"
HIGHEST = "label must be from 0 to 2147483646, got"
MISTAKES = [
    *((text, " must have a clip, got none") for text in ("", "\n \n", "path,label\n", "path,label\n\n\n")),
    ("path,class\na,1\n", "1: the header must have one column 'label', got path,class"),
    ("\nlabel,youtube_id\n", "2: the header must have one column 'path'"),
    ("path,label,path\n", "1: the header must have one column 'path'"),
    ("path,lable,label_2\na,0,1\n", "1: the header must have one column 'label'"),
    *(
        (f"path,label,{name}\na,0,\n", f"1: unknown column '{name}': did you mean '{right}'?")
        for right, names in EDITS.items()
        for name in names.split()
    ),
    ("path,label\na,0\n\nb,1,2\n", "4: must have 2 cells, as the header has, got 3; put a path with a comma"),
    ('path,label\na,0\n"b,1\nc,2\n', "3: a double quote must be closed on its line"),
    ('path,label\n"a\n\nb",0\n,1\n', "5: path must name a video or a folder of pictures, got an empty cell"),
    ("path,label\na,0\nb,-1\n", f"3: {HIGHEST} -1"),
    ("path,label\ny,1\nx,3;-1\n", f"3: {HIGHEST} -1"),
    (f"path,label\na,{2**31 - 1}\n", f"2: {HIGHEST} {2**31 - 1}"),
    ("path,label\na,0\nb,\n", f"3: {NO_NAMES} ''; write the class names into it"),
    ("path,label\ny,1\nx,3;\n", f"3: {NO_NAMES} ''"),
    ("path,label\ny,1\nx,3;x\n", f"3: {NO_NAMES} 'x'"),
    ("path,label\na,1.0\n", f"2: {NO_NAMES} '1.0'"),
    ("a.mp4 jump\n", f"1: {NO_NAMES} 'jump'"),
    ("path,label\ny,1\nx,3;3\n", "3: label must name each class once, got '3;3'"),
    *((f"path,label,num_frames\na,0,12\nb,0,{n}\n", f"3: {COUNT} '{n}'") for n in ("12.5", "0", "many", "9" * 20)),
    ("path,label,reversed\na,0,1\nb,0,maybe\n", "3: reversed must be 0 or 1, got 'maybe'"),
    ("a.mp4,3\n", f"1: {PLAIN} 'a.mp4,3'; separate path and label by a blank"),
    *((f"a.mp4 0\n{line}\n", f"2: {PLAIN} '{line}'") for line in ("b.mp4", "a.mp4, 0", "b.mp4 ,0")),
    *(
        (f"path,label,sha256\na.mp4,0,\nb.mp4,0,{text}\n", "3: sha256 must be 64 hexadecimal digits")
        for text in ("ab", "z" * 64, "ab" * 31 + " a", "ab" * 31 + "  ")
    ),
    (f"{SPANS},x,9\n", f"3: start_frame {FRAME} 'x'"),
    (f"{SPANS},1.5,9\n", f"3: start_frame {FRAME} '1.5'"),
    (f"{SPANS},-1,9\n", f"3: start_frame {FRAME} '-1'"),
    (f"{SPANS},,-1\n", f"3: end_frame {FRAME} '-1'"),
    (f"{SPANS},0,99999999999\n", f"3: end_frame {FRAME} '99999999999'"),
    (f"{SPANS},5,5\n", "3: end_frame must be after start_frame, got 5 to 5"),
    (f"{SPANS},,0\n", "3: end_frame must be after start_frame, got 0 to 0"),
    (f"{SPANS}20,10,21\n", "3: the span must be within the video's 20 frames, got 10:21"),
    (f"{SPANS}20,20,\n", "3: the span must be within the video's 20 frames, got 20:"),
]
ONE_OF = "label must be one of the 2 classes in classes.txt, got"
MISTAKES_OF_CLASSES = [
    ("jmup", "jump\nrun\n", f"list.csv:3: {ONE_OF} 'jmup': did you mean 'jump'?"),
    ("zzz", "jump\nrun\n", f"list.csv:3: {ONE_OF} 'zzz'"),
    ("", "jump\nrun\n", f"list.csv:3: {ONE_OF} ''"),
    ("2", "jump\nrun\n", "list.csv:3: label must be from 0 to 1, as classes.txt has 2 classes, got 2"),
    ("run", "run\njump\nrun\n", "classes.txt:3: must be the name of another class, got 'run' again"),
    ("run", "run\n\njump\n", "classes.txt:2: must be the name of another class, got an empty line"),
]


@pytest.mark.parametrize(
    ("text", "classes", "message"),
    [
        *((text, None, f"list.csv:{message}") for text, message in MISTAKES),
        *((f"path,label\na,run\nb,{label}\n", classes, message) for label, classes, message in MISTAKES_OF_CLASSES),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, classes: str | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(tmp_path, text, classes)
    assert str(caught.value).startswith(f"{tmp_path}/{message}") and "\n" not in str(caught.value)


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
        group=st.none() | _TEXT.map(str.strip).filter(bool),
        reversed=st.booleans(),
    ),
    _SPANS,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_ROWS, min_size=1, max_size=6))
def test_what_is_written_is_read(tmp_path: Path, rows: list[ManifestRow]) -> None:
    path = tmp_path / "m.csv"
    write_manifest(path, iter(rows))
    text = path.read_text()
    manifest, listed = read_rows(path)
    assert listed == rows
    assert [manifest.clip(clip).span for clip in range(len(rows))] == [row.span for row in rows]
    write_manifest(path, listed)
    assert path.read_text() == text
    sent = pickle.loads(pickle.dumps(manifest))
    assert all(np.array_equal(getattr(sent, one.name), getattr(manifest, one.name)) for one in fields(Manifest))


def test_columns_that_no_row_fills_are_not_written_and_a_path_may_have_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_manifest(path, [ManifestRow("a.mp4", "run", num_frames=7), ManifestRow("b, c.mp4", 3, reversed=True)])
    assert path.read_text() == 'path,label,num_frames,reversed\na.mp4,run,7,0\n"b, c.mp4",3,,1\n'
    write_manifest(path, [ManifestRow(os.fsdecode(b"clip \xff\xe9.mp4"), 0)])
    assert os.fsencode(read_manifest(path).path(0)) == b"clip \xff\xe9.mp4"


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

    def read(**sizes: int) -> object:
        try:
            with tables.opened(tmp_path / "m.csv") as file:
                file.readline()
                found = list(tables.read_tables(tmp_path / "m.csv", file, 2, file.readline(), **sizes))
        except UserError as error:
            return str(error)
        cells = {name: [cell for _, columns in found for cell in columns[name]] for name in found[0][1]}
        return [line for lines, _ in found for line in lines], cells

    expected = read()
    assert read(block=block, rows=2) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_plain_cells", lambda block, width: None)
        assert read(block=block, rows=2) == expected


# A list that changes while it is read.


@pytest.mark.parametrize("how", ["replaced", "rewritten", "truncated", "longer"])
def test_a_list_that_changes_while_it_is_read_is_the_old_one_or_refused(tmp_path: Path, how: str) -> None:
    """A half of each version would be a list that nobody wrote."""
    path = tmp_path / "list.csv"
    rows = [f"{number:04},{{}},{{}}\n" for number in range(2000)]
    old, new = ("path,label,note\n" + "".join(row.format(version, version) for row in rows) for version in (0, 1))
    path.write_text(old)

    def change() -> None:
        if how == "replaced":
            (tmp_path / "new.csv").write_text(new)
            (tmp_path / "new.csv").replace(path)
        elif how == "truncated":
            os.truncate(path, len(old) // 2)
        else:
            with path.open("r+" if how == "rewritten" else "a") as file:
                file.write(new)

    def read() -> Manifest:
        with tables.opened(path, "the manifest ") as file:
            found = tables.read_tables(path, file, 1, file.readline(), block=1000)
            first = [next(found), next(found)]
            change()
            columns = tables.parse_tables(path, [*first, *found], None)
        return Manifest(str(path), "", None, **columns)

    if how == "replaced":
        assert read().labels.tolist() == [0] * len(rows)
    else:
        os.utime(path, ns=(0, 0))  # a change within one tick of the file system's clock has the same time
        with pytest.raises(UserError, match=r"list\.csv: the manifest must not change while it is read, got another"):
            read()


def test_rows_and_columns_are_of_one_reading(tmp_path: Path) -> None:
    _read(tmp_path, "path,label,note\na,0,A\nb,1,B\n")
    manifest, rows = read_rows(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_text("path,label,note\nb,1,B\n")
    assert [row.others for row in rows] == [(("note", "A"),), (("note", "B"),)]
    assert [(row.path, row.label) for row in rows] == _clips(manifest) == [("a", 0), ("b", 1)]


# What a manifest can say of itself.


def test_labels_and_classes_must_be_those_of_the_network(tmp_path: Path) -> None:
    manifest = _read(tmp_path, "path,label\na,0\n\nb,4\nc,7\n")
    manifest.check_labels(8)
    for text, number, message in (
        (
            "a,0\n\nb,4\nc,7",
            4,
            r"csv:4: label must be from 0 to 3, as model.num_classes is 4, got 4; try .*_classes=8$",
        ),
        ("x,2;7", 7, r"csv:2: label must be from 0 to 6, as model\.num_classes is 7, got 7; try model\.num_classes=8"),
        ("x,;", 7, r"list\.csv: must have a label, got none in 1 clip"),
    ):
        with pytest.raises(UserError, match=message):
            _read(tmp_path, f"path,label\n{text}\n").check_labels(number)
    manifest = _read(tmp_path, "path,label\na,run\nb,walk\n", "run\nwalk\nsit\nbend\n")
    manifest.check_labels(4)
    for number in (3, 10):
        with pytest.raises(UserError, match=rf"must be 4, got {number}: .*list\.csv has 4 classes by its classes\.txt"):
            manifest.check_labels(number)


def test_classes_of_two_lists_are_compared(tmp_path: Path) -> None:
    manifests = []
    for name, classes in zip("abcde", ("run\nwalk\n", "run\nwalk\n", "walk\nrun\n", "run\n", None), strict=True):
        manifests.append(_read(tmp_path / name, "path,label\nx,0\n", classes))
    first, same, swapped, fewer, nameless = manifests
    for one, other in ((first, same), (first, nameless), (nameless, first)):
        check_same_classes(one.source, one.classes, other.source, other.classes)
    for other, difference in ((swapped, "their order"), (fewer, "'walk'")):
        with pytest.raises(UserError, match=rf"a/list\.csv and {other.source} must have the same .* in {difference}$"):
            check_same_classes(first.source, first.classes, other.source, other.classes)
    check_beside(tmp_path / "a/new.csv", ("run", "walk"), tmp_path / "source")
    with pytest.raises(
        UserError, match=r"classes\.txt: must have the classes of .*source, got others; write to another"
    ):
        check_beside(tmp_path / "a/new.csv", ("run",), tmp_path / "source")
    for bad in ("a\nb", "a "):
        with pytest.raises(UserError, match="a class must have a name of one line without a blank around it, got 'a"):
            write_classes(tmp_path, [bad])


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


def test_a_clip_may_have_several_labels_or_none(tmp_path: Path) -> None:
    classes = "sit\nstand\na;b\nrun\n"
    manifest = _read(tmp_path, "path,label\nx,3;0\ny,2\nz,;\nu, stand ; 3\nv,a;b\n", classes)
    labels = [(0, 3), (2,), (), (1, 3), (2,)]
    assert [manifest.labels_of(clip) for clip in range(5)] == labels
    assert manifest.labels.tolist() == [0, 2, -1, 1, 2] and manifest.num_labels == 4
    hot = manifest.class_labels(np.array([0, 2, 3]), 4)
    assert hot.tolist() == [[True, False, False, True], [False] * 4, [False, True, False, True]]
    assert hot.dtype == np.bool_
    # Class 3 is not one of three.
    assert manifest.class_labels(np.array([0, 1]), 3).tolist() == [[True, False, False], [False, False, True]]
    single = manifest.class_labels(np.array([4, 1, 3]), None)
    assert single.tolist() == [2, 2, 1] and single.dtype == np.int64
    clips, of_clips = manifest.label_pairs()
    pairs = sorted((clip, label) for clip, several in enumerate(labels) for label in several)
    assert sorted(zip(clips.tolist(), of_clips.tolist(), strict=True)) == pairs
    assert manifest.clips_per_class == {"sit": 1, "stand": 1, "a;b": 2, "run": 2}
    _, rows = read_rows(manifest.source)
    assert [row.label for row in rows] == ["0;3", 2, ";", "1;3", 2] and [row.labels for row in rows] == labels
    write_manifest(tmp_path / "again.csv", rows)
    assert read_manifest(tmp_path / "again.csv").fingerprint() == manifest.fingerprint()
    assert manifest.not_single() == f"{tmp_path}/list.csv:4: has no labels"
    bare = _read(tmp_path, "a b.mp4 2;1\nc 3\n")  # header-less lists too
    assert [(bare.path(clip), bare.labels_of(clip)) for clip in (0, 1)] == [("a b.mp4", (1, 2)), ("c", (3,))]
    one = _read(tmp_path / "one", "path,label\nx,3\ny,0\n")
    assert one.not_single() is None and len(one.more_labels) == 0
    assert one.fingerprint() == "ac730681c36356611de70e8787d23b0b"
    pairs_of_labels = (("3", "0"), ("3;4", "0"), ("3", "0;4"), ("3;5", "0"), (";", "0"), ("3;4", "0;4"))
    found = {_read(tmp_path / "one", f"path,label\nx,{x}\ny,{y}\n").fingerprint() for x, y in pairs_of_labels}
    assert len(found) == len(pairs_of_labels)


# A clip.


def test_a_clip_in_words_and_in_order() -> None:
    clip = Clip(os.fsdecode(b"\xff.mp4"), Span(3, 7), is_reversed=True)
    assert str(clip) == "\\udcff.mp4 3:7 backwards" and str(Clip("a.mp4", Span(3))) == "a.mp4 3:"
    values = {"path": "\udcff.mp4", "reversed": True, "start_frame": 3, "end_frame": 7}
    assert clip.values() == values and Clip("a.mp4").values() == {"path": "a.mp4"}
    clip = replace(clip, path="a", region=Region(0, 1, 8, 6))
    assert str(clip) == "a 3:7 (8 x 6 pixels at 0, 1) backwards"
    assert clip.values() == values | {"path": "a", "left": 0, "top": 1, "width": 8, "height": 6}
    clips = [Clip("a"), Clip("a", is_reversed=True), Clip("a", Span(2, 4)), Clip("a", Span(9, 3)), Clip("b")]
    clips.insert(1, Clip("a", region=Region(0, 0, 8, 8)))
    assert sorted([clips[i] for i in (3, 4, 0, 5, 2, 1)]) == clips


def test_a_table_of_clips_is_a_manifest_of_them(tmp_path: Path) -> None:
    clips = [Clip("a", Span(3)), Clip("a", region=Region(0, 1, 8, 6)), Clip("a", Span(1, 3), is_reversed=True)]
    rows = zip(clip_columns(clips), ["label", 0, 1, 2], strict=True)
    (tmp_path / "list.csv").write_text(csv_text((*row, label) for row, label in rows))
    listed = read_manifest(tmp_path / "list.csv", "columns")
    assert [listed.clip(number) for number in range(3)] == clips
    assert clip_columns([Clip("a")]) == [("path",), ("a",)]
