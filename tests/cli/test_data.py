"""`summit-train data`: index, scan, motion and split, and pack."""

from __future__ import annotations

import csv
import hashlib
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.cli.data_pack import parse_size
from summit_train.core.comm.launch import this_launch
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.data.video.region import Region
from summit_train.data.video.span import Span
from tests.worlds import PATIENCE_S, ROOT, Say, command, csv_rows, forked, lines, start, stdout_of, succeed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders, a good video in each and a bad one in the first."""
    for name in ("jump/a.mp4", "walk/b.mp4"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        write_video(tmp_path / "set" / name, np.zeros((3, 16, 16, 3), np.uint8))
    (tmp_path / "set" / "jump" / "torn.mp4").write_text("x")
    return tmp_path / "set"


def test_motion_writes_a_set_and_says_how_to_use_it(tmp_path: Path, say: Say) -> None:
    out = tmp_path / "m"
    words = "--train 4 --val 2 --size 16 --frames 4 --classes 2 --kind order --seed 5"
    printed = stdout_of(say("data", "motion", out, *words.split()))
    assert [len(read_manifest(out / name)) for name in ("train.csv", "val.csv")] == [4, 2]
    assert len(list((out / "videos").glob("*.mp4"))) == 6
    assert "6 videos of 2 classes: red-blue, blue-red" in printed and f"data.root={out}" in printed


def test_index_writes_the_good_and_names_the_bad(folder: Path, say: Say) -> None:
    out = folder.parent / "list.csv"
    (folder / "walk" / "notes.txt").touch()
    printed = stdout_of(say("data", "index", folder, "--out", out, "--workers", 0))
    manifest = read_manifest(out)
    assert [manifest.path(index) for index in range(len(manifest))] == ["jump/a.mp4", "walk/b.mp4"]
    assert manifest.classes == ("jump", "walk")
    for line in (
        "no videos by their names: 1 .txt",
        "left out: 1\n  jump/torn.mp4: is not a video",
        "2 videos, 6 frames, 2 classes",
        "the same bytes as another: 1\n  walk/b.mp4 = jump/a.mp4",
    ):
        assert line in printed
    assert csv_rows(folder.parent / "list.left_out.csv")[0]["path"] == "jump/torn.mp4"
    names = ["classes.txt", "list.csv", "list.left_out.csv", "set"]
    assert [path.name for path in sorted(folder.parent.iterdir())] == names


def test_index_of_nothing_usable_writes_nothing(folder: Path, say: Say) -> None:
    shutil.rmtree(folder / "walk")
    (folder / "jump/a.mp4").unlink()
    status, out, err = say("data", "index", folder, "--out", folder.parent / "list.csv", "--workers", 0)
    assert status == 2 and "torn.mp4: is not a video" in out and "must have a video that can be used, got none" in err
    assert not (folder.parent / "list.csv").exists()


def test_scan_writes_the_list_without_the_bad_clips(folder: Path, say: Say) -> None:
    listed = folder.parent / "list.csv"
    assert say("data", "index", folder, "--out", listed, "--workers", 0)[0] == 0
    video = folder / "walk" / "b.mp4"
    video.write_bytes(video.read_bytes()[:-1] + b"?")  # in the title, which no decoder looks at
    clean = folder.parent / "clean.csv"
    left_out = folder.parent / "clean.left_out.csv"
    status, printed, _ = say("data", "scan", listed, "--root", folder, "--out", clean, "--workers", 0)
    assert status == 0
    reason = "has changed since it was indexed: its SHA-256 is not the manifest's"
    head, good, bad = listed.read_text().splitlines()
    assert clean.read_text().splitlines() == [head, good]
    assert left_out.read_text().splitlines() == [f"{head},reason", f"{bad},{reason}"]
    assert printed.splitlines() == [
        "2 of 2 videos decoded, 1 bad",
        f"       1  {reason}",
        "left out: 1",
        f"  walk/b.mp4: {reason}",
        f"wrote {left_out}: all 1 that are left out",
        f"wrote {clean}; set data.root={folder}",
    ]
    # Of class folders, too; with no bad clip, the rows of an earlier scan go.
    (folder / "jump" / "torn.mp4").unlink()
    assert say("data", "scan", folder, "--out", clean, "--workers", 0)[0] == 0
    assert read_manifest(clean).classes == ("jump", "walk") and not left_out.exists()
    assert clean.read_text() == "path,label\njump/a.mp4,0\nwalk/b.mp4,1\n"


# Clips that are spans of their files.


OUTSIDE = [("a.mp4", "15", "21"), ("a.mp4", "20", ""), ("torn.mp4", "2", "3"), ("gone.mp4", "", "")]


def _left_out(path: Path) -> list[tuple[str, str, str]]:
    return [(row["path"], row["start_frame"], row["end_frame"]) for row in csv_rows(path)]


@pytest.fixture
def spans(tmp_path: Path) -> Path:
    """Five clips of a file of 20 frames, of which two lie outside it, one of no video, and one of no file."""
    write_video(tmp_path / "a.mp4", np.zeros((20, 16, 16, 3), np.uint8))
    (tmp_path / "torn.mp4").write_text("x")
    rows = "a.mp4,0,0,8\na.mp4,1,8,\na.mp4,0,15,21\na.mp4,1,,\na.mp4,0,20,\ntorn.mp4,1,2,3\ngone.mp4,1,,\n"
    (tmp_path / "list.csv").write_text(f"path,label,start_frame,end_frame\n{rows}")
    return tmp_path / "list.csv"


def test_index_leaves_out_what_is_missing_torn_or_outside_its_file(spans: Path, say: Say) -> None:
    out = spans.parent / "indexed.csv"
    printed = stdout_of(say("data", "index", spans, "--out", out, "--workers", 0))
    manifest, digest = read_manifest(out), hashlib.sha256((spans.parent / "a.mp4").read_bytes()).digest()
    assert [manifest.clip(clip).span for clip in range(len(manifest))] == [Span(0, 8), Span(8), Span()]
    assert [(manifest.num_frames(clip), manifest.sha256(clip)) for clip in range(3)] == [(20, digest)] * 3
    assert "3 clips, 40 frames, 2 classes" in printed and "gone.mp4: No such file" in printed
    assert "left out: 4\n  a.mp4: has 20 frames, and the span 15:21 does not lie among them\n" in printed
    assert _left_out(spans.parent / "indexed.left_out.csv") == OUTSIDE


def test_the_rows_that_index_leaves_out_are_kept_whole(spans: Path, say: Say) -> None:
    """Of a disk that is not mounted: with label, span, group and columns of the user's own, to be indexed later."""
    rows = ["0;2,a,0,8,x", "1,b,8,,y", "2,c,,,z"]
    text = "".join(f"{name}.mp4,{row}\n" for name, row in zip(("gone", "gone", "a"), rows, strict=True))
    spans.write_text(f"path,label,group,start_frame,end_frame,own\n{text}")
    words = ["--out", spans.parent / "out.csv", "--workers", 0]
    status, printed, _ = say("data", "index", spans, *words)
    left_out = spans.parent / "out.left_out.csv"
    assert status == 0 and f"left out: 1\n  gone.mp4: No such file or directory\nwrote {left_out}: all 2" in printed
    with left_out.open(encoding="utf-8") as file:
        kept = [(*row.values(),) for row in csv.DictReader(file)]
    missing = "No such file or directory"
    assert kept == [("gone.mp4", "0;2", "a", "", "8", "x", missing), ("gone.mp4", "1", "b", "8", "", "y", missing)]
    (spans.parent / "gone.mp4").write_bytes((spans.parent / "a.mp4").read_bytes())
    status, _, err = say("data", "index", left_out, *words)
    assert status == 2 and err.endswith(f"--out must be another file than {left_out}, which it would replace\n")
    assert say("data", "index", left_out, "--out", spans.parent / "rest.csv", "--workers", 0)[0] == 0
    rest = read_manifest(spans.parent / "rest.csv")
    assert [(rest.labels_of(clip), rest.clip(clip).span) for clip in (0, 1)] == [((0, 2), Span(0, 8)), ((1,), Span(8))]


