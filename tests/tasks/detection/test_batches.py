"""Boxes in training batches: where the clip shows what the list names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import MicroBatch, TrainingClips, test_batches
from summit_train.data.batches.order import Order
from summit_train.data.batches.spans import SpanStore
from summit_train.data.batches.stores import Store, open_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec, load_spec
from summit_train.tasks.detection.boxes import Boxes
from tests.conftest import WriteSpec
from tests.data.packed.conftest import all_frames
from tests.detectors import detector_spec

HEADER = "video,frame,track,label,left,top,width,height,ignore\n"
T = 12


def _write(folder: Path, sizes: dict[str, tuple[int, int]], seed: int = 0) -> None:
    """Videos of black frames with one white box each, which moves, and their list; frame 5 has none."""
    generator, rows = np.random.default_rng(seed), [HEADER]
    for name, (width, height) in sizes.items():
        frames = np.zeros((T, height, width, 3), np.uint8)
        for number in range(T):
            if number == 5:
                continue
            left, top = (int(generator.integers(0, side - 20)) for side in (width, height))
            across, down = (int(side) for side in generator.integers(12, 20, 2))
            frames[number, top : top + down, left : left + across] = 255
            rows.append(f"{name},{number},0,{number % 3},{left},{top},{across},{down},\n")
        write_video(folder / name, frames, codec="ffv1", b_frames=0)
    (folder / "list.csv").write_text("".join(rows))


def _spec(folder: Path, **changes: Any) -> DataSpec:
    settings = {"num_frames": 6, "frame_stride": 1, "short_side": (40, 60), "crop": 32, "workers": 0, **changes}
    return DataSpec(train=str(folder / "list.csv"), val=str(folder / "list.csv"), **settings)


def box_batches(data: DataSpec, store: Store, clips: int, epochs: int, seed: int = 3) -> list[MicroBatch]:
    order = Order(len(store.manifest), seed, virtual_gpus=1, clips_per_gpu=clips, steps_per_epoch=1)
    read = TrainingClips(data, store, seed)
    with read.batches(order, 0, 1, range(epochs)) as batches:
        return list(batches)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seed=st.integers(0, 1000),
    augment=st.sampled_from(["whole", "whole", "scale_jitter", "multi_scale_crop"]),
    stride=st.integers(1, 2),
    long_side=st.sampled_from([None, 70]),
)
def test_a_white_box_is_where_its_target_says(
    tmp_path: Path, seed: int, augment: Any, stride: int, long_side: int | None
) -> None:
    _write(tmp_path, {"a.mkv": (72, 50), "b.mkv": (48, 90)}, seed)
    data = _spec(tmp_path, augment=augment, frame_stride=stride, long_side=long_side)
    found = 0
    for batch in box_batches(data, open_store(data, read_manifest(data.train)), 2, 3, seed):
        assert batch.labels.shape == (2, 6, 1, 5) and batch.labels.dtype.is_floating_point
        for clip, targets in zip(batch.clips.numpy(), batch.labels.numpy()[:, :, 0], strict=True):
            for picture, (left, top, right, bottom, label) in zip(clip, targets, strict=True):
                # Each edge is where the brightness passes the middle, to half a pixel.
                white = picture[..., 0] > 127
                if label < 0:
                    assert white.sum() <= 2 * max(white.shape) and [left, top, right, bottom, label] == [-1] * 5
                    continue
                found += 1
                if min(right - left, bottom - top) < 2:
                    continue
                columns, rows = np.flatnonzero(white.any(0)), np.flatnonzero(white.any(1))
                seen = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                np.testing.assert_allclose(seen, [left, top, right, bottom], atol=1.01)
    assert found > 5 or augment != "whole"


def test_a_view_moves_boxes_as_worked_by_hand() -> None:
    """A frame of 100 x 50, scaled by 2 and 4, cut at 20, 8 to 60 x 80: x -> 2 x - 20, y -> 4 y - 8; then mirrored."""
    boxes = np.array([[0, 0, 1, 1], [20, 5, 30, 10.5], [35, 20, 90, 50]], np.float32)
    view = View(200, 200, 20, 8, 60, 80)
    assert view.moved(boxes, (100, 50)).tolist() == [[0, 0, 0, 0], [20, 12, 40, 34], [50, 72, 60, 80]]
    mirrored = View(200, 200, 20, 8, 60, 80, flip=True)
    assert mirrored.moved(boxes, (100, 50)).tolist() == [[60, 0, 60, 0], [20, 12, 40, 34], [0, 72, 10, 80]]
    whole = View(100, 50, 0, 0, 100, 50, flip=True)
    assert whole.moved(boxes, (100, 50))[0].tolist() == [99, 0, 100, 1]  # the first pixel becomes the last


@pytest.mark.parametrize(
    ("size", "short", "long", "scaled"),
    [
        ((1280, 720), 600, 1000, (1000, 562)), ((1280, 720), 600, None, (1066, 600)),
        ((500, 375), 600, 1000, (800, 600)),
        ((720, 1280), 600, 1000, (562, 1000)), ((1000, 600), 600, 1000, (1000, 600)), ((4000, 2), 10, 100, (100, 1)),
    ],
)  # fmt: skip
def test_the_long_side_is_limited(size: tuple[int, int], short: int, long: int | None, scaled: tuple[int, int]) -> None:
    assert scaled_size(*size, short, long) == scaled


def test_clips_of_two_sizes_are_padded_at_the_right_and_bottom(tmp_path: Path) -> None:
    for name, (width, height) in {"a.mkv": (64, 48), "b.mkv": (48, 64)}.items():
        write_video(tmp_path / name, np.full((8, height, width, 3), 255, np.uint8), codec="ffv1", b_frames=0)
    rows = "a.mkv,0,0,1,0,0,64,48,\na.mkv,0,1,0,8,8,1,8,1\na.mkv,0,2,0,63.5,0,9,9,\nb.mkv,1,0,2,-5,-6,15,16,\n"
    (tmp_path / "list.csv").write_text(HEADER + rows)
    data = _spec(tmp_path, augment="whole", short_side=(48, 48), num_frames=2, frame_stride=4, flip=False)
    (batch,) = box_batches(data, open_store(data, read_manifest(data.train)), 2, 1)
    assert batch.clips.shape == (2, 2, 64, 64, 3) and batch.labels.shape == (2, 2, 2, 5)
    a, b = np.argsort(batch.ids.numpy())
    assert batch.clips[a, :, :48].min() == 255 and batch.clips[a, :, 48:].max() == 0
    assert batch.clips[b, :, :, :48].min() == 255 and batch.clips[b, :, :, 48:].max() == 0
    # Frames 0 and 4. Ignored: -2. Of frame 0 the second box is a pixel wide, the third keeps half of one.
    nothing = [[-1.0] * 5] * 2
    assert batch.labels[a].tolist() == [[[0, 0, 64, 48, 1], [8, 8, 9, 16, -2]], nothing]
    assert batch.labels[b].tolist() == [nothing, nothing]


def test_test_views_limit_the_long_side(tmp_path: Path) -> None:
    _write(tmp_path, {"a.mkv": (90, 45)})
    data = _spec(tmp_path, long_side=60)
    store = open_store(data, read_manifest(data.val))
    (tested,) = test_batches(data, EvaluateSpec(clips=1, crops="full", short_side=40), store, [0])
    assert tested.views.shape == (1, 6, 30, 60, 3)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("a.mkv,12,1,0,1,1,5,5,", "in frame 12 ({}:13) has no frame: the video has 12, numbered from 0"),
        ("a.mkv,3,1,0,72,1,5,5,", "in frame 3 ({}:13) lies outside the frame of 72 x 50: 72, 1 to 77, 6"),
    ],
)
def test_a_box_that_is_not_in_its_video_ends_training_with_its_line(tmp_path: Path, row: str, wrong: str) -> None:
    _write(tmp_path, {"a.mkv": (72, 50)})
    with open(tmp_path / "list.csv", "a") as file:
        file.write(row)
    data = _spec(tmp_path, augment="whole")
    with pytest.raises(DecodeError) as raised:
        box_batches(data, open_store(data, read_manifest(data.train)), 1, 1)
    assert str(raised.value).endswith(f"a.mkv: its box of track 1 {wrong.format(tmp_path / 'list.csv')}")


# Spans.


def test_spans_divide_the_frames_and_the_boxes_of_every_video(tmp_path: Path) -> None:
    rows = [f"a,{frame},0,{frame // 10},1,1,5,5,," for frame in range(23)]
    rows += ["b,,,,,,,,,40", "c,,,,,,,,,", "d,,,,,,,,,7"]
    rows += ["d,6,0,1,1,1,5,5,,", "b,30,0,2,1,1,5,5,,", "b,9,0,1,1,1,5,5,,"]
    (tmp_path / "list.csv").write_text(f"{HEADER.strip()},num_frames\n" + "\n".join(rows))
    store = SpanStore(FileStore(read_manifest(tmp_path / "list.csv"), str(tmp_path)), 8)
    cut = store.manifest
    # a: 23 frames by its last box; b: 40 as it says; c: not known; d: shorter than a span.
    assert [(cut.path(clip), str(cut.clip(clip).span)) for clip in range(len(cut))] == [
        ("a", "0:11"), ("a", "11:"),
        ("b", "0:8"), ("b", "8:16"), ("b", "16:24"), ("b", "24:32"), ("b", "32:"), ("c", "0:"), ("d", "0:"),
    ]  # fmt: skip
    assert isinstance(cut.boxes, Boxes)
    frames = [cut.boxes.of(clip)["frame"].tolist() for clip in range(len(cut))]
    assert frames == [[*range(11)], [*range(11, 23)], [], [9], [], [30], [], [], [6]]
    assert [cut.labels_of(clip) for clip in range(4)] == [(0, 1), (1, 2), (), (1,)]
    assert [cut.place(clip).rpartition(":")[2] for clip in (0, 1, 2, 8)] == ["2", "2", "25", "27"]
    again = pickle.loads(pickle.dumps(store)).manifest
    assert again.fingerprint() == cut.fingerprint() != store.whole.manifest.fingerprint()
    assert SpanStore(store.whole, 9).manifest.fingerprint() != cut.fingerprint()


def test_a_span_shows_its_own_frames_and_their_boxes(tmp_path: Path) -> None:
    _write(tmp_path, {"a.mkv": (72, 50), "b.mkv": (72, 50)})
    data = _spec(tmp_path, augment="whole", short_side=(50, 50), num_frames=3, flip=False)
    manifest = read_manifest(data.train)
    store = SpanStore(open_store(data, manifest), 3)
    assert isinstance(manifest.boxes, Boxes) and len(store.manifest) == 8
    whole = [all_frames(store.whole, video) for video in (0, 1)]
    for batch in box_batches(data, store, 8, 2):
        for clip, pixels, targets in zip(batch.ids.tolist(), batch.clips.numpy(), batch.labels.numpy(), strict=True):
            video, start = divmod(clip, 4)
            np.testing.assert_array_equal(pixels, whole[video][3 * start : 3 * start + 3])
            for frame, target in zip(range(3 * start, 3 * start + 3), targets, strict=True):
                rows = manifest.boxes.of(video)
                named = rows[rows["frame"] == frame]
                wanted = [*named["box"][0].tolist(), named["label"][0]] if len(named) else [-1] * 5
                assert target[0].tolist() == wanted


# The data set.


def _open(folder: Path, which: str = "train", num_classes: int = 3, **data: Any) -> Dataset:
    lists = {"train": str(folder / "list.csv"), "val": str(folder / "list.csv")}
    return Dataset.open(detector_spec(model={"num_classes": num_classes}, data=lists | data), which)


def test_training_sees_spans_and_validation_whole_videos(tmp_path: Path) -> None:
    _write(tmp_path, {"a.mkv": (72, 50), "b.mkv": (72, 50)})
    assert len(_open(tmp_path)) == 2
    assert len(_open(tmp_path, span_frames=4)) == 6
    assert len(_open(tmp_path, "val", span_frames=4)) == 2


def test_boxes_and_the_task_must_fit(write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    _write(tmp_path, {"a.mkv": (72, 50)})
    path = tmp_path / "list.csv"
    with pytest.raises(UserError, match="is a list with boxes; set task to detection, got classification"):
        Dataset.open(load_spec(write_spec(data={"train": str(path)}, model={"num_classes": 3})), "train")
    with pytest.raises(UserError, match=r"data\.val: task detection needs a list with boxes, video,frame,.* has none"):
        _open(tmp_path, "val", 4, val=str(motion_set / "val.csv"))
    with pytest.raises(UserError, match=r"list\.csv has no box of 1 of 4 classes: '3'; each class must have a box"):
        _open(tmp_path, num_classes=4)
    assert len(_open(tmp_path, "val", 4)) == 1
    header, *rows = path.read_text().splitlines()
    ignored = [f"{row}1" if ",2," in row[8:14] else row for row in rows]
    path.write_text("\n".join([header, *ignored]))
    with pytest.raises(UserError, match="has no box of 1 of 3 classes: '2'"):  # ignored boxes teach nothing
        _open(tmp_path)
