from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
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
from summit_train.data.packed.format import read_pack
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.packed.stage import Staged, stage
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec
from tests.data.packed.conftest import NUM_VIDEOS, PackSet, content_of, pack_set, raw, videos
from tests.data.packed.test_read import _all_frames
from tests.killing import killed_at

__all__ = ["pack_set", "raw", "videos"]  # fixtures


@pytest.fixture(params=["bytes", "jpeg"])
def packed(request: pytest.FixtureRequest, pack_set: PackSet) -> Path:
    return pack_set(kind=request.param)


@pytest.fixture
def packed_bytes(pack_set: PackSet) -> Path:
    return pack_set()


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "node"


def _stage(packed: Path, dest: Path, max_bytes: int | None = None) -> Staged:
    return stage(packed, dest, lambda done, total: None, max_bytes)


def _store(packed: Path, dest: Path) -> ShardStore:
    data = DataSpec(train=str(packed), val=str(packed), stage=str(dest))
    store = open_store(data, read_manifest(packed))
    assert isinstance(store, ShardStore)
    return store


def _same_frames(store: ShardStore, packed: Path) -> bool:
    shared = open_store(DataSpec(train=str(packed), val=str(packed)), store.manifest)
    return all(np.array_equal(_all_frames(store, c), _all_frames(shared, c)) for c in range(NUM_VIDEOS))


def test_a_copy_is_the_whole_set_and_read_instead_of_it(packed: Path, dest: Path) -> None:
    size = sum(len(content) for name, content in content_of(packed).items() if name != "pack.json")
    assert _stage(packed, dest) == Staged(copied=size, present=0)
    folder = staged_folder(dest, packed)
    assert folder.parent == dest
    assert content_of(folder) == content_of(packed)
    store = _store(packed, dest)
    assert _same_frames(store, packed)
    assert {Path(path).parent for path in store._files} == {folder}
    # It stands alone: the shared one may be out of reach.
    assert main(["data", "verify", str(folder)]) == 0
    assert _stage(packed, dest) == Staged(copied=0, present=size)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "longer"])
def test_what_is_there_and_wrong_is_copied_again(packed: Path, dest: Path, damage: str) -> None:
    _stage(packed, dest)
    folder = staged_folder(dest, packed)
    shard = folder / "000001.tar"
    whole = shard.read_bytes()
    changed = {"flip": whole[:700] + bytes([whole[700] ^ 1]) + whole[701:], "cut": whole[:-1], "longer": whole + b"\0"}
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(changed[damage])
    assert _stage(packed, dest).copied == len(whole)
    assert content_of(folder) == content_of(packed)


def test_another_set_has_another_folder(pack_set: PackSet, dest: Path) -> None:
    one, other = pack_set(name="a/train"), pack_set(name="b/train", kind="jpeg")
    assert _stage(one, dest).warning == _stage(other, dest).warning == ""
    assert staged_folder(dest, one) != staged_folder(dest, other)
    for packed in (one, other):
        assert content_of(staged_folder(dest, packed)) == content_of(packed)


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
    assert not any(".writing" in name for name in content_of(dest))
    shard.write_bytes(whole)
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


@pytest.mark.parametrize("stride", [2])
def test_killed_at_any_moment_the_next_call_makes_the_same(packed_bytes: Path, dest: Path, stride: int) -> None:
    wanted, number = content_of(packed_bytes), 1
    while killed_at(number, dest, lambda: _stage(packed_bytes, dest)):
        assert _same_frames(_store(packed_bytes, dest), packed_bytes)  # a part of a copy is not read
        assert _stage(packed_bytes, dest).warning == ""
        assert content_of(staged_folder(dest, packed_bytes)) == wanted, f"killed at operation {number}"
        shutil.rmtree(dest)
        number += stride
    assert number > 30
    assert content_of(staged_folder(dest, packed_bytes)) == wanted


def test_two_processes_share_the_work_of_one_node(packed_bytes: Path, dest: Path) -> None:
    from tests.worlds import program

    words = program(0, "-m", "summit_train", "data", "stage", str(packed_bytes), str(dest))
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(": 0 bytes copied and checked" in out for out, _ in outputs) == 1
    assert content_of(staged_folder(dest, packed_bytes)) == content_of(packed_bytes)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_shard_is_reported_once_and_read_from_the_shared_set(
    packed: Path, dest: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    _stage(packed, dest)
    shard = staged_folder(dest, packed) / "000001.tar"
    content = bytearray(shard.read_bytes())
    content[512::7] = bytes(len(content[512::7]))
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content[:600] if damage == "cut" else content)
    store = _store(packed, dest)
    assert _same_frames(store, packed)
    (said,) = caplog.messages
    assert f"{shard}:" in said and f"read from {packed} instead" in said
    first = np.load(packed / "index" / "clips.npy")["shard"].tolist().index(1)
    (packed / "000001.tar").write_bytes(content)  # nothing is left to fall back on
    with pytest.raises(DecodeError, match=r"packed/000001\.tar:"):
        _all_frames(_store(packed, dest), first)


# Disks that are too small, and disks that fail.


def test_a_set_that_does_not_fit_is_not_copied(packed: Path, dest: Path) -> None:
    size = sum(file.size for file in read_pack(packed).every_file)
    staged = _stage(packed, dest, max_bytes=size // 2)
    assert (staged.copied, staged.present) == (0, 0)
    assert f"{dest}: there is not enough room for " in staged.warning
    assert staged.warning.endswith(f": the set is read from {packed}")
    assert not staged_folder(dest, packed).exists()
    assert _same_frames(_store(packed, dest), packed)
    assert _stage(packed, dest) == Staged(copied=size)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("after", [0, 3, 11])
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
    assert _same_frames(_store(packed, dest), packed)
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


def test_a_missing_disk_is_one_warning(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "mnt" / "nvme" / "mine"
    assert main(["data", "stage", str(packed), str(dest)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: {dest}: No such file or directory ({dest}): the set is read from {packed}"
    assert not (tmp_path / "mnt").exists()
    assert _same_frames(_store(packed, dest), packed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB of its own, full to the last block when it is."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_real_disk_that_is_too_small(packed: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for message in ("there is not enough room", "No space left on device"):
        staged = _stage(packed, small_disk / "node")
        assert message in staged.warning
        assert not staged_folder(small_disk / "node", packed).exists()
        assert _same_frames(_store(packed, small_disk / "node"), packed)
        # The second time others fill it while it is written to.
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40, total=1 << 40))


def test_a_folder_that_is_not_a_packed_set_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stage", str(tmp_path), str(tmp_path / "node")]) == 2
    assert "must be a finished packed set, but lacks pack.json" in capsys.readouterr().err
