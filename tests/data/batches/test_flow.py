"""Clips of optical flow: which fields a frame stacks, their channels, the flip, and sets of the other modality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import FlowStore, Store, open_store
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import pack_set
from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.data.video.source import DecodeError
from summit_train.data.video.span import Span
from summit_train.spec import DataSpec
from tests.data.batches.conftest import data_spec, reader
from tests.data.clips import stored_clip
from tests.flows import numbered_fields, write_folder, write_folders, write_packed

WHOLE = View(40, 32, 0, 0, 40, 32)


def _spec(**changes: Any) -> DataSpec:
    settings = {"modality": "flow", "flow_length": 5, "num_frames": 8, "sampling": "uniform"}
    return data_spec(**{**settings, **changes})


def _set(folder: Path, *num_fields: int) -> Manifest:
    videos = [numbered_fields(number) for number in num_fields]
    return read_manifest(write_folders(folder, videos, list(range(len(videos))), "all"))


def _fields(clip: np.ndarray) -> list[list[int]]:
    """The fields of each frame (T, h, w, 2 L), read from x; y must say the same."""
    values = clip[:, 0, 0].astype(int)
    assert (clip == clip[:, :1, :1]).all()
    assert (values[:, 1::2] - values[:, ::2] == 100).all()  # x, y, x, y, ...
    return (values[:, ::2] - 10).tolist()


def _read(store: Store, starts: list[int], clip: int = 0, view: View = WHOLE) -> np.ndarray:
    return stored_clip(store, clip, lambda number: np.array(starts), lambda width, height: view)


def test_a_frame_stacks_consecutive_fields_and_the_last_one_repeats(tmp_path: Path) -> None:
    store = open_store(_spec(sampling="dense"), _set(tmp_path, 7))
    assert isinstance(store, FlowStore)
    clip = _read(store, [0, 2, 4, 6])
    assert (clip.shape, clip.dtype, clip.flags.c_contiguous) == ((4, 32, 40, 10), np.uint8, True)
    assert _fields(clip) == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 6, 6], [6, 6, 6, 6, 6]]


@pytest.mark.parametrize(
    ("sampling", "num_fields", "places"),
    [("uniform", 20, 16), ("uniform", 5, 1), ("uniform", 3, 1), ("dense", 20, 20), ("dense", 3, 3)],
)
def test_the_places_where_a_frame_may_start(tmp_path: Path, sampling: str, num_fields: int, places: int) -> None:
    store = open_store(_spec(sampling=sampling), _set(tmp_path, num_fields))
    with store.open(0) as opened:
        assert opened.num_frames == places


def test_a_flipped_clip_is_the_flow_of_the_flipped_clip(tmp_path: Path) -> None:
    """By hand: x of the mirrored video is the opposite of x at the mirrored place, y is y there."""
    steps = np.random.default_rng(0).integers(-127, 128, (6, 2, 32, 40))  # of the code
    mirrored = steps[..., ::-1] * np.array([-1, 1])[:, None, None]
    for name, codes in (("video", steps), ("mirrored", mirrored)):
        write_folder(tmp_path / name, (128 + codes).astype(np.uint8))
    write_manifest(tmp_path / "list.csv", [ManifestRow("video", 0), ManifestRow("mirrored", 0)])
    store = open_store(_spec(flow_length=3), read_manifest(tmp_path / "list.csv"))
    flipped = View(40, 32, 6, 2, 20, 24, flip=True)
    same = View(40, 32, 40 - 6 - 20, 2, 20, 24)
    clip = _read(store, [0, 2, 3], 0, flipped)
    assert np.array_equal(clip, _read(store, [0, 2, 3], 1, same))
    assert not np.array_equal(clip[..., ::2], _read(store, [0, 2, 3], 0, same)[..., ::2])
    # Only the mirrored ones of several views are turned round.
    with store.open(0) as opened:
        views = opened.read(np.array([[0], [1]]), [same, flipped])
        plain = opened.read(np.array([[0], [1]]), [same, same])
    assert [np.array_equal(a, b) for a, b in zip(views, plain, strict=True)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("changes", "boxes"), [({}, {64, 56, 48}), ({"crop_scales": (0.5,)}, {32}), ({"modality": "rgb"}, {64, 56, 48, 42})]
)
def test_flow_is_cropped_at_three_scales_and_pictures_at_four(changes: dict[str, Any], boxes: set[int]) -> None:
    data = _spec(augment="multi_scale_crop", crop=16, **changes)
    views = [augment.train_view(data, 64, 64, rng.key(0, "augment", draw)) for draw in range(200)]
    assert {view.width for view in views} == {round(64 * 16 / box) for box in boxes}


def test_a_packed_set_of_flow_gives_the_same_clips(tmp_path: Path) -> None:
    videos = [numbered_fields(number) for number in (20, 6)]
    packed = open_store(_spec(), read_manifest(write_packed(tmp_path / "packed", videos, [3, 1])))
    raw = open_store(_spec(), read_manifest(write_folders(tmp_path, videos, [3, 1], "raw")))
    record = read_pack(tmp_path / "packed").packing
    assert (record.modality, record.bound) == ("flow", 20.0)
    assert packed.manifest.num_frames(0) == 20
    for clip in (0, 1):
        for view in (WHOLE, View(40, 32, 3, 4, 24, 24, flip=True)):
            assert np.array_equal(_read(packed, [0, 1, 1], clip, view), _read(raw, [0, 1, 1], clip, view))
    order, found = Order(2, 3, 1, 2, 1), []
    for data, store in ((_spec(workers=1), packed), (_spec(), raw)):
        with reader(data, store, order).batches(order, 0, 1, range(2)) as batches:
            found.append([batch.clips.numpy().tobytes() for batch in batches])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("modality", "manifest", "message"),
    [
        ("rgb", "flow", r"holds flow, and .* rgb: name the videos' own set, or set data\.modality=flow"),
        ("flow", "rgb", "holds rgb, and .* flow: make its flow with `summit-train data flow`"),
        (
            "flow",
            "videos/list.csv",
            r"list\.csv:2: \S+0\.mp4 is a video, and data\.modality is flow: make its flow with",
        ),
        ("rgb", "raw.csv", r"raw\.csv:2: \S+ holds flow, and data\.modality is rgb"),
        ("flow", "back.csv", r"back\.csv:3: this clip is played backwards"),
        ("flow", "span.csv", r"span\.csv: has clips that are spans of videos; make its flow"),
    ],
)
def test_a_set_without_the_flow_or_the_pictures_of_the_spec_is_refused(
    tmp_path: Path, videos: Path, modality: str, manifest: str, message: str
) -> None:
    if manifest == "flow":
        write_packed(tmp_path / "flow", [numbered_fields(8)], [0])
    if manifest == "rgb":
        pack_set(
            FileStore(read_manifest(videos / "list.csv"), str(videos)), tmp_path / "rgb", Packing("bytes"), 1 << 20
        )
    write_folders(tmp_path, [numbered_fields(8)], [0], "raw")
    row = ManifestRow("raw/000", 0)
    write_manifest(tmp_path / "back.csv", [row, replace(row, reversed=True)])
    write_manifest(tmp_path / "span.csv", [replace(row, span=Span(2, 5))])
    path = videos / "list.csv" if manifest == "videos/list.csv" else tmp_path / manifest
    with pytest.raises(UserError, match=message) as caught:
        open_store(_spec(modality=modality), read_manifest(path))
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_number_of_fields_is_bad(tmp_path: Path) -> None:
    store = open_store(_spec(), _set(tmp_path, 8))
    write_manifest(tmp_path / "more.csv", [ManifestRow("all/000", 0, 9)])
    with pytest.raises(DecodeError, match="holds 8 fields of flow, but the manifest says 9"):
        _read(open_store(_spec(), read_manifest(tmp_path / "more.csv")), [0])
    (tmp_path / "all/000/img_00001.jpg").write_bytes(b"of somebody else")
    assert _fields(_read(store, [0])) == [[0, 1, 2, 3, 4]]
