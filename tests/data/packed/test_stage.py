from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.data.packed import stage as staging_module
from summit_train.data.packed.format import PackError, read_pack
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.packed.stage import Needed, Staged, Staging, room
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


def _stage(packed: Path, dest: Path, needed: Needed | None = None, max_bytes: int | None = None) -> Staged:
    staging = Staging(packed, dest, needed, max_bytes)
    for _ in staging.work():
        pass
    return staging.result


def _store(packed: Path, dest: Path) -> ShardStore:
    data = DataSpec(train=str(packed), val=str(packed), stage=str(dest))
    store = open_store(data, read_manifest(packed))
    assert isinstance(store, ShardStore)
    return store


def _reads_from(store: ShardStore) -> list[str]:
    """Where each clip was read: 'whole' (here), 'part' (here) or 'shared'."""
    seen = []
    for clip in range(NUM_VIDEOS):
        path = store._path(clip, store._index.place(clip))
        seen.append("part" if "/partial/" in path else "whole" if "/node/" in path else "shared")
    return seen


def _same_frames(store: ShardStore, packed: Path) -> bool:
    shared = open_store(DataSpec(train=str(packed), val=str(packed)), store.manifest)
    return all(np.array_equal(_all_frames(store, c), _all_frames(shared, c)) for c in range(NUM_VIDEOS))


# A set that fits.


def test_a_copy_is_the_whole_set(packed: Path, dest: Path) -> None:
    size = sum(len(content) for name, content in content_of(packed).items() if name != "pack.json")
    assert _stage(packed, dest) == Staged(copied=size, present=0)
    folder = staged_folder(dest, packed)
    assert folder.parent == dest
    assert content_of(folder) == content_of(packed)
    store = _store(packed, dest)
    assert _reads_from(store) == ["whole"] * NUM_VIDEOS
    assert _same_frames(store, packed)
    # It stands alone: the shared one may be out of reach.
    assert main(["data", "verify", str(folder)]) == 0


