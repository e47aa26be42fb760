"""How videos are decoded, and where the indexes of films are kept, in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.data.video import clips


@pytest.fixture
def from_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the videos whose decoding was begun at the start."""
    names = list[str]()
    every_frame = clips.every_frame
    monkeypatch.setattr(clips, "every_frame", lambda video, *a: names.append(video.name) or every_frame(video, *a))
    return names


@pytest.fixture
def kept_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the films' indexes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/summit_train/films"
