"""A small set of real videos, and it packed both ways."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import pack as packing_module
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.read import ShardStore, stray_files, verify_files
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Frames
from tests.data.clips import all_of, stored_clip

NUM_VIDEOS, NUM_FRAMES, SHARD_BYTES = 7, 12, 16_000
PackSet = Callable[..., Path]


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of videos of 52 x 40 in two class folders, and their manifest; every third is played backwards.

    The frame counts of the even ones are left open.
    """
    folder = tmp_path_factory.mktemp("videos")
    generator = np.random.default_rng(0)
    (folder / "walk").mkdir()
    (folder / "run").mkdir()
    coarse = generator.integers(0, 256, (NUM_VIDEOS, NUM_FRAMES, 5, 7, 3), np.uint8)
    rows = []
    for video in range(NUM_VIDEOS):
        name = f"{('walk', 'run')[video % 2]}/clip {video}.{'avi' if video == 4 else 'mp4'}"
        write_video(folder / name, coarse[video].repeat(8, 1).repeat(8, 2)[:, :40, :52], key_every=4)
        rows.append(ManifestRow(name, video % 2, NUM_FRAMES if video % 2 else None, reversed=video % 3 == 2))
    write_manifest(folder / "list.csv", rows)
    (folder / "classes.txt").write_text("walk\nrun\n")
    return folder


@pytest.fixture(scope="session")
def raw(videos: Path) -> FileStore:
    return stored(videos)


@pytest.fixture(scope="session")
def _packed_once(raw: FileStore, tmp_path_factory: pytest.TempPathFactory) -> PackSet:
    @cache
    def pack(kind: str, **options: int) -> Path:
        out = tmp_path_factory.mktemp("packed")
        packing_module.pack_set(raw, out, Packing(kind, **options), SHARD_BYTES)
        assert len(read_pack(out).shards) >= 3
        return out

    return pack


@pytest.fixture
def pack_set(_packed_once: PackSet, tmp_path: Path) -> PackSet:
    """Copies the packed set for the test: pack_set(kind="jpeg", every=2)."""
    return lambda name="packed", kind="bytes", **options: Path(
        shutil.copytree(_packed_once(kind, **options), tmp_path / name)
    )


def stored(folder: Path, rows: list[ManifestRow] | None = None, name: str = "list.csv") -> FileStore:
    """The clips of a manifest in a folder, which is written if its rows are given."""
    if rows is not None:
        write_manifest(folder / name, rows)
    return FileStore(read_manifest(folder / name), str(folder))


def packed_store(store: FileStore, out: Path, packing: Packing, shard_bytes: int = 1 << 20) -> ShardStore:
    packing_module.pack_set(store, out, packing, shard_bytes)
    return ShardStore(read_manifest(out))


def bad_clips(store: FileStore, out: Path, packing: Packing) -> list[str]:
    """Messages for the clips that cannot be packed, each clip being a shard."""
    job = packing_module.begin(store, out, packing, 1, workers=0)
    assert job is not None
    shards = packing_module.missing_shards(job)
    return [str(bad) for bad in packing_module.pack_shards(job, shards, workers=0) if bad is not None]


def all_frames(store: Any, clip: int) -> Frames:
    """All frames of a clip in their own size: (T, H, W, 3)."""
    return stored_clip(store, clip, np.arange, all_of)


def complaints(folder: Path) -> list[str]:
    """What `data verify` finds in a set."""
    pack = read_pack(folder)
    found = verify_files(folder, pack.every_file, 2)
    return [line for line in found if line is not None] + stray_files(folder, pack)


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
