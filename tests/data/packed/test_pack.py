from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.loading import Store
from summit_train.data.manifest import ManifestRow, read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import pack as pack_module
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import PackJob, begin, missing_shards, pack_shards
from summit_train.spec.identity import smallest_spec
from tests.data.clips import all_of, stored_clip
from tests.data.packed.conftest import (
    NUM_FRAMES,
    NUM_VIDEOS,
    SHARD_BYTES,
    PackSet,
    complaints,
    content_of,
    packed_store,
    stored,
)
from tests.killing import killed_at
from tests.worlds import Say, succeed


@pytest.mark.parametrize("kind", ["bytes", "jpeg", "video"])
def test_a_packed_set_is_the_manifests(raw: FileStore, pack_set: PackSet, kind: str) -> None:
    packed, manifest = read_manifest(pack_set(kind=kind)), raw.manifest
    assert packed.is_packed and not manifest.is_packed
    counts = manifest.frame_counts.tolist() if kind == "bytes" else [NUM_FRAMES] * NUM_VIDEOS
    for column in ("paths", "offsets", "labels", "reversed_flags"):
        assert getattr(packed, column).tolist() == getattr(manifest, column).tolist()
    assert packed.frame_counts.tolist() == counts and packed.classes == manifest.classes == ("walk", "run")
    # A run may continue from the files on their packed bytes, but not unasked on other pixels.
    assert (packed.fingerprint() == manifest.fingerprint()) == (kind == "bytes")


