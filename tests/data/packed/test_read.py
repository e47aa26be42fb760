from __future__ import annotations

import pickle
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.loading import read_clip
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import read as store_module
from summit_train.data.packed.format import CLIP_ROW_1, facts_of, read_pack, shard_name
from summit_train.data.packed.read import ShardStore
from summit_train.data.video import augment, films
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec
from tests.data.clips import all_of, stored_clip
from tests.data.packed.conftest import NUM_FRAMES, NUM_VIDEOS, PackSet, all_frames, complaints, content_of
from tests.worlds import Say


def _open(folder: Path, **changes: Any) -> ShardStore:
    store = open_store(DataSpec(train=str(folder), val=str(folder), **changes), read_manifest(folder))
    assert isinstance(store, ShardStore)
    return store


def test_of_every_nth_frame_the_one_before_is_taken(raw: FileStore, pack_set: PackSet) -> None:
    packed = _open(pack_set(kind="jpeg", every=5, quality=95), frame_stride=5)
    for frame in range(NUM_FRAMES):
        ours, files = (
            read_clip(store, 1, lambda n, f=f: np.array([[f]]), lambda w, h: augment.test_views(40, "full", w, h))
            for store, f in ((packed, frame), (raw, frame // 5 * 5))
        )
        assert np.abs(ours.pixels.astype(int) - files.pixels).mean() < 12
        assert ours.frames.tolist() == files.frames.tolist() == [[frame // 5 * 5]]
    with pytest.raises(UserError, match=r"has one frame in 5, and data\.frame_stride is 4: must be a multiple of 5"):
        _open(Path(packed.manifest.source), frame_stride=4)
    _open(Path(packed.manifest.source), frame_stride=4, sampling="uniform")


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_store_travels_small_and_reads_the_same(pack_set: PackSet, kind: str) -> None:
    store = _open(pack_set(kind=kind))
    clip, sent = all_frames(store, 3), pickle.dumps(store)
    assert len(sent) < 1000
    assert np.array_equal(all_frames(pickle.loads(sent), 3), clip)
    other = pack_set(name="other", kind="jpeg", every=2)
    shutil.rmtree(store.manifest.source)
    other.rename(store.manifest.source)
    with pytest.raises(UserError, match="was packed again while a run was using it"):
        pickle.loads(sent)


def test_a_set_of_version_0_1_is_read(pack_set: PackSet) -> None:
    """Its .npy files have headers of 512 bytes."""
    out = pack_set(kind="jpeg")
    before = [all_frames(_open(out), clip) for clip in range(NUM_VIDEOS)]
    for path in out.rglob("*.npy"):
        rows = np.load(path)
        descr = np.lib.format.dtype_to_descr(rows.dtype)
        text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({len(rows)},), }}"
        start = b"\x93NUMPY\x01\x00" + (502).to_bytes(2, "little")
        path.write_bytes(start + f"{text:<501}\n".encode() + rows.tobytes())
    assert all(np.array_equal(all_frames(_open(out), clip), before[clip]) for clip in range(NUM_VIDEOS))


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
@pytest.mark.parametrize("films_from", [1, 1 << 30])
def test_a_set_of_format_1_is_read_and_checked(
    pack_set: PackSet, monkeypatch: pytest.MonkeyPatch, kind: str, films_from: int
) -> None:
    """Up to version 0.3.0 one checksum was of the facts and then the bytes, or of the facts of a clip of pictures."""
    monkeypatch.setattr(films, "_MIN_FRAMES", films_from)
    out = pack_set(kind=kind)
    store = _open(out)
    before = [all_frames(store, clip) for clip in range(NUM_VIDEOS)]
    rows = np.load(out / "index/clips.npy")
    shards = {number: (out / shard_name(number)).read_bytes() for number in set(rows["shard"].tolist())}
    for clip, row in enumerate(rows):
        content = shards[int(row["shard"])][row["start"] : row["start"] + row["length"]]
        facts = facts_of(store.manifest, clip, int(row["width"]), int(row["height"]))
        row["checksum"] = zlib.crc32(content if kind == "bytes" else b"", facts.checksum())
    np.save(out / "index/clips.npy", rows[list(CLIP_ROW_1.names or ())].astype(CLIP_ROW_1))
    pack = out / "pack.json"
    pack.write_text(replace(read_pack(out), format=1).text())
    assert all(np.array_equal(all_frames(_open(out), clip), before[clip]) for clip in range(NUM_VIDEOS))

    rows = np.load(out / "index/clips.npy")
    rows["checksum"][1] ^= 1
    np.save(out / "index/clips.npy", rows)
    with pytest.raises(DecodeError, match="is not what was packed: its checksum differs"):
        all_frames(_open(out), 1)


def test_files_are_closed_when_there_are_many(pack_set: PackSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_OPEN_FILES", 2)
    store = _open(pack_set())
    for clip in (*range(NUM_VIDEOS), *reversed(range(NUM_VIDEOS))):
        all_frames(store, clip)
        assert len(store._files) <= 2


@pytest.mark.parametrize("joined", [0, 1 << 20])
def test_the_pictures_of_a_clip_are_read_together_where_they_are_close(
    pack_set: PackSet, monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    store, reads, whole = _open(pack_set(kind="jpeg")), [], ShardStore._read

    def counted(self: ShardStore, entry: Any, start: int, end: int) -> bytes:
        reads.append((start, end))
        return whole(self, entry, start, end)

    monkeypatch.setattr(store_module, "_JOINED_BYTES", joined)
    monkeypatch.setattr(ShardStore, "_read", counted)
    assert stored_clip(store, 0, lambda n: np.arange(0, n, 3), all_of).shape == (4, 40, 52, 3)
    assert len(reads) == (1 if joined else 4)


# Damage.


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_every_flip_in_a_clips_bytes_is_an_error_with_its_name(pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    store, clips, generator = _open(out), np.load(out / "index" / "clips.npy"), np.random.default_rng(7)
    for _ in range(150):
        clip = int(generator.integers(NUM_VIDEOS))
        shard = out / f"{clips[clip]['shard']:06}.tar"
        place = int(clips[clip]["start"] + generator.integers(clips[clip]["length"]))
        with (
            _flipped(shard, place, 1 << int(generator.integers(8))),
            pytest.raises(DecodeError, match="is not what was packed") as caught,
        ):
            all_frames(store, clip)
        assert caught.value.path.startswith(f"{shard}:{store.manifest.path(clip)}")
        all_frames(store, clip)


@contextmanager
def _flipped(path: Path, place: int, bits: int) -> Iterator[None]:
    """Change a byte of a file for the block."""
    right = path.read_bytes()[place]
    _write_in_place(path, place, right ^ bits)
    yield
    _write_in_place(path, place, right)


def _write_in_place(path: Path, place: int, value: int) -> None:
    """Change a byte of a file that may be open elsewhere."""
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([value]))


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_every_flip_in_the_index_is_an_error_or_changes_nothing(pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    before = [all_frames(_open(out), clip) for clip in range(NUM_VIDEOS)]
    generator, found = np.random.default_rng(8), 0
    for number in range(160):
        paths = sorted([*(out / "index").iterdir(), *(out / "manifest").glob("*.npy")])
        path = paths[number % len(paths)]
        place = int(generator.integers(path.stat().st_size))
        with _flipped(path, place, 1 << int(generator.integers(8))):
            try:
                store = _open(out)
                for clip in range(NUM_VIDEOS):
                    assert np.array_equal(all_frames(store, clip), before[clip]), f"a flip at {place} of {path}"
                    assert store.manifest.labels[clip] == clip % 2
                    assert store.manifest.clip(clip).is_reversed == (clip % 3 == 2)
            except UserError as error:
                assert str(out) in str(error)
                found += 1
    assert found > 60  # the rest are flips in the padding of headers, the line numbers, the digests


def test_a_shard_that_is_cut_short_or_gone(pack_set: PackSet) -> None:
    shard = pack_set() / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:600])
    with pytest.raises(DecodeError, match="is outside its shard: the shard was cut short"):
        all_frames(_open(shard.parent), 0)
    shard.unlink()
    with pytest.raises(DecodeError, match=r"000000\.tar:walk/clip 0\.mp4: No such file"):
        all_frames(_open(shard.parent), 0)


@pytest.mark.parametrize("name", ["labels.npy", "offsets.npy", "paths.npy", "columns.json"])
def test_a_manifest_that_is_cut_short_is_named(pack_set: PackSet, name: str) -> None:
    path = pack_set() / "manifest" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"packed: is damaged .*; see `data verify`"):
        read_manifest(path.parents[1])


def test_a_manifest_that_is_not_the_records_is_refused(pack_set: PackSet) -> None:
    one, other = pack_set(), pack_set(name="other", kind="jpeg")
    shutil.copy(other / "pack.json", one)
    with pytest.raises(UserError, match="its manifest is not the one that its record names"):
        _open(one)


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_every_flipped_byte_in_any_file_is_found(pack_set: PackSet, kind: str) -> None:
    out = pack_set(kind=kind)
    files = content_of(out)
    ends = np.cumsum([len(content) for content in files.values()])
    generator = np.random.default_rng(3)
    # Half of them anywhere in the bytes, half in any file, so that the small ones have their share.
    for number in range(120):
        which = int(np.searchsorted(ends, generator.integers(ends[-1]), "right"))
        name = list(files)[which if number % 2 else int(generator.integers(len(files)))]
        place = int(generator.integers(len(files[name])))
        with _flipped(out / name, place, int(generator.integers(1, 256))):
            if name == "pack.json":
                with pytest.raises(UserError, match="is damaged"):
                    complaints(out)
            else:
                assert complaints(out) == [f"{out / name}: has other bytes"], f"byte {place}"
    assert complaints(out) == []


def test_the_command_names_what_is_missing_torn_or_too_much(pack_set: PackSet, say: Say) -> None:
    out = pack_set()
    status, printed, _ = say("data", "verify", out)
    assert status == 0 and f"{out}: {NUM_VIDEOS} clips in " in printed
    (out / "000009.tar").write_bytes(b"")
    assert "packed: 1 file damaged, missing or not part of the set:\n" in say("data", "verify", out)[2]
    size = len((out / "000001.tar").read_bytes())
    (out / "000000.tar").unlink()
    (out / "000001.tar").write_bytes(b"0" * 100)
    (out / "index" / "clips.npy").unlink()
    lines = [
        f"{out}/000000.tar: No such file or directory",
        f"{out}/000001.tar: has 100 bytes instead of {size:,}",
        f"{out}/index/clips.npy: No such file or directory",
        f"{out}/000009.tar: does not belong to the set",
    ]
    named = "packed: 4 files damaged, missing or not part of the set:\n" + "\n".join(lines)
    lacking = "must be a finished packed set, but lacks pack.json"
    for change, failed, message in (
        (lambda: None, 1, named),
        ((out / "pack.json").unlink, 1, lacking),
        (lambda: shutil.rmtree(out), 2, "no such folder"),
    ):
        change()
        status, _, said = say("data", "verify", out)
        assert status == failed and message in said
