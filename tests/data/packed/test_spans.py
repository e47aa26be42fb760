"""Packed spans: read as from the files, with a file's bytes stored once and of pictures the spans' own alone."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from av.video.frame import VideoFrame

from summit_train.core.errors import UserError
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import payload
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import begin, missing_shards, pack_set, pack_shards
from summit_train.data.packed.read import ShardStore, stray_files, verify_files
from summit_train.data.video.augment import View
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Frames
from summit_train.data.video.source import DecodeError, load_video
from summit_train.data.video.span import WHOLE, Span
from tests.data.packed.conftest import content_of

NUM_FRAMES = 12
FRAMES = np.random.default_rng(1).integers(0, 256, (2, NUM_FRAMES, 5, 6, 3), np.uint8).repeat(8, 2).repeat(8, 3)
SPANS = (Span(0, 5), Span(3, 9), Span(8), WHOLE, Span(2, 4), Span(11, 12))


def _rows(path: str) -> list[ManifestRow]:
    return [
        ManifestRow(path, n % 2, NUM_FRAMES if n % 3 else None, reversed=n % 2 == 1).with_span(span)
        for n, span in enumerate(SPANS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos and a folder of pictures, six clips of each, and the same clips as files of their own."""
    folder = tmp_path_factory.mktemp("spans")
    rows, cuts = [], []
    for video, frames in enumerate(FRAMES):
        write_video(folder / f"{video}.mkv", frames, codec="ffv1", b_frames=0)
        rows += _rows(f"{video}.mkv")
        for n, span in enumerate(SPANS):
            cut = frames[list(span.frames("", NUM_FRAMES))]
            write_video(folder / f"{video}_{n}.mkv", cut, codec="ffv1", b_frames=0)
            cuts.append(ManifestRow(f"{video}_{n}.mkv", n % 2, reversed=n % 2 == 1))
    (folder / "p").mkdir()
    for number, frame in enumerate(FRAMES[0]):
        VideoFrame.from_ndarray(frame, "rgb24").save(str(folder / "p" / f"{number:05}.jpg"))
    write_manifest(folder / "list.csv", [*rows, *_rows("p")])
    write_manifest(folder / "cut.csv", cuts)
    return folder


def _store(folder: Path, name: str = "list.csv") -> FileStore:
    return FileStore(read_manifest(folder / name), str(folder))


def _pack(store: FileStore, out: Path, kind: str, workers: int = 0, **options: Any) -> ShardStore:
    pack_set(store, out, Packing(kind, **options), 30_000, workers)
    return ShardStore(read_manifest(out))


def _all_of(store: FileStore | ShardStore, clip: int) -> Frames:
    frames: Frames = store.read_views(clip, lambda n: np.arange(n)[None], lambda w, h: [View(w, h, 0, 0, w, h)])[0]
    return frames


def _same(one: FileStore | ShardStore, other: FileStore | ShardStore, clips: int) -> None:
    for clip in range(clips):
        np.testing.assert_array_equal(_all_of(one, clip), _all_of(other, clip), str(clip))


def test_packed_bytes_are_read_as_the_files(folder: Path, tmp_path: Path) -> None:
    store = _store(folder)
    packed = _pack(store, tmp_path / "packed", "bytes")
    _same(packed, store, len(store.manifest))
    assert packed.manifest.fingerprint() == store.manifest.fingerprint()
    assert packed.manifest.spans.tolist() == store.manifest.spans.tolist()
    assert len(packed.pack.shards) > 1
    assert list(verify_files(tmp_path / "packed", packed.pack, packed.pack.every_file, 1)) == [[]] * len(
        packed.pack.every_file
    )
    assert stray_files(tmp_path / "packed", packed.pack) == []
    assert begin(store, tmp_path / "packed", Packing("bytes"), 30_000, workers=0) is None


def test_spans_side_by_side_share_their_files_bytes(folder: Path, tmp_path: Path) -> None:
    write_manifest(folder / "some.csv", [*_rows("0.mkv"), *_rows("1.mkv")[4:]])
    pack_set(_store(folder, "some.csv"), tmp_path / "packed", Packing("bytes"), 1 << 30)
    names, said = [], dict[int, Any]()
    with tarfile.open(tmp_path / "packed" / "000000.tar") as tar:
        for member in tar.getmembers():
            names.append(member.name)
            if member.name.endswith(".json"):
                said[int(member.name[:9])] = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
    # The whole video is a clip of its own.
    assert [name for name in names if name.endswith(".mkv")] == [f"{n:09}.mkv" for n in (0, 3, 4, 6)]
    assert {n: one.get("content") for n, one in said.items()} == {
        0: None, 1: "000000000.mkv", 2: "000000000.mkv", 3: None,
        4: None, 5: "000000004.mkv", 6: None, 7: "000000006.mkv",
    }  # fmt: skip
    assert [(one.get("start_frame"), one.get("end_frame")) for one in said.values()][:4] == [
        (0, 5), (3, 9), (8, -1), (None, None),
    ]  # fmt: skip
    rows = np.load(tmp_path / "packed" / "index" / "clips.npy")
    assert len(set(rows["start"].tolist())) == 4
    assert len(set(rows["checksum"].tolist())) == 8