def test_scan_decodes_a_file_once_and_names_spans_outside_it(spans: Path, say: Say) -> None:
    clean = spans.parent / "clean.csv"
    status, printed, _ = say("data", "scan", spans, "--out", clean, "--workers", 0)
    assert _left_out(spans.parent / "clean.left_out.csv") == OUTSIDE
    assert clean.read_text() == "path,label,start_frame,end_frame\na.mp4,0,,8\na.mp4,1,8,\na.mp4,1,,\n"
    assert status == 0 and "1 of 3 videos decoded for 7 clips, 4 bad" in printed


# Regions of frames.


def test_index_keeps_regions_and_scan_names_those_outside_their_frame(tmp_path: Path, say: Say) -> None:
    for name in ("a", "b"):
        write_video(tmp_path / f"{name}.mp4", np.zeros((3, 16, 32, 3), np.uint8))
    rows = "a.mp4,0,2,3,30,13\nb.mp4,1,2,3,30,14\nb.mp4,0,,,,\n"
    (tmp_path / "list.csv").write_text(f"path,label,left,top,width,height\n{rows}")
    out = tmp_path / "indexed.csv"
    clean = tmp_path / "clean.csv"
    assert say("data", "index", tmp_path / "list.csv", "--out", out, "--workers", 0)[0] == 0
    indexed = read_manifest(out, "columns")
    assert [indexed.clip(clip).region for clip in range(3)] == [Region(2, 3, 30, 13), Region(2, 3, 30, 14), Region()]
    assert indexed.num_frames(0) == 3 and indexed.sha256(2)
    status, printed, _ = say("data", "scan", out, "--out", clean, "--workers", 0)
    assert status == 0 and "0 bad" in printed  # without the option the columns are not read
    status, printed, _ = say("data", "scan", out, "--out", clean, "--workers", 0, "--region", "columns")
    reason = f"its region, 30 x 14 pixels at 2, 3, exceeds the frame of 32 x 16 ({out}:3)"
    ((bad,),) = [csv_rows(tmp_path / "clean.left_out.csv")]
    assert status == 0 and (bad["path"], bad["top"], bad["height"], bad["reason"]) == ("b.mp4", "3", "14", reason)
    found = read_manifest(clean, "columns")
    assert [found.clip(clip).region for clip in range(2)] == [Region(2, 3, 30, 13), Region()] and len(found) == 2