def test_what_is_there_is_not_copied_again(packed: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = _stage(packed, dest).copied
    read: list[Path] = []
    monkeypatch.setattr(staging_module, "_blocks", lambda path: read.append(path))
    assert _stage(packed, dest) == Staged(copied=0, present=size)
    assert read == []


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


def test_a_right_copy_without_its_mark_is_recognised(packed: Path, dest: Path) -> None:
    size = _stage(packed, dest).copied
    os.utime(staged_folder(dest, packed) / "000001.tar")
    assert _stage(packed, dest) == Staged(copied=0, present=size)


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
    with pytest.raises(PackError, match=r"000001\.tar: is not what was packed; `data verify` says more"):
        _stage(packed, dest)
    assert not (staged_folder(dest, packed) / "000001.tar").exists()
    shard.unlink()
    with pytest.raises(PackError, match=r"000001\.tar: No such file"):
        _stage(packed, dest)
    assert not any(".writing" in name for name in content_of(dest))
    shard.write_bytes(whole)
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


@pytest.mark.parametrize("stride", [2])
def test_killed_at_any_moment_the_next_call_makes_the_same(packed_bytes: Path, dest: Path, stride: int) -> None:
    wanted, number = content_of(packed_bytes), 1
    while killed_at(number, dest, lambda: _stage(packed_bytes, dest)):
        assert _same_frames(_store(packed_bytes, dest), packed_bytes)  # whatever is there can be read
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


# A set that does not fit.


def _index_room(packed: Path) -> int:
    """What the manifest and the index take, and the note of which clips are there."""
    return sum(room(file.size) for file in read_pack(packed).files)


def _clips_room(packed: Path, *clips: int) -> int:
    lengths = np.load(packed / "index" / "clips.npy")["length"]
    return sum(room(int(lengths[clip])) + 4096 for clip in clips)


def test_without_knowing_what_is_needed_the_first_shards_are_copied(packed: Path, dest: Path) -> None:
    shards = read_pack(packed).shards
    limit = _index_room(packed) + room(shards[0].size) + room(shards[1].size)
    staged = _stage(packed, dest, max_bytes=limit)
    assert f"{dest}: there is not enough room: " in staged.warning
    assert staged.warning.endswith(f"the rest is read from {packed}")
    folder = staged_folder(dest, packed)
    assert sorted(path.name for path in folder.glob("*.tar")) == ["000000.tar", "000001.tar"]
    assert not (folder / "pack.json").exists()
    store = _store(packed, dest)
    assert {"whole", "shared"} == set(_reads_from(store))
    assert _same_frames(store, packed)
    # With more room the rest comes too.
    assert _stage(packed, dest) == Staged(sum(s.size for s in shards[2:]), staged.copied, "")
    assert content_of(folder) == content_of(packed)


def _wanted(*clips: list[int]) -> Needed:
    return lambda: iter([np.array(some) for some in clips])


def test_the_clips_that_are_needed_first_are_copied(packed: Path, dest: Path) -> None:
    wanted = _wanted([7, 2], [7, 9, 0])
    staged = _stage(packed, dest, wanted, _index_room(packed) + _clips_room(packed, 7, 2, 9))
    assert "there is not enough room" in staged.warning
    store = _store(packed, dest)
    assert _reads_from(store) == ["part" if clip in (2, 7, 9) else "shared" for clip in range(NUM_VIDEOS)]
    assert _same_frames(store, packed)
    again = _stage(packed, dest, _wanted([7, 2, 9]), _index_room(packed) + _clips_room(packed, 7, 2, 9) + 9000)
    assert again.copied == 0
    # Where there is room for all of it, the pieces give way.
    assert _stage(packed, dest, _wanted([0])).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


def test_a_clip_that_is_damaged_in_the_shared_set_is_named(packed: Path, dest: Path) -> None:
    row = np.load(packed / "index" / "clips.npy")[7]
    shard = packed / f"{row['shard']:06}.tar"
    whole = bytearray(shard.read_bytes())
    whole[row["start"] + 9] ^= 4
    shard.write_bytes(whole)
    with pytest.raises(PackError, match=r"run/clip 7\.mp4 is not what was packed"):
        _stage(packed, dest, _wanted([2, 7]), _index_room(packed) + _clips_room(packed, 2, 7))


def test_a_damaged_piece_is_reported_and_read_from_the_shared_set(
    packed_bytes: Path, dest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _stage(packed_bytes, dest, _wanted([0]), _index_room(packed_bytes) + _clips_room(packed_bytes, 0))
    row = np.load(packed_bytes / "index" / "clips.npy")[0]
    path = staged_folder(dest, packed_bytes) / "partial" / "000000.tar"
    with open(path, "r+b") as file:
        file.seek(row["start"])
        file.write(b"????")
    assert _same_frames(_store(packed_bytes, dest), packed_bytes)
    (said,) = caplog.messages
    assert f"{path}:walk/clip 0.mp4: is not what was packed" in said and f"read from {packed_bytes} instead" in said


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_shard_is_reported_once_and_read_from_the_shared_set(
    packed: Path, dest: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    _stage(packed, dest)
    shard = staged_folder(dest, packed) / "000001.tar"
    first = np.load(packed / "index" / "clips.npy")["shard"].tolist().index(1)
    content = bytearray(shard.read_bytes())
    if damage == "cut":
        del content[600:]
    else:
        content[512::7] = bytes(len(content[512::7]))
    shard.write_bytes(content)
    store = _store(packed, dest)
    assert _same_frames(store, packed)
    assert [f"{shard}:" in said for said in caplog.messages] == [True]
    assert _reads_from(store)[first - 1 : first + 1] == ["whole", "shared"]
    (packed / "000001.tar").write_bytes(content)  # nothing is left to fall back on
    with pytest.raises(DecodeError, match=r"packed/000001\.tar:"):
        _all_frames(_store(packed, dest), first)


@pytest.mark.parametrize("operation", range(1, 40, 3))
def test_killed_while_it_copies_clips_the_next_call_goes_on(
    pack_set: PackSet, dest: Path, operation: int, tmp_path: Path
) -> None:
    packed = pack_set()
    needed, limit = _wanted([7, 2, 5, 1, 0]), _index_room(packed) + _clips_room(packed, 7, 2, 5, 1)
    _stage(packed, tmp_path / "undisturbed", needed, limit)
    killed_at(operation, dest, lambda: _stage(packed, dest, needed, limit))
    assert _same_frames(_store(packed, dest), packed)
    _stage(packed, dest, needed, limit)
    assert content_of(staged_folder(dest, packed)) == content_of(staged_folder(tmp_path / "undisturbed", packed))


# Disks that fail.


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("after", [0, 3, 11])
def test_a_disk_that_gives_up_on_the_way_is_one_warning(
    packed: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    whole, calls = staging_module.replacing, []

    def gives_up(path: Path) -> Any:
        calls.append(path)
        if len(calls) > after:
            raise OSError(error, os.strerror(error), str(path))
        return whole(path)

    with monkeypatch.context() as patched:
        patched.setattr(staging_module, "replacing", gives_up)
        staged = _stage(packed, dest)
    assert os.strerror(error) in staged.warning and "the rest is read from" in staged.warning
    assert _same_frames(_store(packed, dest), packed)
    assert _stage(packed, dest).warning == ""
    assert content_of(staged_folder(dest, packed)) == content_of(packed)


def test_a_disk_that_is_not_there(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "mnt" / "nvme" / "mine"
    assert main(["data", "stage", str(packed), str(dest)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {dest}: No such file or directory ({dest}): 0 of ")
    assert line.endswith(f" bytes are there, the rest is read from {packed}")
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
    staged = _stage(packed, small_disk / "node", _wanted([3, 1]))
    assert "there is not enough room" in staged.warning
    assert _same_frames(_store(packed, small_disk / "node"), packed)
    # One that fills up while it is written to: nobody else was expected there.
    shutil.rmtree(small_disk / "node")
    monkeypatch.setattr(Staging, "_budget", lambda *_: 1 << 40)
    staged = _stage(packed, small_disk / "node")
    assert "No space left on device" in staged.warning
    assert not any(".writing" in name for name in content_of(small_disk))
    assert _same_frames(_store(packed, small_disk / "node"), packed)


def test_what_is_no_packed_set_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stage", str(tmp_path), str(tmp_path / "node")]) == 2
    assert "is no packed set, or not a finished one" in capsys.readouterr().err


# Which clips a node needs.


@pytest.mark.parametrize(("ranks", "mine"), [(1, [0]), (4, [0, 1]), (4, [2, 3]), (4, [0, 1, 2, 3])])
@pytest.mark.parametrize("start", [0, 3, 5])
def test_the_clips_of_a_nodes_ranks_are_those_that_they_will_play(ranks: int, mine: list[int], start: int) -> None:
    run = {"num_clips": 50, "seed": 3, "virtual_gpus": 8, "clips_per_gpu": 2, "steps_per_epoch": 3}
    order, steps = Order(**run), range(start, 8)
    epochs = list(order.clips_of_ranks(mine, ranks, steps))
    played: dict[int, list[int]] = {}
    for rank in mine:
        for step, _, _, clips in order.micro_batches(rank, ranks, steps):
            played.setdefault(step // 3, []).extend(clips.tolist())
    assert [sorted(clips.tolist()) for clips in epochs] == [sorted(played[epoch]) for epoch in sorted(played)]
    first = next(order.micro_batches(mine[0], ranks, steps))
    assert epochs[0][:2].tolist() == first[3].tolist()
