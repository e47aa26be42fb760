"""Large manifests: read once, into columns that all processes map."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest import Manifest, ManifestError, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest import reading as manifest_module


def _written(folder: Path, text: str, classes: str | None = None) -> Path:
    path = folder / "list.csv"
    path.write_text(text)
    if classes is not None:
        (folder / "classes.txt").write_text(classes)
    return path


def _read(folder: Path, text: str, classes: str | None = None) -> Manifest:
    return read_manifest(_written(folder, text, classes))


def _clips(manifest: Manifest) -> list[tuple[str, int]]:
    return [(manifest.path(index), manifest.label(index)) for index in range(len(manifest))]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which every manifest is taken for a large one."""
    monkeypatch.setattr(manifest_module, "CACHED_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def _same(one: Manifest, other: Manifest) -> bool:
    arrays = ("offsets", "labels", "frame_counts", "reversed_flags", "lines")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and _clips(one) == _clips(other)
        and (one.classes, one.folder, one.fingerprint()) == (other.classes, other.folder, other.fingerprint())
    )


_MANY = "path,label,num_frames,reversed\n" + "".join(
    f"sub {i % 9}/{i}.mp4,{('run', 'jump', '2')[i % 3]},{i % 50 or ''},{i % 2}\n" for i in range(70_000)
)


@pytest.mark.parametrize("text", [_MANY, "a b.mp4 1\nc.mp4 0\n", "path,label\n\nx,0\n"])
def test_a_large_manifest_is_the_same_as_a_small_one(cached: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large, again = _read(cached, text, "run\njump\nwalk\n"), read_manifest(cached / "list.csv")
    travelled = pickle.loads(pickle.dumps(large))
    assert large.stored is not None and large.stored == again.stored == travelled.stored
    assert len(pickle.dumps(large)) < 500
    monkeypatch.setattr(manifest_module, "CACHED_BYTES", 1 << 30)
    small = read_manifest(cached / "list.csv")
    assert small.stored is None
    for manifest in (large, again, travelled):
        assert _same(manifest, small)
        assert manifest.place(len(manifest) - 1) == small.place(len(small) - 1)


def test_the_fingerprint_in_pieces_is_that_of_the_whole(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _read(cached, _MANY, "run\njump\nwalk\n")
    monkeypatch.setattr(manifest_module, "_AT_ONCE", 1000)
    assert replace(whole, stored_fingerprint="").fingerprint() == whole.fingerprint()


def test_a_large_manifest_is_read_again_when_it_or_its_classes_change(cached: Path) -> None:
    first = _read(cached, "path,label\na,run\n", "run\njump\n")
    assert first.labels.tolist() == [0]
    assert _read(cached, "path,label\na,run\n", "jump\nrun\n").labels.tolist() == [1]
    assert _read(cached, "path,label\na,jump\n", "jump\nrun\n").labels.tolist() == [0]
    assert first.labels.tolist() == [0]


def test_mistakes_in_a_large_manifest_are_named_every_time(cached: Path) -> None:
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"list.csv:3: the path is empty"):
            _read(cached, "path,label\na,0\n,1\n")
    with pytest.raises(ManifestError, match=r"list.csv: there is not one clip in it"):
        _read(cached, "path,label\n")
    assert os.listdir(cached) == ["list.csv"]


def test_a_large_manifest_that_is_still_being_written(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(cached, "path,label\na,0\n")
    keys = iter(["0" * 32, "1" * 32])
    monkeypatch.setattr(manifest_module, "file_key", lambda *_: next(keys))
    with pytest.raises(ManifestError, match="is being written while it is read"):
        read_manifest(path)


def test_a_worker_refuses_columns_that_were_written_anew(cached: Path) -> None:
    manifest = _read(cached, "path,label\na,0\n")
    sent = pickle.dumps(manifest)
    assert manifest.stored is not None
    other = _read(cached, "path,label\nb,0\n")
    assert other.stored is not None
    shutil.rmtree(manifest.stored)
    with pytest.raises(ManifestError, match="is damaged"):
        pickle.loads(sent)
    shutil.copytree(other.stored, manifest.stored)
    with pytest.raises(ManifestError, match="was written anew while a run was using it"):
        pickle.loads(sent)


@pytest.mark.parametrize("name", ["labels.npy", "offsets.npy", "paths.npy", "columns.json"])
def test_damaged_columns_are_named_with_what_to_do(cached: Path, name: str) -> None:
    stored = _read(cached, "path,label\na,0\nb,1\n").stored
    assert stored is not None
    content = (stored / name).read_bytes()
    (stored / name).write_bytes(content[: -2 if name == "columns.json" else -1])
    with pytest.raises(ManifestError, match=r"what was worked out from .* is damaged .*; delete it"):
        read_manifest(cached / "list.csv")


def test_where_no_columns_can_be_written_each_process_has_its_own(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "cached_folder", lambda *_: None)
    manifest = _read(cached, "path,label\na,0\n")
    assert manifest.stored is None
    assert _clips(manifest) == [("a", 0)]


@pytest.mark.parametrize("cached_bytes", [0, 1 << 20])
def test_a_clips_sha256_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_bytes: int) -> None:
    monkeypatch.setattr("summit_train.data.manifest.reading.CACHED_BYTES", cached_bytes)
    rows = [ManifestRow("a.mp4", 0, sha256="ab" * 31 + "00"), ManifestRow("b.mp4", 1)]
    write_manifest(tmp_path / "list.csv", rows)
    manifest = read_manifest(tmp_path / "list.csv")
    assert (manifest.stored is None) == bool(cached_bytes)
    assert [manifest.sha256(clip) for clip in range(2)] == [bytes.fromhex("ab" * 31 + "00"), None]
    write_manifest(tmp_path / "list.csv", [ManifestRow("a.mp4", 0)])
    assert read_manifest(tmp_path / "list.csv").sha256(0) is None


@pytest.mark.parametrize("text", ["ab", "z" * 64, "ab" * 31 + " a", "ab" * 31 + "  "])
def test_a_sha256_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"path,label,sha256\na.mp4,0,\nb.mp4,0,{text}\n")
    with pytest.raises(ManifestError, match=r"list\.csv:3: sha256 is"):
        read_manifest(path)
