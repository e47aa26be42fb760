"""`summit-train data`: index on ranks and after a kill, and pack. The golden words have what the commands print."""

from __future__ import annotations

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
from tests.worlds import PATIENCE_S, ROOT, Say, command, forked, lines, start, succeed


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
