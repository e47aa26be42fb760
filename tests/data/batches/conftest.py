"""Nine short videos, and batches of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.data.batches import loader
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import Store, open_store
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.spec import DataSpec

NUM_VIDEOS = 9
NUM_FRAMES = 12
GREY_STEP = 20  # frame i of every video is grey of the value 20 i, and white at its right edge


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of nine short videos of 48 x 32 and their manifest; every third is played backwards."""
    folder = tmp_path_factory.mktemp("videos")
    frames = np.empty((NUM_FRAMES, 32, 48, 3), np.uint8)
    frames[:] = np.arange(NUM_FRAMES, dtype=np.uint8)[:, None, None, None] * GREY_STEP
    frames[:, :, 40:] = 255
    for video in range(NUM_VIDEOS):
        write_video(folder / f"{video}.mp4", frames)
    rows = [
        ManifestRow(f"{video}.mp4", video % 4, NUM_FRAMES if video % 2 else None, reversed=video % 3 == 2)
        for video in range(NUM_VIDEOS)
    ]
    write_manifest(folder / "list.csv", rows)
    return folder


@pytest.fixture
def manifest(videos: Path) -> Manifest:
    return read_manifest(videos / "list.csv")


def data_spec(workers: int = 0, **changes: Any) -> DataSpec:
    settings: dict[str, Any] = {
        "train": "list.csv", "val": "list.csv", "num_frames": 4, "frame_stride": 2,
        "short_side": (24, 32), "crop": 24, "workers": workers,
    }  # fmt: skip
    return DataSpec(**{**settings, **changes})


def reader(data: DataSpec, store: Store, order: Order) -> loader.TrainingClips:
    """What reads the micro-batches of `order`, with the augmentations that the data name."""
    return loader.TrainingClips(data, store, order.seed, tuple(data.open_augment()))


def open_batches(manifest: Manifest, data: DataSpec, **changes: int) -> loader.Batches[loader.MicroBatch]:
    """Four virtual GPUs of one clip, two steps an epoch: eight of the nine videos."""
    how = {"seed": 5, "virtual_gpus": 4, "clips_per_gpu": 1, "steps_per_epoch": 2}
    where = {"rank": 0, "ranks": 1, "start_step": 0, "end_step": 5} | changes
    run = Order(len(manifest), **{name: changes.get(name, number) for name, number in how.items()})
    steps = range(where["start_step"], where["end_step"])
    read = reader(data, open_store(data, manifest), run)
    return read.batches(run, where["rank"], where["ranks"], steps)


def plain(batches: loader.Batches[loader.MicroBatch]) -> list[tuple[Any, ...]]:
    with batches:
        return [(b.step, b.virtual_gpu, b.ids.tolist(), b.labels.tolist(), b.clips.numpy().tobytes()) for b in batches]


def grey(frames: np.ndarray) -> list[int]:
    """Which frame of the video each of the frames (T, h, w, 3) is, read from its darkest pixel."""
    return [round(int(frame.min()) / GREY_STEP) for frame in frames]


def all_keys(manifest: Manifest) -> list[Any]:
    return list(Order(len(manifest), 5, 4, 1, 2).micro_batches(0, 1, range(6)))


@pytest.fixture
def broken(videos: Path, tmp_path: Path) -> Manifest:
    """The manifest with the fourth video cut short."""
    for path in videos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    os.truncate(tmp_path / "3.mp4", 300)
    return read_manifest(tmp_path / "list.csv")
