from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.data.packed import stage as staging_module
from summit_train.data.packed.format import CLIP_ROW, PICTURE_ROW, read_pack
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.packed.stage import Staged, stage
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec
from tests.data.packed.conftest import NUM_VIDEOS, PackSet, all_frames, content_of
from tests.killing import killed_at


@pytest.fixture
def packed(pack_set: PackSet) -> Path:
    return pack_set()


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "node"


def _stage(packed: Path, dest: Path) -> Staged:
    return stage(packed, dest, lambda done, total: None)


def _store(packed: Path, dest: Path) -> ShardStore:
    data = DataSpec(train=str(packed), val=str(packed), stage=str(dest))
    store = open_store(data, read_manifest(packed))
    assert isinstance(store, ShardStore)
    return store


def _same_frames(store: ShardStore, packed: Path) -> bool:
    shared = open_store(DataSpec(train=str(packed), val=str(packed)), store.manifest)
    return all(np.array_equal(all_frames(store, c), all_frames(shared, c)) for c in range(NUM_VIDEOS))


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_copy_is_the_whole_set_and_read_instead_of_it(pack_set: PackSet, dest: Path, kind: str) -> None:
    packed = pack_set(kind=kind)
    size = sum(len(content) for name, content in content_of(packed).items() if name != "pack.json")
    assert _stage(packed, dest) == Staged(copied=size, present=0)
    folder = staged_folder(dest, packed)
    assert folder.parent == dest
    assert content_of(folder) == content_of(packed)
    store = _store(packed, dest)
    assert _same_frames(store, packed)
    assert {Path(path).parent for path in store._files} == {folder}
    # The copy is a set of its own: the shared one may be out of reach.
    assert main(["data", "verify", str(folder)]) == 0
    assert _stage(packed, dest) == Staged(copied=0, present=size)


def test_another_set_has_another_folder(pack_set: PackSet, dest: Path) -> None:
    sets = pack_set(name="a/train"), pack_set(name="b/train", kind="jpeg")
    assert [_stage(packed, dest).warning for packed in sets] == ["", ""]
    assert [content_of(staged_folder(dest, packed)) for packed in sets] == [content_of(packed) for packed in sets]


def test_a_damaged_set_is_not_spread(packed: Path, dest: Path) -> None:
    shard = packed / "000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    with pytest.raises(UserError, match=r"000001\.tar: is not what was packed; run `data verify`"):
        _stage(packed, dest)
    assert not (staged_folder(dest, packed) / "000001.tar").exists()
    shard.unlink()
    with pytest.raises(UserError, match=r"000001\.tar: No such file"):
        _stage(packed, dest)
    shard.symlink_to("/proc/self/mem")  # its reads fail, not its opening
    with pytest.raises(UserError, match=rf"^{shard}: Input/output error"):
        _stage(packed, dest)
    assert not any(".writing" in name for name in content_of(dest))
    shard.unlink()
    shard.write_bytes(whole)
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


