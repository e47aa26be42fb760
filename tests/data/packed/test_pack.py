from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import pack as pack_module
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import begin, missing_shards, pack_shards
from summit_train.data.packed.read import stray_files, verify_files
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError
from tests.data.packed.conftest import NUM_FRAMES, NUM_VIDEOS, PackSet, content_of
from tests.killing import killed_at
from tests.worlds import PATIENCE_S, start, succeed


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_packed_set_is_the_manifests(raw: FileStore, pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    packed, manifest = read_manifest(out), raw.manifest
    assert packed.is_packed and not manifest.is_packed
    assert len(packed) == NUM_VIDEOS
    for clip in range(NUM_VIDEOS):
        assert packed.path(clip) == manifest.path(clip)
        assert packed.is_reversed(clip) == manifest.is_reversed(clip)
        assert packed.num_frames(clip) == (manifest.num_frames(clip) if kind == "bytes" else NUM_FRAMES)
    assert packed.labels.tolist() == manifest.labels.tolist()
    assert packed.classes == manifest.classes == ("walk", "run")
    # A run goes on from the files to their packed bytes, but not unasked to other pixels.
    assert (packed.fingerprint() == manifest.fingerprint()) == (kind == "bytes")


def test_the_bytes_are_the_files_own(videos: Path, pack_set: PackSet) -> None:
    out = pack_set()
    names = []
    for shard in read_pack(out).shards:
        with tarfile.open(out / shard.name) as tar:
            for member in tar.getmembers():
                names.append(member.name)
                if member.name.endswith(".json"):
                    about = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
                    video = tar.extractfile(next(n for n in names[-3:] if n.endswith((".mp4", ".avi"))))
                    assert video is not None
                    assert video.read() == (videos / about["path"]).read_bytes()
    assert len(names) == 3 * NUM_VIDEOS
    assert names == sorted(names, key=lambda name: name[:9])


def test_the_index_is_numpys(pack_set: PackSet) -> None:
    out = pack_set(kind="jpeg", every=2)
    clips, pictures = (np.load(out / "index" / f"{name}.npy", mmap_mode="r") for name in ("clips", "pictures"))
    assert len(clips) == NUM_VIDEOS
    assert len(pictures) == NUM_VIDEOS * NUM_FRAMES // 2
    assert clips["first"].tolist() == list(range(0, len(pictures), NUM_FRAMES // 2))
    for clip in clips:
        content = (out / f"{clip['shard']:06}.tar").read_bytes()[clip["start"] :][: clip["length"]]
        assert content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")
    assert set(clips["width"].tolist()) == {52} and set(clips["height"].tolist()) == {40}


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_workers_change_nothing(raw: FileStore, pack_set: PackSet, tmp_path: Path, kind: str) -> None:
    alone = content_of(pack_set(kind=kind))
    pack_module.pack_set(raw, tmp_path / "other", Packing(kind), 16_000, workers=2)
    assert content_of(tmp_path / "other") == alone


def test_pictures_are_scaled_down_and_never_up(pack_set: PackSet) -> None:
    from PIL import Image

    sizes = {}
    for side in (20, 256):
        out = pack_set(name=f"side{side}", kind="jpeg", short_side=side)
        clip = np.load(out / "index" / "clips.npy")[0]
        content = (out / "000000.tar").read_bytes()[clip["start"] :]
        sizes[side] = Image.open(io.BytesIO(content)).size
    assert sizes == {20: (26, 20), 256: (52, 40)}


# What is begun again.


def test_a_finished_set_is_left_alone(raw: FileStore, pack_set: PackSet) -> None:
    out = pack_set()
    before = content_of(out)
    assert begin(raw, out, Packing("bytes"), 16_000, workers=0) is None
    assert content_of(out) == before
    with pytest.raises(UserError, match="contains a different set"):
        begin(raw, out, Packing("jpeg"), 16_000, workers=0)
    jpeg = pack_set(name="jpeg", kind="jpeg")
    assert begin(raw, jpeg, Packing("jpeg"), 16_000, workers=0) is None
    with pytest.raises(UserError, match="contains a different set"):
        begin(raw, jpeg, Packing("jpeg", quality=50), 16_000, workers=0)


def test_what_is_unfinished_is_not_read_and_not_mixed(raw: FileStore, tmp_path: Path) -> None:
    job = begin(raw, tmp_path / "out", Packing("bytes"), 16_000, workers=0)
    assert job is not None
    assert len(list(pack_shards(job, [0], workers=0))) == job.clips_per_shard
    assert missing_shards(job) == list(range(1, job.num_shards))
    with pytest.raises(UserError, match="its packing was not finished"):
        read_manifest(tmp_path / "out")
    with pytest.raises(UserError, match="contains an unfinished, different set"):
        begin(raw, tmp_path / "out", Packing("jpeg"), 16_000, workers=0)


def test_a_folder_with_something_in_it_is_refused(raw: FileStore, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="must be an empty or a new folder"):
        begin(raw, tmp_path, Packing("bytes"), 16_000, workers=0)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_packed_set_is_not_packed_again(pack_set: PackSet, tmp_path: Path) -> None:
    store = FileStore(read_manifest(pack_set()), "")
    with pytest.raises(UserError, match="is packed already; pack from the manifest"):
        begin(store, tmp_path / "again", Packing("jpeg"), 16_000, workers=0)


@pytest.fixture
def few(videos: Path, tmp_path: Path) -> FileStore:
    """Four of the clips, which make two shards."""
    write_manifest(tmp_path / "few.csv", [ManifestRow(f"walk/clip {number}.mp4", 0) for number in (0, 2, 6, 8)])
    return FileStore(read_manifest(tmp_path / "few.csv"), str(videos))


@pytest.mark.parametrize(("kind", "stride"), [("bytes", 1), ("jpeg", 5)])
def test_killed_at_any_moment_the_next_call_makes_the_same(
    few: FileStore, tmp_path: Path, kind: str, stride: int
) -> None:
    undisturbed, out, number = tmp_path / "undisturbed", tmp_path / "killed", 1

    def pack(folder: Path = out) -> None:
        pack_module.pack_set(few, folder, Packing(kind), 12_000)

    pack(undisturbed)
    assert len(read_pack(undisturbed).shards) > 1
    while killed_at(number, out, pack):
        pack()
        assert content_of(out) == content_of(undisturbed), f"killed at operation {number}"
        shutil.rmtree(out)
        number += stride
    assert number > 50
    assert content_of(out) == content_of(undisturbed)


def test_killed_it_leaves_no_process_behind(videos: Path, tmp_path: Path) -> None:
    words = ["data", "pack", str(videos / "list.csv"), str(tmp_path / "out"), "--kind", "jpeg", "--shard-size", "9000"]
    process = start(0, "-m", "summit_train", *words, "--workers", "2")
    while not list(tmp_path.glob("out/*.tar")) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    # The workers hold the same pipe, so its end comes with the last of them.
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL, output


def test_ranks_share_the_work_and_change_nothing(videos: Path, pack_set: PackSet, tmp_path: Path) -> None:
    alone = content_of(pack_set())
    words = [str(videos / "list.csv"), str(tmp_path / "ranks"), "--kind", "bytes", "--shard-size", "16000"]
    printed = succeed(3, "data", "pack", *words, "--workers", "0")
    assert printed.count("11 clips in") == 1
    assert content_of(tmp_path / "ranks") == alone
    assert "every byte is as it was packed" in succeed(2, "data", "verify", str(tmp_path / "ranks"))


# What cannot be packed.


def _store(folder: Path, rows: list[ManifestRow]) -> FileStore:
    write_manifest(folder / "list.csv", rows)
    return FileStore(read_manifest(folder / "list.csv"), str(folder))


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_bad_clips_are_named_and_no_shard_has_one(videos: Path, tmp_path: Path, kind: str) -> None:
    shutil.copy(videos / "walk" / "clip 0.mp4", tmp_path / "good.mp4")
    (tmp_path / "empty.mp4").touch()
    rows = [ManifestRow(name, 0) for name in ("good.mp4", "empty.mp4", "absent.mp4", "good.mp4")]
    rows.append(ManifestRow("good.mp4", 0, sha256="1" * 64))
    job = begin(_store(tmp_path, rows), tmp_path / "out", Packing(kind), 1, workers=0)
    assert job is not None and job.num_shards == 5
    found = [str(bad) for bad in pack_shards(job, missing_shards(job), workers=0) if isinstance(bad, DecodeError)]
    assert found[:2] == ["empty.mp4: is empty", "absent.mp4: No such file or directory"]
    assert found[2].startswith("good.mp4: has changed since it was indexed")
    assert missing_shards(job) == [1, 2, 4]
    assert sorted(path.name for path in job.folder.glob("*")) == [".packing", "000000.tar", "000003.tar"]


def test_where_nothing_can_be_read_the_root_is_named(videos: Path, tmp_path: Path) -> None:
    store = FileStore(read_manifest(videos / "list.csv"), str(tmp_path / "wrong"))
    with pytest.raises(UserError, match=r"none of 11 clips that were tried can be read below .*wrong"):
        begin(store, tmp_path / "out", Packing("bytes"), 1000, workers=0)


def test_a_disk_that_is_full_ends_it_and_the_next_call_goes_on(
    raw: FileStore, pack_set: PackSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = content_of(pack_set())
    job = begin(raw, tmp_path / "out", Packing("bytes"), 16_000, workers=0)
    assert job is not None

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(pack_module, "replacing", full)
        list(pack_shards(job, missing_shards(job), workers=0))
    pack_module.pack_set(raw, tmp_path / "out", Packing("bytes"), 16_000)
    assert content_of(tmp_path / "out") == undisturbed


# Frame folders.


@pytest.fixture
def frames(tmp_path: Path) -> FileStore:
    """Two folders of pictures: JPEGs of 48 x 32 and PNGs of 30 x 20."""
    from PIL import Image

    generator = np.random.default_rng(1)
    for name, kind, width, height in (("a", "jpg", 48, 32), ("b", "png", 30, 20)):
        (tmp_path / name).mkdir()
        for number in range(1, 7):
            coarse = generator.integers(0, 256, (height // 2, width // 2, 3), np.uint8)
            picture = coarse.repeat(2, 0).repeat(2, 1)
            Image.fromarray(picture).save(tmp_path / name / f"{number:05}.{kind}")
    return _store(tmp_path, [ManifestRow("a", 0), ManifestRow("b", 1, 6)])


@pytest.mark.parametrize(("kind", "side"), [("bytes", 256), ("jpeg", 256), ("jpeg", 24)])
def test_frame_folders_are_packed(frames: FileStore, tmp_path: Path, kind: str, side: int) -> None:
    pack_module.pack_set(frames, tmp_path / "out", Packing(kind, short_side=side), 1 << 20)
    pack = read_pack(tmp_path / "out")
    clips = np.load(tmp_path / "out" / "index" / "clips.npy")
    shard = (tmp_path / "out" / "000000.tar").read_bytes()
    stored = [shard[clip["start"] :][: clip["length"]] for clip in clips]
    own = [b"".join(path.read_bytes() for path in sorted((tmp_path / name).iterdir())) for name in "ab"]
    # JPEGs that are small enough stay as they are; PNGs do where bytes were asked for.
    assert [content == files for content, files in zip(stored, own, strict=True)] == [side == 256, kind == "bytes"]
    assert read_manifest(tmp_path / "out").frame_counts.tolist() == [6, 6]
    assert not any(verify_files(tmp_path / "out", pack, [*pack.shards, *pack.files], 1))
    assert stray_files(tmp_path / "out", pack) == []


def test_a_video_of_one_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", np.zeros((1, 16, 16, 3), np.uint8))
    pack_module.pack_set(_store(tmp_path, [ManifestRow("one.mp4", 0)]), tmp_path / "out", Packing("jpeg", every=4), 1)
    assert read_manifest(tmp_path / "out").frame_counts.tolist() == [1]
