from __future__ import annotations

from pathlib import Path
from typing import Any

from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.store import FileStore, open_store
from summit_train.spec import DataSpec


def _manifest(folder: Path, *paths: str) -> Manifest:
    write_manifest(folder / "list.csv", [ManifestRow(path, 0) for path in paths])
    return read_manifest(folder / "list.csv")


def _path(manifest: Manifest, clip: int, **data: Any) -> str:
    store = open_store(DataSpec(train="x", val="x", **data), manifest)
    assert isinstance(store, FileStore)
    return store.path(clip)


def test_a_video_lies_below_root_or_beside_the_manifest(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, "a.mp4", "b.mp4")
    assert _path(manifest, 1) == str(tmp_path / "b.mp4")
    assert _path(manifest, 1, root="/else/where") == "/else/where/b.mp4"


def test_beside_the_manifest_where_the_first_clip_lies_there_and_not_below_root(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, "a.mp4", "b.mp4")
    (tmp_path / "a.mp4").touch()
    assert _path(manifest, 1, root="/else/where") == str(tmp_path / "b.mp4")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.mp4").touch()
    assert _path(manifest, 1, root=str(tmp_path / "below")) == str(tmp_path / "below" / "b.mp4")


def test_an_absolute_path_stays_as_it_is(tmp_path: Path) -> None:
    assert _path(_manifest(tmp_path, "/abs/a.mp4"), 0, root="/else/where") == "/abs/a.mp4"