@pytest.mark.nightly
def test_killed_at_any_moment_the_next_call_makes_the_same(
    packed: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes most of the time, and a kill loses no written byte
    whole, number = content_of(packed), 1
    while killed_at(number, dest, lambda: _stage(packed, dest)):
        assert _same_frames(_store(packed, dest), packed)  # a part of a copy is not read
        assert _stage(packed, dest).warning == ""
        assert content_of(staged_folder(dest, packed)) == whole, f"killed at operation {number}"
        shutil.rmtree(dest)
        number += 1
    assert number > 30
    assert content_of(staged_folder(dest, packed)) == whole


def test_two_processes_share_the_work_of_one_node(packed: Path, dest: Path) -> None:
    words = [sys.executable, "-m", "summit_train", "data", "stage", str(packed), str(dest)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(": 0 B copied and checked" in out for out in outputs) == 1
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "longer"])
def test_a_damaged_shard_is_reported_once_and_read_from_the_shared_set(
    packed: Path, dest: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    _stage(packed, dest)
    shard, shared = staged_folder(dest, packed) / "000001.tar", packed / "000001.tar"
    whole = shard.read_bytes()
    zeros = bytearray(whole)
    zeros[512::7] = bytes(len(zeros[512::7]))
    shard.write_bytes({"flipped": bytes(zeros), "cut": whole[:600]}.get(damage, whole + b"\0"))
    if damage == "gone":
        shard.unlink()
    assert _same_frames(_store(packed, dest), packed)
    said = [f"{shard}:" in line and f"read from {packed} instead" in line for line in caplog.messages]
    assert said == ([True] if damage != "longer" else [])
    # Staging again replaces it.
    assert _stage(packed, dest).copied == len(whole)
    assert content_of(staged_folder(dest, packed)) == content_of(packed)
    # Where both are damaged, nothing is left to fall back on.
    shard.write_bytes(zeros)
    shared.write_bytes(zeros)
    first = np.load(packed / "index" / "clips.npy")["shard"].tolist().index(1)
    with pytest.raises(DecodeError, match=r"packed/000001\.tar:"):
        all_frames(_store(packed, dest), first)


def test_where_the_shared_sets_index_is_damaged_too_that_is_named(pack_set: PackSet, dest: Path) -> None:
    packed = pack_set(kind="jpeg")
    _stage(packed, dest)
    rows = np.load(packed / "index" / "pictures.npy")
    np.save(packed / "index" / "pictures.npy", rows[:-3])
    shard = sorted(staged_folder(dest, packed).glob("*.tar"))[-1]
    shard.write_bytes(bytes(shard.stat().st_size))
    last = len(read_manifest(packed)) - 1
    with pytest.raises(DecodeError, match=r"packed/0000\d\d\.tar:.* is not what was packed"):
        all_frames(_store(packed, dest), last)


@pytest.mark.parametrize("kind", ["bytes", "jpeg"])
def test_a_flip_in_the_copys_index_is_reported_and_the_shared_set_is_read(
    pack_set: PackSet, dest: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    packed = pack_set(kind=kind)
    _stage(packed, dest)
    rows = {"clips.npy": CLIP_ROW} | ({"pictures.npy": PICTURE_ROW} if kind == "jpeg" else {})
    for name, field in [(name, field) for name, row in rows.items() for field in (None, *(row.names or ()))]:
        path = staged_folder(dest, packed) / "index" / name
        whole = path.read_bytes()
        if field is None:
            path.write_bytes(whole[:10] + b"?" + whole[11:])  # of the header
        else:
            flipped = np.load(path)
            flipped[field][1] ^= 2
            np.save(path, flipped)
        caplog.clear()
        assert _same_frames(_store(packed, dest), packed), (name, field)
        assert all(f" is read from {packed} instead" in line for line in caplog.messages)
        # In a set of original bytes no clip has a first picture.
        assert bool(caplog.messages) != (kind == "bytes" and field == "first"), (name, field)
        path.write_bytes(whole)


# Disks that are too small, and disks that fail.


def test_a_set_that_does_not_fit_is_not_copied(packed: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.size for file in read_pack(packed).every_file)
    for free, fits in ((size - 1, False), (size + 19, False), (size + 20, True)):  # 2 % of 1000 bytes stay free
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free, total=1000))
        staged = _stage(packed, dest)
        assert staged.copied == (size if fits else 0) and staged_folder(dest, packed).exists() == fits
        lacking = f"{dest}: the disk lacks room for {size:,} bytes ({staged_folder(dest, packed)})"
        assert staged.warning == ("" if fits else f"{socket.gethostname()}: {lacking}: the set is read from {packed}")
        assert _same_frames(_store(packed, dest), packed)


@pytest.mark.parametrize(("error", "after"), [(errno.ENOSPC, 0), (errno.EDQUOT, 3), (errno.EROFS, 9)])
def test_a_disk_that_fails_on_the_way_is_one_warning(
    packed: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    whole, calls = staging_module.replacing, []

    def fails(path: Path) -> Any:
        calls.append(path)
        if len(calls) > after:
            raise OSError(error, os.strerror(error), str(path))
        return whole(path)

    with monkeypatch.context() as patched:
        patched.setattr(staging_module, "replacing", fails)
        staged = _stage(packed, dest)
    assert os.strerror(error) in staged.warning and "the set is read from" in staged.warning
    assert not staged_folder(dest, packed).exists()
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


def test_a_missing_disk_is_one_warning(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "mnt" / "nvme" / "mine"
    assert main(["data", "stage", str(packed), str(dest)]) == 0
    why = f"{dest}: No such file or directory ({dest}): the set is read from {packed}"
    assert capsys.readouterr().err == f"warning: {socket.gethostname()}: {why}\n"
    assert not (tmp_path / "mnt").exists()
    assert _same_frames(_store(packed, dest), packed)