@pytest.mark.parametrize("every", [1, 2])
def test_packed_pictures_are_those_of_the_cut_files(folder: Path, tmp_path: Path, every: int) -> None:
    spans = _pack(_store(folder), tmp_path / "spans", "jpeg", every=every)
    cuts = _pack(_store(folder, "cut.csv"), tmp_path / "cuts", "jpeg", every=every)
    num_clips = 2 * len(SPANS)
    _same(spans, cuts, num_clips)
    pictures = [np.load(tmp_path / name / "index" / "pictures.npy") for name in ("spans", "cuts")]
    assert pictures[0]["end"][: len(pictures[1])].tolist() == pictures[1]["end"].tolist()
    for clip in range(num_clips):
        assert spans.manifest.num_frames(clip) == NUM_FRAMES
    assert spans.manifest.fingerprint() not in (_store(folder).manifest.fingerprint(), cuts.manifest.fingerprint())
    assert begin(_store(folder), tmp_path / "spans", Packing("jpeg", every=every), 30_000, workers=0) is None


def test_pictures_of_a_folder_are_kept_unchanged(folder: Path, tmp_path: Path) -> None:
    write_manifest(folder / "pictures.csv", _rows("p"))
    store = _store(folder, "pictures.csv")
    for kind in ("bytes", "jpeg"):
        packed = _pack(store, tmp_path / kind, kind)
        _same(packed, store, len(SPANS))
        lengths = [len(span.frames("", NUM_FRAMES)) for span in SPANS]
        assert len(np.load(tmp_path / kind / "index" / "pictures.npy")) == sum(lengths)


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_workers_change_nothing(folder: Path, tmp_path: Path, kind: str) -> None:
    store = _store(folder)
    for workers in (0, 2):
        _pack(store, tmp_path / str(workers), kind, workers)
    assert content_of(tmp_path / "0") == content_of(tmp_path / "2")


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_file_is_read_once_for_its_spans(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in _rows("0.mkv") if row.span != WHOLE]
    write_manifest(folder / "some.csv", rows)
    job = begin(_store(folder, "some.csv"), tmp_path / "packed", Packing(kind), 1 << 30, workers=0)
    assert job is not None
    read = list[str]()

    def load(path: str, sha256: bytes | None) -> Any:
        read.append(path)
        return load_video(path, sha256)

    monkeypatch.setattr(payload, "load_video", load)
    assert list(pack_shards(job, [0], workers=0)) == [None] * 5
    assert read == [str(folder / "0.mkv")]


# What cannot be packed or read.


def test_a_span_outside_its_file_is_named_and_the_others_are_not(folder: Path, tmp_path: Path) -> None:
    rows = [ManifestRow("0.mkv", 0).with_span(span) for span in (Span(0, 4), Span(4, 2**31 - 1), Span(12))]
    rows += [ManifestRow("p", 0).with_span(Span(5, 20))]
    write_manifest(folder / "bad.csv", rows)
    for kind, bad in (("jpeg", ["0.mkv", "0.mkv", "p"]), ("bytes", ["p"])):
        job = begin(_store(folder, "bad.csv"), tmp_path / kind, Packing(kind), 1 << 30, workers=0)
        assert job is not None
        errors = [error for error in pack_shards(job, missing_shards(job), workers=0) if error is not None]
        assert [error.path for error in errors] == bad
        assert all("has 12 frames, and the span " in error.reason for error in errors)


def test_bytes_of_a_span_outside_its_file_are_a_bad_clip(folder: Path, tmp_path: Path) -> None:
    write_manifest(folder / "bad.csv", [ManifestRow("0.mkv", 0).with_span(Span(4, 13))])
    packed = _pack(_store(folder, "bad.csv"), tmp_path / "packed", "bytes")
    with pytest.raises(DecodeError, match=r"0.mkv: has 12 frames, and the span 4:13 does not lie among them"):
        _all_of(packed, 0)


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_another_span_in_the_manifest_is_found_by_the_checksums(folder: Path, tmp_path: Path, kind: str) -> None:
    packed = _pack(_store(folder), tmp_path / "packed", kind)
    path = tmp_path / "packed" / "manifest" / "spans.npy"
    content = bytearray(path.read_bytes())
    content[-8 * len(packed.manifest) + 4] += 1  # the first clip's end
    path.write_bytes(content)
    with pytest.raises(DecodeError, match="is not what was packed"):
        _all_of(ShardStore(read_manifest(tmp_path / "packed")), 0)
    found = verify_files(tmp_path / "packed", packed.pack, packed.pack.every_file, 1)
    assert [line for lines in found for line in lines] == [f"{path}: has other bytes"]
    path.unlink()
    with pytest.raises(UserError, match="is damaged"):
        read_manifest(tmp_path / "packed")


def test_a_set_of_whole_videos_has_no_column_of_spans(folder: Path, tmp_path: Path) -> None:
    _pack(_store(folder, "cut.csv"), tmp_path / "packed", "bytes")
    assert not (tmp_path / "packed" / "manifest" / "spans.npy").exists()
    assert all("spans" not in file.name for file in read_pack(tmp_path / "packed").files)
