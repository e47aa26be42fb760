"""From a clip of a list to arrays: what is drawn for it, whole videos in blocks, and the batches of a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.data.batches.loader import Variation, varied
from summit_train.data.dataset import Dataset
from summit_train.data.loading import Store, read_clip, read_training_clip, whole_video
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.augment import View, train_frames, train_view
from summit_train.data.video.render import Frames
from summit_train.plan import make_plan
from summit_train.spec import DataSpec, load_spec
from tests.conftest import WriteSpec
from tests.data.clips import all_of

NUM_FRAMES, WIDTH, HEIGHT = 23, 40, 30


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A folder of 23 pictures, brighter from the left to the right and from one to the next; whole, and in spans."""
    (tmp_path / "a").mkdir()
    across = np.broadcast_to(np.arange(WIDTH, dtype=np.uint8)[None, :, None], (HEIGHT, WIDTH, 3))
    for number in range(NUM_FRAMES):
        Image.fromarray(10 * number + across // 8).save(tmp_path / "a" / f"{number:03}.png")
    rows = ["a,0,,,0", "a,0,,,1", "a,0,5,15,0", "a,0,5,15,1"]
    lines = ["path,label,start_frame,end_frame,reversed", *rows]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    return FileStore(read_manifest(tmp_path / "list.csv"), str(tmp_path))


def _numbers(pixels: Frames) -> list[int]:
    return (pixels.min((1, 2, 3)) // 10).tolist()


def _whole(width: int, height: int) -> list[View]:
    return [all_of(width, height)]


@pytest.mark.parametrize(
    ("clip", "num_frames", "shown"),
    [(0, 23, [0, 1, 22]), (1, 23, [22, 21, 0]), (2, 10, [5, 6, 14]), (3, 10, [14, 13, 5])],
)
def test_frames_are_chosen_in_order_of_playing_and_numbered_in_the_video(
    store: Store, clip: int, num_frames: int, shown: list[int]
) -> None:
    found = read_clip(store, clip, lambda number: np.array([[0, 1, number - 1]]), _whole)
    assert (found.num_frames, found.size, found.views) == (num_frames, (WIDTH, HEIGHT), _whole(WIDTH, HEIGHT))
    assert found.frames.tolist() == [shown] and _numbers(found.pixels[0]) == shown
    assert found.targets(store.manifest, clip) == []


@pytest.mark.parametrize("balanced", [(), (4, 0, 1)])
def test_a_training_clip_is_drawn_by_its_keys(store: Store, balanced: tuple[int, ...]) -> None:
    data = DataSpec(
        train="x", val="x", num_frames=3, frame_stride=2, short_side=(24, 30), crop=20, repeats=2, sampling="uniform"
    )
    drawn = (7, 2, *balanced)
    noted = list[int]()

    def vary(view: Frames, generator: np.random.Generator) -> Frames:
        noted.append(int(generator.integers(1 << 30)))
        return view + np.uint8(len(noted))

    decoded = read_training_clip(data, store, 2, 9, drawn)
    pixels = varied(decoded.pixels, [Variation(vary, "own_augment", (5,))], 9, drawn)
    frames = train_frames("uniform", 10, 3, 2, rng.key(9, "sampling", *drawn))
    turns = [drawn, (*drawn, 1)]
    views = [train_view(data, WIDTH, HEIGHT, rng.key(9, "augment", *turn)) for turn in turns]
    assert views[0] != views[1]
    with store.open(2) as opened:
        expected: NDArray[np.uint8] = opened.read(frames[None], views)
    assert np.array_equal(pixels, expected + np.array([1, 2], np.uint8)[:, None, None, None, None])
    assert noted == [int(rng.key(9, "own_augment", 5, *turn).integers(1 << 30)) for turn in turns]
    assert decoded.targets(store.manifest, 2) == []


@pytest.mark.parametrize("clip", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [4, 10, 23])
def test_a_whole_video_is_shown_in_blocks_in_order_of_playing(store: Store, clip: int, size: int) -> None:
    num_frames = 23 if clip < 2 else 10
    stored = list(range(num_frames)) if clip < 2 else list(range(5, 15))
    played = stored[::-1] if clip % 2 else stored
    for step in (1, 3):
        # Each frame once, whatever the order of the choice.
        blocks = list(
            whole_video(store, clip, lambda number, step=step: np.arange(0, number, step)[::-1].repeat(2), _whole, size)
        )
        chosen = list(range(0, num_frames, step))
        assert [block.frames.size for block in blocks] == [
            min(size, len(chosen) - start) for start in range(0, len(chosen), size)
        ]
        assert [number for block in blocks for number in block.frames[0].tolist()] == chosen
        assert [number for block in blocks for number in _numbers(block.pixels[0])] == played[::step]
        facts = {(block.num_frames, block.size) for block in blocks}
        assert facts == {(num_frames, (WIDTH, HEIGHT))}


# A data set: what training gets, and what each rank scores.


def test_ranks_share_the_clips_that_are_scored(write_spec: WriteSpec) -> None:
    dataset = Dataset.open(load_spec(write_spec()), "val")
    shards = [dataset.shard(rank, 3).tolist() for rank in range(3)]
    assert shards == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


LABELS = ("0", "0;2", ";", "1", "2", "0;1;2")


def _several(write_spec: WriteSpec, motion_set: Path, folder: Path, **sections: object) -> Path:
    """A spec of six clips of three classes."""
    rows = [row.split(",")[0] for row in (motion_set / "train.csv").read_text().splitlines()[1:7]]
    (folder / "list.csv").write_text("path,label\n" + "".join(f"{a},{b}\n" for a, b in zip(rows, LABELS, strict=True)))
    data = {"train": str(folder / "list.csv"), "val": str(folder / "list.csv"), "root": str(motion_set)}
    return write_spec(data=data, model={"num_classes": 3}, scale={"gpus": 1, "clips_per_gpu": 6}, **sections)


def test_several_labels_need_the_binary_loss(write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    path = _several(write_spec, motion_set, tmp_path)
    with pytest.raises(UserError) as raised:
        Dataset.open(load_spec(path), "train")
    what = f"{tmp_path}/list.csv:4: has no labels, but loss.kind softmax takes one per clip; set loss.kind to binary"
    assert str(raised.value) == what
    assert len(Dataset.open(load_spec(path, ["loss.kind=binary"]), "train")) == 6
    single = load_spec(write_spec(loss={"kind": "binary"}))  # one label each is fine
    assert len(Dataset.open(single, "train")) == 80


def test_several_labels_reach_the_batch_and_balanced_classes_share_it(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path
) -> None:
    """Four classes with that of no label, six clips: one or two of each."""
    path = _several(write_spec, motion_set, tmp_path, loss={"kind": "binary"})
    for balance in ("none", "classes"):
        spec = load_spec(path, [f"data.balance={balance}"])
        dataset = Dataset.open(spec, "train")
        plan = make_plan(spec, 1, len(dataset))
        with dataset.training_batches(plan.order(), 0, 1, range(20)) as batches:
            found = list(batches)
        for batch in found:
            assert batch.labels.shape == (6, 3) and batch.labels.dtype == torch.bool
            rows = [np.flatnonzero(row).tolist() for row in batch.labels.numpy()]
            assert rows == [[int(label) for label in LABELS[clip].split(";") if label] for clip in batch.ids.tolist()]
        ids = [clip for batch in found for clip in batch.ids.tolist()]
        if balance == "none":
            assert sorted(ids) == sorted([*range(6)] * 20)
        else:
            # 30 draws of each class: of no label clip 2 alone, of class 1 clips 3 and 5, which 0 and 2 share, too.
            assert len(ids) == 120 and 24 <= ids.count(2) <= 36
            assert 10 <= ids.count(3) <= 20 and 25 <= ids.count(5) <= 45
            assert sum(ids.count(clip) for clip in (0, 1, 4)) <= 50  # 60 where each clip is as likely
