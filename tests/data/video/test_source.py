"""Files that are written while they are read: what was read of them is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.files import file_sha256, read_file
from summit_train.data.video import source
from summit_train.data.video.source import DecodeError, Encoded, load_video


def test_a_held_file_that_is_written_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old bytes")
    assert load_video(str(path), None).content == b"old bytes"

    def read_then_written(name: str) -> bytes:
        content = read_file(name)
        path.write_bytes(b"more bytes than before")
        return content

    monkeypatch.setattr(source, "read_file", read_then_written)
    with pytest.raises(DecodeError, match=r"a\.mp4: has changed while it was read"):
        load_video(str(path), None)


def test_a_digest_is_of_the_file_that_was_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old bytes")
    video = Encoded(str(path), state=Encoded(str(path)).check())
    assert video.sha256() == file_sha256(path)
    path.write_bytes(b"more bytes than before")
    with pytest.raises(DecodeError, match=r"a\.mp4: has changed while it was read"):
        video.sha256()
