from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.data.packed.format import (
    CONTENT_AT,
    SHARD_END,
    Facts,
    Pack,
    Packing,
    StoredFile,
    encode_sample,
    ending_of,
    picture_checksum,
    read_pack,
    shard_name,
)
from summit_train.data.video.span import Span

FACTS = Facts("walk/a.mp4", 3, 84, True)


def test_a_shard_is_a_tar_file_with_webdatasets_names() -> None:
    first = encode_sample(7, ".mp4", [b"one"], FACTS, {})
    second = encode_sample(8, ".mjpeg", [b"two" * 150] * 2, FACTS, {"picture_ends": [450, 900]})
    shard = first + second + SHARD_END
    assert first[CONTENT_AT : CONTENT_AT + 3] == b"one"
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [
            "000000007.mp4", "000000007.cls", "000000007.json", "000000008.mjpeg", "000000008.cls", "000000008.json",
        ]  # fmt: skip
        contents = [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]
        assert contents[:2] == [b"one", b"3"]
        about = {"path": "walk/a.mp4", "label": 3, "num_frames": 84, "reversed": True, "width": 0, "height": 0}
        assert json.loads(contents[2]) == about
        assert json.loads(contents[5]) == about | {"picture_ends": [450, 900]}
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.isreg()) for m in members} == {(0, 0, 0, 0o644, "", True)}
    assert shard_name(3) == "000003.tar"


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("a/b.MP4", ".mp4"),
        ("a/b.webm", ".webm"),
        ("a/b", ".video"),
        ("a/b.", ".video"),
        ("x.cls", ".video"),
        ("x.json", ".video"),
        ("x.m/../../y", ".video"),
        ("x.\udcff", ".video"),
        ("x." + "y" * 40, ".video"),
    ],
)
def test_endings_are_the_files_own_where_they_are_safe(path: str, ending: str) -> None:
    assert ending_of(path) == ending


def test_every_fact_enters_the_checksums() -> None:
    others = [
        Facts("walk/b.mp4", 3, 84, True), Facts("walk/a.mp4", 4, 84, True), Facts("walk/a.mp4", 3, 85, True),
        Facts("walk/a.mp4", 3, 84, False), Facts("walk/a.mp4", 3, 84, True, 1), Facts("walk/a.mp4", 3, 84, True, 0, 1),
        Facts("walk/\udcff.mp4", 3, 84, True), Facts("walk/a.mp4", 3, 84, True, span=Span(1)),
        Facts("walk/a.mp4", 3, 84, True, span=Span(0, 84)),
    ]  # fmt: skip
    assert len({facts.checksum() for facts in [FACTS, *others]}) == 10
    assert len({picture_checksum(facts.checksum(), 0, b"bytes") for facts in [FACTS, *others]}) == 10
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


def test_what_is_written_is_read(tmp_path: Path) -> None:
    PACK.write(tmp_path)
    assert read_pack(tmp_path) == PACK


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    PACK.write(tmp_path)
    path = tmp_path / "pack.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(UserError, match=r"pack\.json: is damaged"):
                read_pack(tmp_path)


def test_an_older_set_is_read_and_has_another_fingerprint_than_a_new_one(tmp_path: Path) -> None:
    """Its pictures have half the colour where they were scaled down, and its record says nothing about colour."""
    old = replace(PACK, packing=Packing("jpeg", every=2, colour="half"))
    old.write(tmp_path)
    assert '"packing": {"kind": "jpeg", "short_side": 256, "every": 2, "quality": 90},' in old.text()
    assert read_pack(tmp_path) == old
    assert (old.packing.pixels, PACK.packing.pixels) == (PIXELS, f"{PIXELS}, full colour")
    assert Packing("bytes").entries() == {"kind": "bytes", "short_side": 256, "every": 1, "quality": 90}


PIXELS = "jpeg short side 256, every 2, quality 90"


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_torn_record_is_found(tmp_path: Path, length: int) -> None:
    (tmp_path / "pack.json").write_text(PACK.text()[:length])
    with pytest.raises(UserError, match="is damaged"):
        read_pack(tmp_path)


def test_a_folder_without_one_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a finished packed set, but lacks pack"):
        read_pack(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PACK, shards=(StoredFile("../000000.tar", 0, ""),)),
        replace(PACK, shards=(StoredFile("000001.tar", 0, ""),)),
        replace(PACK, files=(StoredFile("/etc/passwd", 0, ""),)),
        replace(PACK, files=(StoredFile("index/../../x.npy", 0, ""),)),
        replace(PACK, files=(StoredFile("manifest/x.sh", 0, ""),)),
    ],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, wrong: Pack) -> None:
    wrong.write(tmp_path)  # with a checksum that is right
    with pytest.raises(UserError, match=r"is damaged: a (shard|file) is named"):
        read_pack(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "png"}, "kind must be bytes or jpeg, got 'png'"),
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


def test_how_many_frames_are_packed() -> None:
    assert [Packing("jpeg", every=3).num_packed(count) for count in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
