"""Lists with boxes in the commands and the rooms that know lists: scan, index, split, packed sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.batches.spans import SpanStore
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.motion import write_motion_set
from summit_train.data.packed.format import Packing
from summit_train.spec import DataSpec
from summit_train.tasks.detection.boxes import Boxes
from summit_train.tasks.detection.moving_objects import MovingObjects
from tests.data.packed.conftest import complaints, packed_store
from tests.tasks.detection.test_batches import box_batches
from tests.worlds import Say, csv_rows

REAL = Path(__file__).parents[4] / "shared" / "data" / "boxes"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moving")
    assert len(list(write_motion_set(folder, 6, 4, MovingObjects(size=48, num_frames=12)))) == 10
    return folder


def _data(path: Path, **changes: object) -> DataSpec:
    usual = {"num_frames": 4, "frame_stride": 1, "augment": "whole", "short_side": (32, 48), "workers": 0}
    return DataSpec(train=str(path), val=str(path), **{**usual, **changes})  # type: ignore[arg-type]


def _broken(videos: Path) -> Path:
    """The training list with a box behind the last frame of one video, and one outside the frames of another."""
    lines = (videos / "train.csv").read_text().splitlines()
    lines = [line for line in lines if not line.endswith(",12,")]  # the numbers of frames
    lines += ["videos/train_000002.mp4,12,9,0,1,1,5,5,0,0,,", "videos/train_000004.mp4,3,9,0,48,1,5,5,0,0,,"]
    (videos / "broken.csv").write_text("\n".join([*lines, ""]))
    return videos / "broken.csv"


def test_scan_and_index_name_the_boxes_that_are_in_no_frame(videos: Path, say: Say) -> None:
    path = _broken(videos)
    num_lines = len(path.read_text().splitlines())
    status, printed, _ = say("data", "scan", path, "--out", videos / "clean.csv", "--workers", 0)
    assert status == 0 and "6 videos decoded, 2 bad" in printed
    reasons = {row["video"]: row["reason"] for row in csv_rows(videos / "clean.left_out.csv")}
    assert list(reasons.items()) == [
        (
            "videos/train_000002.mp4",
            f"its box of track 9 in frame 12 ({path}:{num_lines - 1}) has no frame: the video has 12, numbered from 0",
        ),
        (
            "videos/train_000004.mp4",
            f"its box of track 9 in frame 3 ({path}:{num_lines}) lies outside the frame of 48 x 48: 48, 1 to 53, 6",
        ),
    ]
    clean = read_manifest(videos / "clean.csv")
    assert [clean.path(clip)[-5] for clip in range(4)] == ["0", "1", "3", "5"] and clean.sha256(3) is None
    status, printed, _ = say("data", "index", path, "--out", videos / "good.csv", "--workers", 0)
    assert status == 0 and "left out: 2" in printed
    good, train = read_manifest(videos / "good.csv"), read_manifest(videos / "train.csv")
    assert [good.path(clip)[-5] for clip in range(4)] == ["0", "1", "3", "5"] and good.sha256(3) is not None
    assert isinstance(good.boxes, Boxes) and isinstance(train.boxes, Boxes) and good.frame_counts.tolist() == [12] * 4
    np.testing.assert_allclose(good.boxes.of(3)["box"], train.boxes.of(5)["box"], atol=1e-3)


def test_split_keeps_the_boxes_of_its_videos(videos: Path, tmp_path: Path, say: Say) -> None:
    status, _, _ = say("data", "split", videos / "train.csv", tmp_path, "--folds", 2, "--only", "disc", "square")
    train = read_manifest(videos / "train.csv")
    assert status == 0 and isinstance(train.boxes, Boxes)
    for side in ("train", "val"):
        part = read_manifest(tmp_path / "fold1" / f"{side}.csv")
        assert isinstance(part.boxes, Boxes) and part.classes == train.classes and part.num_frames(0) == 12
        for clip in range(len(part)):
            whole = int(part.path(clip)[-5])
            np.testing.assert_allclose(part.boxes.of(clip)["box"], train.boxes.of(whole)["box"], atol=1e-3)
    status, _, error = say("data", "split", videos / "train.csv", tmp_path / "b", "--folds", 2, "--both-directions")
    assert status == 2 and "a list with boxes cannot be played backwards" in error


@pytest.mark.parametrize("packing", [Packing("bytes"), Packing("jpeg"), Packing("jpeg", short_side=24)])
def test_a_packed_set_has_the_boxes_of_its_videos(videos: Path, tmp_path: Path, packing: Packing) -> None:
    """Views are those of the stored frames, also where the pictures were scaled down: the targets stay as they are."""
    files = FileStore(read_manifest(videos / "train.csv"), str(videos))
    packed = packed_store(files, tmp_path / "packed", packing)
    assert complaints(tmp_path / "packed") == []
    is_same = packed.manifest.fingerprint() == files.manifest.fingerprint()
    assert is_same == (packing.kind == "bytes")
    data = _data(videos / "train.csv")
    for one, other in ((files, packed), (SpanStore(files, 4), SpanStore(packed, 4))):
        assert (one.manifest.fingerprint() == other.manifest.fingerprint()) == is_same
        wanted, found = box_batches(data, one, 6, 2), box_batches(data, other, 6, 2)
        for left, right in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(left.labels, right.labels)
            difference = np.abs(left.clips.numpy().astype(int) - right.clips.numpy()).mean()
            assert difference == 0 if is_same else difference < 12


def test_boxes_are_packed_in_every_frame_or_not_at_all(videos: Path, tmp_path: Path) -> None:
    files = FileStore(read_manifest(videos / "train.csv"), str(videos))
    with pytest.raises(UserError, match=r"train\.csv: must be packed as RGB, each frame: it has boxes"):
        packed_store(files, tmp_path / "packed", Packing("jpeg", every=2))
    folder = packed_store(files, tmp_path / "packed", Packing("bytes")).manifest.source
    ends = np.load(Path(folder) / "manifest" / "box_ends.npy")
    np.save(Path(folder) / "manifest" / "box_ends.npy", ends[:-1])
    with pytest.raises(UserError, match="some of its boxes do not belong to a clip"):
        read_manifest(folder)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real sequences in ../shared/data/boxes are not here")
def test_the_real_sequences_are_read_and_cut(tmp_path: Path) -> None:
    (tmp_path / "boxes.csv").write_text((REAL / "boxes.csv").read_text())
    (tmp_path / "classes.txt").write_text("person\ncar\nmotorbike\n")
    data = _data(tmp_path / "boxes.csv", root=str(REAL), long_side=160, short_side=(100, 120), frame_stride=2)
    store = SpanStore(open_store(data, read_manifest(data.train)), 300)
    assert (len(store.whole.manifest), len(store.manifest)) == (6, 11)
    (batch,) = box_batches(data, store, 2, 1)
    assert batch.clips.shape[:2] == (2, 4) and batch.clips.shape[3] == 160
    real = batch.labels[..., 4] >= 0
    boxes = batch.labels[..., :4][real]
    assert real.any(2).all() and bool((boxes[:, 2:] - boxes[:, :2] >= 1).all())
