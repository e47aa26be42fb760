"""A small set of real videos, and it packed both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed import pack as packing_module
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.video.encode import write_video

NUM_VIDEOS, NUM_FRAMES = 11, 12
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


@pytest.fixture
def raw(videos: Path) -> FileStore:
    return FileStore(read_manifest(videos / "list.csv"), str(videos))


@pytest.fixture
def pack_set(raw: FileStore, tmp_path: Path) -> PackSet:
    """Packs the set in this process: pack_set(kind="jpeg", every=2)."""

    def pack(name: str = "packed", kind: str = "bytes", shard_bytes: int = 16_000, **options: int) -> Path:
        out = tmp_path / name
        packing_module.pack_set(raw, out, Packing(kind, **options), shard_bytes)
        assert len(read_pack(out).shards) >= 3
        return out

    return pack


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