@pytest.mark.parametrize(("side", "size"), [(20, (26, 20)), (256, (52, 40))])
def test_the_index_is_numpys_and_pictures_are_never_scaled_up(
    pack_set: PackSet, side: int, size: tuple[int, int]
) -> None:
    out = pack_set(kind="jpeg", every=2, short_side=side)
    clips, pictures = (np.load(out / "index" / f"{name}.npy", mmap_mode="r") for name in ("clips", "pictures"))
    assert (len(clips), len(pictures)) == (NUM_VIDEOS, NUM_VIDEOS * NUM_FRAMES // 2)
    assert clips["first"].tolist() == list(range(0, len(pictures), NUM_FRAMES // 2))
    for clip in clips:
        content = (out / f"{clip['shard']:06}.tar").read_bytes()[clip["start"] :][: clip["length"]]
        assert content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")
        assert Image.open(io.BytesIO(content)).size == size
    assert set(clips["width"].tolist()) == {52} and set(clips["height"].tolist()) == {40}


@dataclass(frozen=True)
class Trap(FileStore):
    """A store in which looking for the clip 1 ends the process."""

    def path(self, clip: int) -> str:
        if clip == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().path(clip)


def test_a_clip_that_ends_its_worker_is_named_and_the_others_are_packed(raw: FileStore, tmp_path: Path) -> None:
    trap = Trap(raw.manifest, raw.root, raw.limits)
    num_clips = len(raw.manifest)
    job = PackJob(trap, tmp_path, Packing("bytes"), 2)
    found = list(pack_shards(job, missing_shards(job), workers=2))
    reason = "kills the process that reads it (exit status -9: killed, or out of memory?)"
    assert [str(error) for error in found if error] == [f"{raw.manifest.path(1)}: {reason}"]
    assert [clip for clip, error in enumerate(found) if error] == [1] and len(found) == num_clips
    assert missing_shards(job) == [0]


# What is begun again.


def test_what_is_unfinished_is_not_read_and_not_mixed(raw: FileStore, tmp_path: Path) -> None:
    job = begin(raw, tmp_path / "out", Packing("bytes"), SHARD_BYTES, workers=0)
    assert job is not None
    assert len(list(pack_shards(job, [0], workers=0))) == job.clips_per_shard
    assert missing_shards(job) == list(range(1, len(job.parts())))
    with pytest.raises(UserError, match="its packing was not finished"):
        read_manifest(tmp_path / "out")
    with pytest.raises(UserError, match="contains an unfinished, different set"):
        begin(raw, tmp_path / "out", Packing("jpeg"), SHARD_BYTES, workers=0)
    assert begin(raw, tmp_path / "out", Packing("bytes"), SHARD_BYTES, workers=0) == job


def test_what_cannot_be_begun_is_refused_and_left_alone(raw: FileStore, pack_set: PackSet, tmp_path: Path) -> None:
    mine, jpeg, done = tmp_path / "mine", Packing("jpeg"), pack_set(kind="jpeg")
    mine.mkdir()
    (mine / "mine.txt").write_text("precious")
    before = content_of(tmp_path)
    assert begin(raw, done, jpeg, SHARD_BYTES, workers=0) is None  # it has this set
    packed, wrong = FileStore(read_manifest(done), ""), FileStore(raw.manifest, str(tmp_path / "wrong"))
    for store, folder, packing, message in (
        (raw, done, Packing("bytes"), "contains a different set"),
        (raw, done, Packing("jpeg", quality=50), "contains a different set"),
        (raw, mine, jpeg, "must be an empty or a new folder"),
        (packed, tmp_path / "again", jpeg, "is packed already; pack from the manifest"),
        (wrong, tmp_path / "out", jpeg, rf"none of {NUM_VIDEOS} clips that were tried can be read below .*wrong"),
    ):
        with pytest.raises(UserError, match=message):
            begin(store, folder, packing, SHARD_BYTES, workers=0)
    assert content_of(tmp_path) == before


@pytest.mark.parametrize(
    ("kind", "number", "stride"),
    [pytest.param("bytes", 1, 1, marks=pytest.mark.nightly), ("jpeg", 2, 6), ("video", 3, 6)],
)
def test_killed_at_any_moment_the_next_call_makes_the_same(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, stride: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes most of the time, and a kill loses no written byte
    names = [f"walk/clip {number}.mp4" for number in (0, 2)]
    few = FileStore(stored(tmp_path, [ManifestRow(name, 0) for name in names]).manifest, str(videos))
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "killed"

    def pack(folder: Path = out) -> None:
        pack_module.pack_set(few, folder, Packing(kind), 6_000)

    pack(undisturbed)
    assert len(read_pack(undisturbed).shards) == 2
    while killed_at(number, out, pack):
        pack()
        assert content_of(out) == content_of(undisturbed), f"killed at operation {number}"
        shutil.rmtree(out)
        number += stride
    assert number > 50
    assert content_of(out) == content_of(undisturbed)


def test_ranks_share_the_work_and_change_nothing(videos: Path, pack_set: PackSet, tmp_path: Path) -> None:
    words = [str(videos / "list.csv"), str(tmp_path / "ranks"), "--kind", "video", "--shard-size", str(SHARD_BYTES)]
    printed = succeed(3, "data", "pack", *words, "--workers", "0")
    assert printed.count(f"{NUM_VIDEOS} clips in") == 1
    assert content_of(tmp_path / "ranks") == content_of(pack_set(kind="video"))
    assert "all checksums match" in succeed(2, "data", "verify", str(tmp_path / "ranks"))


# What cannot be packed.


@pytest.mark.parametrize("kind", ["bytes", "jpeg", "video"])
def test_bad_clips_are_named_and_no_shard_has_one(videos: Path, tmp_path: Path, kind: str) -> None:
    shutil.copy(videos / "walk" / "clip 0.mp4", tmp_path / "good.mp4")
    (tmp_path / "empty.mp4").touch()
    rows = [ManifestRow(name, 0) for name in ("good.mp4", "empty.mp4", "absent.mp4", "good.mp4")]
    rows.append(ManifestRow("good.mp4", 0, sha256="1" * 64))
    job = begin(stored(tmp_path, rows), tmp_path / "out", Packing(kind), 1, workers=0)
    assert job is not None and len(job.parts()) == 5
    found = [str(bad) for bad in pack_shards(job, missing_shards(job), workers=0) if bad is not None]
    assert found[:2] == ["empty.mp4: is empty", "absent.mp4: No such file or directory"]
    assert found[2].startswith("good.mp4: has changed since it was indexed")
    assert missing_shards(job) == [1, 2, 4]
    assert sorted(path.name for path in job.folder.glob("*")) == [".packing", "000000.tar", "000003.tar"]


def test_a_full_disk_ends_it_in_one_line_and_the_next_call_goes_on(
    videos: Path, pack_set: PackSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    out, whole, calls = tmp_path / "out", pack_module.replacing, list[Path]()
    words = ("data", "pack", videos / "list.csv", out, "--kind", "bytes", "--shard-size", SHARD_BYTES, "--workers", 0)

    def full(path: Path) -> Any:
        calls.append(path)
        if len(calls) > 2:  # after the first shard with its part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return whole(path)

    with monkeypatch.context() as patched:
        patched.setattr(pack_module, "replacing", full)
        status, _, said = say(*words)
    assert (status, said) == (1, f"summit-train: {out / '000001.tar'}: No space left on device\n")
    first = (out / "000000.tar").stat().st_ino
    assert say(*words)[0] == 0
    assert (out / "000000.tar").stat().st_ino == first
    assert content_of(out) == content_of(pack_set())


@pytest.mark.parametrize(("kind", "side"), [("bytes", 256), ("jpeg", 32), ("jpeg", 24)])
def test_frame_folders_are_packed(tmp_path: Path, kind: str, side: int) -> None:
    generator = np.random.default_rng(1)
    for name, form, width, height in (("a", "jpg", 48, 32), ("b", "png", 30, 20)):
        (tmp_path / name).mkdir()
        for number in range(1, 7):
            picture = generator.integers(0, 256, (height // 2, width // 2, 3), np.uint8).repeat(2, 0).repeat(2, 1)
            Image.fromarray(picture).save(tmp_path / name / f"{number:05}.{form}")
    frames, out = stored(tmp_path, [ManifestRow("a", 0), ManifestRow("b", 1, 6)]), tmp_path / "out"
    packed = packed_store(frames, out, Packing(kind, short_side=side))
    shard = (out / "000000.tar").read_bytes()
    content = [shard[clip["start"] :][: clip["length"]] for clip in np.load(out / "index" / "clips.npy")]
    own = [b"".join(path.read_bytes() for path in sorted((tmp_path / name).iterdir())) for name in "ab"]
    # JPEGs that are small enough stay as they are; PNGs do where bytes were asked for.
    assert [one == files for one, files in zip(content, own, strict=True)] == [side >= 32, kind == "bytes"]
    assert packed.manifest.frame_counts.tolist() == [6, 6] and complaints(out) == []


@pytest.mark.parametrize(
    ("column", "values", "damaged", "message"),
    [
        ("label", ["0;1", 1, ";"], "more_labels", "some of its labels do not belong to a clip"),
        ("group", ["p2", None, None], "groups", "some of its groups have no name"),
    ],
)
def test_labels_and_groups_are_packed_and_lists_without_have_no_trace_of_them(
    videos: Path, tmp_path: Path, pack_set: PackSet, column: str, values: list[Any], damaged: str, message: str
) -> None:
    names = [f"walk/clip {number}.mp4" for number in (0, 2, 6)]
    rows = [ManifestRow(name, **{"label": 0, column: value}) for name, value in zip(names, values, strict=True)]
    source = FileStore(stored(tmp_path, rows).manifest, str(videos))
    packed = packed_store(source, tmp_path / "out", Packing("bytes")).manifest
    assert [packed.row(clip) for clip in range(3)] == [source.manifest.row(clip) for clip in range(3)]
    # Groups are no part of the fingerprint.
    assert packed.fingerprint() == replace(source.manifest, groups=np.zeros(0, np.int32)).fingerprint()
    assert json.dumps({"label": rows[0].label})[1:-1].encode() in (tmp_path / "out/000000.tar").read_bytes()
    assert complaints(tmp_path / "out") == [] and not (pack_set() / f"manifest/{damaged}.npy").exists()
    path = tmp_path / f"out/manifest/{damaged}.npy"
    wrong = np.load(path)
    if column == "label":
        wrong["clip"] = 3
    np.save(path, wrong if column == "label" else np.array([0, 1, 0], np.int32))
    with pytest.raises(UserError, match=f"is damaged .*{message}"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize("kind", ["jpeg", "video"])
def test_a_region_is_cut_when_it_is_packed(videos: Path, tmp_path: Path, kind: str) -> None:
    rows = ["run/clip 1.mp4,1,4,6,30,21", "run/clip 1.mp4,1,0,0,20,20", "walk/clip 0.mp4,0,,,,"]
    (tmp_path / "list.csv").write_text("path,label,left,top,width,height\n" + "".join(f"{row}\n" for row in rows))
    store = FileStore(read_manifest(tmp_path / "list.csv", "columns"), str(videos))
    out, packing = tmp_path / "out", Packing(kind, region="columns")
    packed = packed_store(store, out, packing, SHARD_BYTES)
    for clip in range(len(rows)):
        part, cut = (stored_clip(one, clip, lambda n: np.arange(0, n, 5), all_of) for one in (store, packed))
        assert part.shape == cut.shape == (3, *((21, 30), (20, 20), (40, 52))[clip], 3)
        assert np.abs(part.astype(int) - cut).mean() < 15  # blocks of noise, colour halved; other pixels differ by 80
    assert [packed.manifest.clip(n) for n in range(3)] == [store.manifest.clip(n) for n in range(3)]
    assert packed.pack.packing == packing and packed.manifest.pixels.endswith(", regions")
    whole = replace(store, manifest=read_manifest(tmp_path / "list.csv"))
    with pytest.raises(UserError, match="contains a different set"):
        begin(whole, out, packing, SHARD_BYTES, 0)
    assert begin(store, out, packing, SHARD_BYTES, 0) is None
    packed_store(whole, tmp_path / "whole", Packing(kind))
    for folder, right, wrong, message in (
        (out, "columns", None, "holds regions of frames, and data.region is null: set data.region=columns"),
        (tmp_path / "whole", None, "columns", "holds whole frames, and data.region is columns: pack the clips again"),
    ):
        assert len(_opened(folder, right).manifest) == len(rows)
        with pytest.raises(UserError, match=message):
            _opened(folder, wrong)


def _opened(folder: Path, region: str | None) -> Store:
    return open_store(smallest_spec().data.model_copy(update={"region": region}), read_manifest(folder, region))
