from __future__ import annotations

import io
import json
import tarfile

import pytest

from summit_train.data.packed.format import (
    Facts,
    clip_checksum,
    ending_of,
    picture_checksum,
    sample,
    shard_end,
    shard_name,
)

FACTS = Facts("walk/a.mp4", 3, 84, True)


def test_a_shard_is_a_tar_file_with_webdatasets_names() -> None:
    first, start = sample(7, ".mp4", b"one", FACTS, {})
    second, _ = sample(8, ".mjpeg", b"two" * 300, FACTS, {"picture_ends": [450, 900]})
    shard = first + second + shard_end()
    assert first[start : start + 3] == b"one"
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
        Facts("walk/\udcff.mp4", 3, 84, True),
    ]  # fmt: skip
    assert len({facts.checksum() for facts in [FACTS, *others]}) == 8
    assert len({clip_checksum(facts, b"bytes") for facts in [FACTS, *others]}) == 8
    assert len({picture_checksum(1, 0, b"x"), picture_checksum(1, 1, b"x"), picture_checksum(2, 0, b"x")}) == 3