# Killed, and on several ranks.


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twenty-four videos of three classes, two of them bad."""
    for number in range(24):
        path = tmp_path / "set" / f"class{number % 3}" / f"{number:02}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, np.full((4 + number, 16, 16, 3), 9 * number, np.uint8))
    (tmp_path / "set" / "class0" / "bad.mp4").write_text("x")
    (tmp_path / "set" / "class2" / "23.mp4").write_bytes((tmp_path / "set" / "class2" / "23.mp4").read_bytes()[:600])
    return tmp_path / "set"


def _results(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("list.csv", "list.left_out.csv", "classes.txt")]


def test_an_index_killed_or_shared_by_ranks_ends_as_one_alone(many: Path, tmp_path: Path) -> None:
    alone, killed, shared = tmp_path / "alone", tmp_path / "killed", tmp_path / "shared"
    for out in (alone, killed, shared):
        out.mkdir()
    words = ["data", "index", str(many), "--workers", "1", "--out"]
    assert main([*words, str(alone / "list.csv")]) == 0
    journal = killed / ".list.csv.journal" / "000000.jsonl"
    process = start(0, "-m", "summit_train", *words, str(killed / "list.csv"))
    deadline = time.monotonic() + PATIENCE_S
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (killed / "list.csv").exists() and journal.stat().st_size
    assert "resumes: " in succeed(0, *words, str(killed / "list.csv"))
    assert _results(killed) == _results(alone)
    assert not journal.parent.exists()

    output = succeed(2, "data", "index", str(many), "--workers", "0", "--out", str(shared / "list.csv"))
    assert output.count("24 videos") == 0 and output.count("23 videos, ") == 1
    assert _results(shared) == _results(alone)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Three videos below videos/, and their manifest beside that folder."""
    (tmp_path / "videos").mkdir()
    for number in range(3):
        write_video(tmp_path / "videos" / f"{number}.mp4", np.full((5, 16, 16, 3), 40 * number, np.uint8))
    write_manifest(tmp_path / "list.csv", [ManifestRow(f"{number}.mp4", number) for number in range(3)])
    return tmp_path / "list.csv"


