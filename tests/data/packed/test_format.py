from __future__ import annotations

import io
import json
import tarfile
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from summit_train.core.errors import UserError
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.packed.format import (
    CONTENT_AT,
    SHARD_END,
    Facts,
    Pack,
    Packing,
    StoredFile,
    around_content,
    ending_of,
    picture_checksum,
    read_pack,
)
from summit_train.data.video.span import Span
from tests.data.packed.conftest import NUM_FRAMES, NUM_VIDEOS, PackSet

CLIP = Clip("walk/a.mp4", is_reversed=True)
FACTS = Facts(CLIP, 3, 84)


def test_a_shard_is_a_tar_file_with_webdatasets_names() -> None:
    first = b"one".join(around_content(7, ".mp4", 3, FACTS))
    second = (b"two" * 300).join(around_content(8, ".mjpeg", 900, FACTS, picture_ends=[450, 900]))
    assert first[CONTENT_AT : CONTENT_AT + 3] == b"one"
    with tarfile.open(fileobj=io.BytesIO(first + second + SHARD_END)) as tar:
        members = tar.getmembers()
        names = [f"{7:09}.mp4", f"{7:09}.cls", f"{7:09}.json", f"{8:09}.mjpeg", f"{8:09}.cls", f"{8:09}.json"]
        assert [member.name for member in members] == names
        contents = [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]
        assert contents[:2] == [b"one", b"3"]
        about = {"path": "walk/a.mp4", "label": 3, "num_frames": 84, "reversed": True, "width": 0, "height": 0}
        assert json.loads(contents[2]) == about
        assert json.loads(contents[5]) == about | {"picture_ends": [450, 900]}
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.isreg()) for m in members} == {(0, 0, 0, 0o644, "", True)}


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_the_webdataset_library_reads_a_set(videos: Path, pack_set: PackSet, kind: str) -> None:
    webdataset, out = pytest.importorskip("webdataset"), pack_set(kind=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(webdataset.WebDataset([str(path) for path in sorted(out.glob("*.tar"))], shardshuffle=False))
    manifest = read_manifest(out)
    assert [sample["__key__"] for sample in samples] == [f"{clip:09}" for clip in range(NUM_VIDEOS)]
    for clip, sample in enumerate(samples):
        about = json.loads(sample["json"])
        assert about["path"] == manifest.path(clip)
        assert int(sample["cls"]) == about["label"] == manifest.labels[clip]
        if kind == "bytes":
            assert sample["avi" if clip == 4 else "mp4"] == (videos / about["path"]).read_bytes()
            continue
        ends = [0, *about["picture_ends"]]
        assert len(ends) == NUM_FRAMES + 1 and ends[-1] == len(sample["mjpeg"])
        pictures = [Image.open(io.BytesIO(sample["mjpeg"][start:end])) for start, end in pairwise(ends)]
        assert {picture.size for picture in pictures} == {(52, 40)}


def test_endings_are_the_files_own_where_they_are_safe() -> None:
    assert [ending_of(path) for path in ("a/b.MP4", "a/b.webm")] == [".mp4", ".webm"]
    for path in ("a/b", "a/b.", "x.cls", "x.json", "x.m/../../y", "x.\udcff", "x." + "y" * 40):
        assert ending_of(path) == ".video", path


def test_every_fact_enters_the_checksums() -> None:
    clips = [replace(CLIP, path="walk/\udcff.mp4"), replace(CLIP, is_reversed=False)]
    clips += [replace(CLIP, span=Span(1)), replace(CLIP, span=Span(0, 84))]
    others = [Facts(clip, 3, 84) for clip in clips]
    others += [Facts(CLIP, 4, 84), Facts(CLIP, 3, 85), Facts(CLIP, 3, 84, width=1), Facts(CLIP, 3, 84, height=1)]
    sums = [facts.checksum() for facts in [FACTS, *others]]
    assert len(set(sums)) == len({picture_checksum(one, 0, b"bytes") for one in sums}) == 9
    assert len({picture_checksum(1, 0, b"x"), picture_checksum(1, 1, b"x"), picture_checksum(2, 0, b"x")}) == 3


# The record.


PACK = Pack(
    Packing("jpeg", every=2),
    clips=10,
    clips_per_shard=4,
    fingerprint="ab" * 16,
    shards=tuple(StoredFile(f"{number:06}.tar", 512 * number, "cd" * 32) for number in range(3)),
    files=(StoredFile("index/clips.npy", 3, "ef" * 32),),
)


def _read(folder: Path, text: bytes) -> Pack:
    (folder / "pack.json").write_bytes(text)
    return read_pack(folder)


def test_a_record_that_is_flipped_torn_or_missing_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a finished packed set, but lacks pack"):
        read_pack(tmp_path)
    whole = PACK.text().encode()
    assert _read(tmp_path, whole) == PACK
    flipped = [whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] for n in range(len(whole))]
    for damaged in (*flipped, b"", whole[:1], whole[:100], whole[:-1]):
        with pytest.raises(UserError, match=r"pack\.json: is damaged"):
            _read(tmp_path, damaged)


def test_an_older_set_is_read_and_has_another_fingerprint_than_a_new_one(tmp_path: Path) -> None:
    """Its pictures have half the colour where they were scaled down, and its record says nothing about colour."""
    old, pixels = (
        replace(PACK, packing=Packing("jpeg", every=2, colour="half")),
        "jpeg short side 256, every 2, quality 90",
    )
    assert '"packing": {"kind": "jpeg", "short_side": 256, "every": 2, "quality": 90},' in old.text()
    assert _read(tmp_path, old.text().encode()) == old
    assert (old.packing.pixels, PACK.packing.pixels) == (pixels, f"{pixels}, full colour")
    assert Packing("bytes").entries() == {"kind": "bytes", "short_side": 256, "every": 1, "quality": 90}


@pytest.mark.parametrize("name", ["../000000.tar", "000001.tar", "/etc/passwd", "index/../../x.npy", "manifest/x.sh"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    wrong, what = (StoredFile(name, 0, ""),), "shards" if name.endswith(".tar") else "files"
    with pytest.raises(
        UserError, match=r"is damaged: (the name of a shard|a file) must be"
    ):  # though the checksum is right
        _read(tmp_path, replace(PACK, **{what: wrong}).text().encode())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "png"}, "kind must be bytes or jpeg or video, got 'png'"),
        ({"kind": "jpeg", "quality": 96}, "quality must be 1 to 95, got 96"),
        ({"kind": "jpeg", "every": 0}, "every must be"),
        ({"kind": "jpeg", "colour": "quarter"}, "colour must be full or half, got 'quarter'"),
        ({"kind": "jpeg", "short_side": 0}, "short_side must be"),
        ({"kind": "bytes", "modality": "flow", "method": "dis"}, "kind must be jpeg, got 'bytes'"),
        ({"kind": "jpeg", "modality": "flow"}, "kind must be bytes, got 'jpeg'"),
        ({"kind": "bytes", "modality": "flow"}, "bound must be more than 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Packing(**values)  # type: ignore[arg-type]
