"""Packed spans: read as from the files, with a file's bytes stored once and of pictures the spans' own alone."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from av.video.frame import VideoFrame

from summit_train.core.errors import UserError
from summit_train.core.files import file_sha256
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import pack as pack_module
from summit_train.data.packed import payload
from summit_train.data.packed.format import Packing, facts_of
from summit_train.data.packed.pack import begin, missing_shards, pack_set, pack_shards
from summit_train.data.packed.read import ShardStore
from summit_train.data.video import clips, decode, films, source
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import WHOLE, Span
from summit_train.data.video.stream import probe
from tests.data.clips import write_swapped
from tests.data.packed.conftest import all_frames, bad_clips, complaints, content_of, packed_store, stored
from tests.data.video.test_containers import NUM_FRAMES as GREY_FRAMES
from tests.data.video.test_containers import STEP as GREY_STEP
from tests.data.video.test_containers import write_grey

NUM_FRAMES, SHARD_BYTES = 12, 30_000
FRAMES = np.random.default_rng(1).integers(0, 256, (2, NUM_FRAMES, 5, 6, 3), np.uint8).repeat(8, 2).repeat(8, 3)
SPANS = (Span(0, 5), Span(3, 9), Span(8), WHOLE, Span(2, 4), Span(11, 12))


def _rows(path: str) -> list[ManifestRow]:
    return [
        ManifestRow(path, n % 2, NUM_FRAMES if n % 3 else None, reversed=n % 2 == 1, span=span)
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


def _pack(store: FileStore, out: Path, kind: str, **options: Any) -> ShardStore:
    packing = Packing(kind, **options)
    packed = packed_store(store, out, packing, SHARD_BYTES)
    assert complaints(out) == [] and begin(store, out, packing, SHARD_BYTES, workers=0) is None
    return packed


def _same(one: FileStore | ShardStore, other: FileStore | ShardStore, clips: int) -> None:
    for clip in range(clips):
        np.testing.assert_array_equal(all_frames(one, clip), all_frames(other, clip), str(clip))


def test_packed_bytes_are_read_as_the_files(folder: Path, tmp_path: Path) -> None:
    store = stored(folder)
    packed = _pack(store, tmp_path / "packed", "bytes")
    _same(packed, store, len(store.manifest))
    assert packed.manifest.fingerprint() == store.manifest.fingerprint()
    assert packed.manifest.spans.tolist() == store.manifest.spans.tolist()
    assert len(packed.pack.shards) > 1


def test_spans_side_by_side_share_their_files_bytes(folder: Path, tmp_path: Path) -> None:
    store = stored(folder, [*_rows("0.mkv"), *_rows("1.mkv")[4:]], "some.csv")
    packed_store(store, tmp_path / "packed", Packing("bytes"))
    with tarfile.open(tmp_path / "packed" / "000000.tar") as tar:
        contents = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    # The whole video is a clip of its own.
    assert [name for name in contents if name.endswith(".mkv")] == [f"{n:09}.mkv" for n in (0, 3, 4, 6)]
    about = [json.loads(content) for name, content in contents.items() if name.endswith(".json")]
    shared = [None, 0, 0, None, None, 4, None, 6]
    assert [one.get("content") for one in about] == [n if n is None else f"{n:09}.mkv" for n in shared]
    spans = [(one.get("start_frame"), one.get("end_frame")) for one in about[:4]]
    assert spans == [(0, 5), (3, 9), (8, -1), (None, None)]
    rows = np.load(tmp_path / "packed" / "index" / "clips.npy")
    numbers = {name: len(set(rows[name].tolist())) for name in ("start", "checksum", "facts_checksum")}
    assert numbers == {"start": 4, "checksum": 2, "facts_checksum": 8}


@pytest.mark.parametrize("every", [1, 2])
def test_packed_pictures_are_those_of_the_cut_files(folder: Path, tmp_path: Path, every: int) -> None:
    store = stored(folder)
    spans = _pack(store, tmp_path / "spans", "jpeg", every=every)
    cuts = _pack(stored(folder, name="cut.csv"), tmp_path / "cuts", "jpeg", every=every)
    num_clips = 2 * len(SPANS)
    _same(spans, cuts, num_clips)
    ends, cut_ends = (np.load(tmp_path / name / "index" / "pictures.npy")["end"].tolist() for name in ("spans", "cuts"))
    assert ends[: len(cut_ends)] == cut_ends and not (tmp_path / "cuts/manifest/spans.npy").exists()
    assert spans.manifest.frame_counts.tolist()[:num_clips] == [NUM_FRAMES] * num_clips
    assert spans.manifest.fingerprint() not in (store.manifest.fingerprint(), cuts.manifest.fingerprint())


@pytest.mark.parametrize("kind", ["bytes", "jpeg", "video"])
def test_what_is_not_held_and_workers_give_the_same_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store, held = stored(folder), list[bool]()

    def noted(*words: Any) -> payload.PackedSample:
        sample = payload.make_sample(*words)
        held.extend(part.content is not None for part in sample.parts)
        return sample

    pack_set(store, tmp_path / "held", Packing(kind), SHARD_BYTES)
    monkeypatch.setattr(payload, "_MAX_HELD_BYTES", 5000)
    monkeypatch.setattr(payload, "_MAX_OPEN_BYTES", 1000)
    monkeypatch.setattr(payload, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(source, "MAX_HELD_BYTES", 0)
    monkeypatch.setattr(source, "_PIECE_BYTES", 100)
    pack_set(store, tmp_path / "workers", Packing(kind), SHARD_BYTES, workers=2)
    monkeypatch.setattr(pack_module, "make_sample", noted)
    pack_set(store, tmp_path / "waiting", Packing(kind), SHARD_BYTES)
    for name in ("workers", "waiting"):
        assert content_of(tmp_path / name) == content_of(tmp_path / "held")
    assert any(held) and not all(held)
    monkeypatch.setattr(payload, "_MAX_HELD_BYTES", 0)
    job = begin(store, tmp_path / "begun", Packing(kind), SHARD_BYTES, workers=0)
    assert job is not None and set(pack_shards(job, missing_shards(job), workers=0)) == {None}
    assert not list(job.folder.rglob(".*.writing"))


def test_what_is_encoded_again_has_all_the_room_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_MAX_HELD_BYTES", 1500)
    frames = [VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), "rgb24")]
    facts = facts_of(stored(tmp_path, [ManifestRow("a.mkv", 0)], "again.csv").manifest, 0)
    content = payload._Content("a.mkv", facts, Packing("jpeg"), tmp_path / "scratch")
    for _ in range(4):
        content._encode(frames)
        assert [part.content is not None for part in content.parts] == [True]
        assert 1500 / 4 < content.parts[0].num_bytes <= 1500


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_pictures_of_a_folder_are_kept_unchanged(folder: Path, tmp_path: Path, kind: str) -> None:
    store = stored(folder, _rows("p"), "pictures.csv")
    _same(_pack(store, tmp_path / kind, kind), store, len(SPANS))
    lengths = [len(span.frames("", NUM_FRAMES)) for span in SPANS]
    assert len(np.load(tmp_path / kind / "index" / "pictures.npy")) == sum(lengths)


@pytest.mark.parametrize("kind", ["jpeg", "video"])
def test_a_span_is_decoded_from_the_nearest_key_frame(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    digest = file_sha256(folder / "0.mkv")  # an index has checked it
    rows = [replace(row, num_frames=NUM_FRAMES, sha256=digest) for row in _rows("0.mkv")]
    store = stored(folder, rows, "some.csv")
    monkeypatch.setattr(clips, "frames_by_jumps", _unsure)
    pack_set(store, tmp_path / "from_start", Packing(kind), SHARD_BYTES)
    monkeypatch.setattr(clips, "frames_by_jumps", decode.frames_by_jumps)
    monkeypatch.setattr(clips, "every_frame", _unsure)
    pack_set(store, tmp_path / "jumped", Packing(kind), SHARD_BYTES)
    assert content_of(tmp_path / "jumped") == content_of(tmp_path / "from_start")


@pytest.mark.parametrize("kind", ["jpeg", "video"])
@pytest.mark.parametrize("span", [WHOLE, Span(5, 30)])
def test_a_file_whose_times_are_wrong_is_decoded_from_its_start(tmp_path: Path, kind: str, span: Span) -> None:
    """A list that `data index` wrote has no number of its frames. Every fourth frame: its neighbours are not seen."""
    write_swapped(tmp_path / "odd.mkv")
    assert not probe(source.Encoded(str(tmp_path / "odd.mkv"))).can_jump
    rows = [ManifestRow("odd.mkv", 0, span=span)]
    packed = packed_store(stored(tmp_path, rows), tmp_path / "out", Packing(kind, every=4))
    shown = all_frames(packed, 0)
    numbers = list(span.frames("", GREY_FRAMES))
    for place, number in enumerate(numbers):
        grey = GREY_STEP * numbers[place // 4 * 4]
        assert abs(int(np.median(shown[place])) - grey) <= 3, number


@pytest.mark.usefixtures("kept_indexes")
def test_a_span_of_a_packed_film_decodes_its_own_frames(
    tmp_path: Path, from_start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(films, "_MIN_FRAMES", 48)
    write_grey(tmp_path / "film.mkv", "libx264")
    rows = [ManifestRow("film.mkv", 0, GREY_FRAMES, span=Span(start, start + 4)) for start in (40, 16, 28)]
    packed = packed_store(stored(tmp_path, rows), tmp_path / "out", Packing("jpeg"))
    assert from_start == []
    assert [round(np.median(all_frames(packed, clip)[0]) / GREY_STEP) for clip in range(3)] == [40, 16, 28]


def _unsure(video: source.Encoded, *_: object, **__: object) -> NoReturn:
    raise DecodeError(video.name, "is not read in this way here")


# Films: their bytes are neither packed nor read as one.


def test_a_film_that_changes_before_it_is_copied_is_a_bad_clip(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_HELD_BYTES", 0)
    (tmp_path / "a.mkv").write_bytes((folder / "0.mkv").read_bytes())
    job = begin(stored(tmp_path, [ManifestRow("a.mkv", 0)]), tmp_path / "out", Packing("bytes"), 1, workers=0)
    assert job is not None
    make = pack_module.make_sample
    later = lambda *words: (make(*words), os.utime(tmp_path / "a.mkv", (0, 0)))[0]  # noqa: E731
    monkeypatch.setattr(pack_module, "make_sample", later)
    assert list(map(str, pack_shards(job, [0], workers=0))) == ["a.mkv: has changed while it was read"]
    assert not (tmp_path / "out/000000.tar").exists()


@pytest.mark.usefixtures("kept_indexes")
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_a_clip_of_a_packed_film_reads_its_own_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    frames = np.concatenate([*FRAMES] * 10)
    write_video(tmp_path / name, frames)
    spans = (Span(0, 5), Span(130, 136), Span(228), WHOLE)
    store = stored(tmp_path, [ManifestRow(name, 0, len(frames), span=span) for span in spans])
    packed = packed_store(store, tmp_path / "out", Packing("bytes"))
    whole = [all_frames(packed, clip) for clip in range(4)]
    _same(packed, store, 4)

    monkeypatch.setattr(films, "_MIN_FRAMES", len(frames))
    crc32 = source.Encoded.crc32
    demuxed = decode.demuxed
    packets = list[int]()
    hashed = list[bool]()
    for module in (decode, films):
        monkeypatch.setattr(module, "demuxed", lambda *a: (packets.append(p.size) or p for p in demuxed(*a)))
    monkeypatch.setattr(source.Encoded, "crc32", lambda one, *a: hashed.append(one.part is not None) or crc32(one, *a))
    film = ShardStore(packed.manifest)
    for clip in (1, 0, 2):
        np.testing.assert_array_equal(all_frames(film, clip), whole[clip])
        assert len(packets) < 30 + (len(frames) if clip == 1 else 0)  # the first clip also makes the index
        packets.clear()
    assert len(hashed) == 1
    np.testing.assert_array_equal(all_frames(film, 3), whole[3])
    assert len(hashed) == 2  # a member of its own

    shard = tmp_path / "out/000000.tar"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DecodeError, match="is not what was packed") as caught:
        all_frames(film, 1)
    assert caught.value.path == f"{shard}:{name}"
    index = tmp_path / "out/index/clips.npy"
    clips = np.load(index)
    for name, number in (("length", -1), ("length", 1 << 40), ("start", -512), ("start", 1 << 40)):
        changed = clips.copy()
        changed[name] = number
        np.save(index, changed)
        with pytest.raises(DecodeError, match=r"outside its shard|damaged"):
            all_frames(ShardStore(read_manifest(tmp_path / "out")), 1)
    np.save(index, clips)
    shard.unlink()
    with pytest.raises(DecodeError, match="No such file"):
        all_frames(film, 1)


# What cannot be packed or read.


@pytest.mark.parametrize(
    ("kind", "bad"), [("jpeg", ["0.mkv", "0.mkv", "p"]), ("video", ["0.mkv", "0.mkv", "p"]), ("bytes", ["p"])]
)
def test_a_span_outside_its_file_is_named_alone(folder: Path, tmp_path: Path, kind: str, bad: list[str]) -> None:
    rows = [ManifestRow("0.mkv", 0, span=span) for span in (Span(0, 4), Span(4, 2**31 - 1), Span(12))]
    store = stored(folder, [*rows, ManifestRow("p", 0, span=Span(5, 20))], "bad.csv")
    found = bad_clips(store, tmp_path / "out", Packing(kind))
    assert [line.split(" has 12 frames, and the span ")[0] for line in found] == [f"{path}:" for path in bad]


def test_bytes_of_a_span_outside_its_file_are_a_bad_clip(folder: Path, tmp_path: Path) -> None:
    store = stored(folder, [ManifestRow("0.mkv", 0, span=Span(4, 13))], "bad.csv")
    with pytest.raises(DecodeError, match=r"0.mkv: has 12 frames, and the span 4:13 does not lie among them"):
        all_frames(_pack(store, tmp_path / "out", "bytes"), 0)


@pytest.mark.parametrize("kind", ["bytes", "jpeg", "video"])
def test_another_span_in_the_manifest_is_found_by_the_checksums(folder: Path, tmp_path: Path, kind: str) -> None:
    packed = _pack(stored(folder), tmp_path / "packed", kind)
    path = tmp_path / "packed" / "manifest" / "spans.npy"
    content = bytearray(path.read_bytes())
    content[-8 * len(packed.manifest) + 4] += 1  # the first clip's end
    path.write_bytes(content)
    with pytest.raises(DecodeError, match="is not what was packed"):
        all_frames(ShardStore(read_manifest(tmp_path / "packed")), 0)
    assert complaints(tmp_path / "packed") == [f"{path}: has other bytes"]
    path.unlink()
    with pytest.raises(UserError, match="is damaged"):
        read_manifest(tmp_path / "packed")