@pytest.fixture
def pack(manifest: Path, say: Say) -> Say:
    """Runs `data pack` into out/."""
    folder = manifest.parent
    return partial(say, "data", "pack", manifest, folder / "out", "--root", folder / "videos")


def test_packing_says_how_to_use_it_and_leaves_a_finished_set_alone(manifest: Path, pack: Say) -> None:
    folder = manifest.parent
    words = ("--kind", "jpeg", "--short-side", 8, "--every", 2, "--workers", 0)
    status, printed, _ = pack(*words)
    out = folder / "out"
    assert status == 0 and printed.startswith(f"{out}: 3 clips in 1 shard, ")
    assert f"data.train or data.val: {out}" in printed
    packed = read_manifest(out)
    assert packed.pixels == "jpeg short side 8, every 2, quality 90, full colour"
    assert packed.frame_counts.tolist() == [5, 5, 5]
    (folder / ".out.lock").unlink()  # a finished set needs no lock, and may be where nothing can be written
    before = [(path, path.stat().st_mtime_ns) for path in (folder, *sorted(folder.rglob("*")))]
    assert pack(*words) == (0, f"{out}: is packed already; `data verify` checks it\n", "")
    assert before == [(path, path.stat().st_mtime_ns) for path, _ in before]


_PACKING = """
import pathlib, sys
from summit_train.data.packed.pack import alone_in
with alone_in(pathlib.Path(sys.argv[1])):
    pathlib.Path(sys.argv[1]).mkdir()
    (pathlib.Path(sys.argv[1]) / ".000000.tar.1.writing").touch()
    print("packing", flush=True)
    sys.stdin.read()
"""


def test_a_second_packing_into_the_same_folder_is_refused(manifest: Path, pack: Say) -> None:
    out = manifest.parent / "out"
    words = [sys.executable, "-c", _PACKING, str(out)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"packing\n"
        before = sorted(out.rglob("*"))
        status, _, err = pack("--kind", "bytes", "--workers", 0)
        assert status == 2 and f"{out}: another process is packing into it; wait for it" in err
        assert sorted(out.rglob("*")) == before
        other.communicate(b"")
    (out / ".000000.tar.1.writing").unlink()
    assert pack("--kind", "bytes", "--workers", 0)[0] == 0
    assert not (out / ".packing").exists()


def test_ranks_leave_in_order_where_the_first_refuses(manifest: Path) -> None:
    videos = str(manifest.parent / "videos")
    status, output = command(2, "data", "pack", str(manifest), videos, "--root", videos, "--kind", "bytes")
    assert status == 2 and "MPI_ABORT" not in output, output
    (said,) = (line for line in lines(output) if line.startswith("summit-train"))
    assert "must be an empty or a new folder" in said


def test_ranks_with_different_lists_are_refused(manifest: Path) -> None:
    (other := manifest.with_name("other.csv")).write_text(manifest.read_text().replace(",1", ",0"))

    def work() -> int:
        path = (manifest, other)[this_launch().rank]
        root = manifest.parent / "videos"
        return main(["data", "pack", str(path), str(manifest.parent / "out"), "--root", str(root), "--kind", "bytes"])

    status, output = forked(2, work)
    assert status == 2 and f"{other}: must be the same list as rank 0's; start all ranks with the same" in output


def test_clips_that_cannot_be_packed_are_all_named(manifest: Path, pack: Say) -> None:
    for number in (0, 2):
        (manifest.parent / "videos" / f"{number}.mp4").write_text("x")
    err = pack("--kind", "jpeg", "--workers", 0)[2]
    assert "2 clips cannot be packed; leave them out of the manifest" in err
    assert "\n  0.mp4: is not a video" in err and "\n  2.mp4: is not a video" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("1G", 1 << 30), ("256m", 256 << 20), ("1.5K", 1536), ("700", 700), ("2 GiB", 2 << 30), ("1TB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_regions_are_cut_where_they_are_asked_for(manifest: Path, pack: Say) -> None:
    manifest.write_text("path,label,left,top,width,height\n0.mp4,0,1,2,9,8\n2.mp4,1,0,0,16,16\n")
    assert pack("--kind", "jpeg", "--workers", 0, "--region", "columns")[0] == 0
    rows = np.load(manifest.parent / "out/index/clips.npy")
    assert rows[["width", "height"]].tolist() == [(9, 8), (16, 16)]
