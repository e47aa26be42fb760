"""Clips that are spans of their files, in manifests: read, written, split, quarantined, imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.quarantine import kept_clips, read_quarantine, write_quarantine
from summit_train.data.manifest.split import Splitting, split_manifest
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import WHOLE, Span
from summit_train.spec import DataSpec

HEADER = "path,label,reversed,num_frames"
# Of "a.mp4,0,0,7" and "b.mp4,1,1," before there were spans.
BEFORE = "d531fd8c03b05cdca4f8e6fb82537620"


def _read(folder: Path, text: str) -> Manifest:
    (folder / "list.csv").write_text(text)
    return read_manifest(folder / "list.csv")


def _spans(manifest: Manifest) -> list[Span]:
    return [manifest.span(clip) for clip in range(len(manifest))]


def test_cells_are_read_and_empty_ones_are_the_videos_own(tmp_path: Path) -> None:
    rows = "a,0,3,9\na,1,,4\na,1,5,\na,0,,\na,0, 0 ,\n"
    manifest = _read(tmp_path, f"path,label,start_frame,end_frame\n{rows}")
    assert _spans(manifest) == [Span(3, 9), Span(0, 4), Span(5), WHOLE, WHOLE]
    assert _spans(_read(tmp_path, "path,label,end_frame\na,0,4\nb,1,\n")) == [Span(0, 4), WHOLE]
    assert _spans(_read(tmp_path, "path,label\na,0\n")) == [WHOLE]


def test_spans_enter_the_fingerprint_and_whole_videos_keep_theirs(tmp_path: Path) -> None:
    assert _read(tmp_path, f"{HEADER}\na.mp4,0,0,7\nb.mp4,1,1,\n").fingerprint() == BEFORE
    header = f"{HEADER},start_frame,end_frame\n"
    assert _read(tmp_path, header + "a.mp4,0,0,7,,\nb.mp4,1,1,,0,\n").fingerprint() == BEFORE
    texts = ["1,,,", ",6,,", ",,1,", "1,6,,", "1,5,,", ",,1,6", ",7,,"]
    cells = [tuple(text.rsplit(",", 2)) for text in texts]
    others = {
        _read(tmp_path, f"{header}a.mp4,0,0,7,{first}\nb.mp4,1,1,,{second},{third}\n").fingerprint()
        for first, second, third in cells
    }
    assert len(others | {BEFORE}) == len(texts) + 1


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (",x,9", "start_frame must be the number of a frame, 0 or more, or empty, got 'x'"),
        (",1.5,9", "start_frame must be the number of a frame, 0 or more, or empty, got '1.5'"),
        (",-1,9", "start_frame must be the number of a frame, 0 or more, or empty, got '-1'"),
        (",,-1", "end_frame must be the number of a frame, 0 or more, or empty, got '-1'"),
        (",0,99999999999", "end_frame must be the number of a frame, 0 or more, or empty, got '99999999999'"),
        (",5,5", "end_frame must be after start_frame, got 5 to 5"),
        (",6,5", "end_frame must be after start_frame, got 6 to 5"),
        (",,0", "end_frame must be after start_frame, got 0 to 0"),
        ("20,10,21", "a video has 20 frames, and the span 10:21 does not lie among them"),
        ("20,20,", "a video has 20 frames, and the span 20: does not lie among them"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, cells: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(tmp_path, f"path,label,num_frames,start_frame,end_frame\na,0,20,0,20\nb,1,{cells}\n")
    assert f"list.csv:3: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


# Quarantine and split.


def test_a_bad_span_leaves_the_others_of_its_file(tmp_path: Path) -> None:
    rows = [ManifestRow("a", 0).with_span(Span(2 * n, 2 * n + 2)) for n in range(3)]
    rows += [ManifestRow("b", 1).with_span(Span(2 * n)) for n in range(2)] + [ManifestRow("c", 0)]
    write_manifest(tmp_path / "list.csv", rows)
    manifest = read_manifest(tmp_path / "list.csv")
    data = DataSpec(train="x", val="x", quarantine=str(tmp_path / "bad.csv"))
    bad = [DecodeError("a", "is outside", Span(2, 4)), DecodeError("b", "so", Span(2))]
    write_quarantine(tmp_path / "bad.csv", bad)
    text = "path,reason,start_frame,end_frame\na,is outside,2,4\nb,so,2,\n"
    assert (tmp_path / "bad.csv").read_text() == text
    assert kept_clips(data, manifest).excluded.tolist() == [1, 4]
    # A bad file takes all of its spans with it.
    write_quarantine(tmp_path / "bad.csv", [DecodeError("a", "is empty"), DecodeError("b", "is outside", Span(7, 9))])
    assert (tmp_path / "bad.csv").read_text().splitlines()[1] == "a,is empty,,"
    assert kept_clips(data, manifest).excluded.tolist() == [0, 1, 2]
    assert [error.span for error in read_quarantine(tmp_path / "bad.csv")] == [WHOLE, Span(7, 9)]


@pytest.mark.parametrize("both", [False, True])
def test_a_split_keeps_spans_and_never_divides_a_files(tmp_path: Path, both: bool) -> None:
    rows = [ManifestRow(f"{n % 4}.mp4", n % 4 % 2).with_span(Span(n, n + 9)) for n in range(12)]
    write_manifest(tmp_path / "list.csv", rows)
    (fold, _) = split_manifest(tmp_path / "list.csv", tmp_path, Splitting(2, both_directions=both))
    sides = [read_manifest(fold.folder / f"{side}.csv") for side in ("train", "val")]
    found = [[(side.path(clip), side.span(clip)) for clip in range(len(side))] for side in sides]
    assert sorted({*found[0], *found[1]}) == sorted((row.path, row.span) for row in rows)
    assert not {path for path, _ in found[0]} & {path for path, _ in found[1]}
    assert sum(map(len, found)) == (24 if both else 12)
