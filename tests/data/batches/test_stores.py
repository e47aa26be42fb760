from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.batches.stores import open_store
from summit_train.data.loading import read_clip
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.augment import View
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec
from tests.data.clips import all_of, stored_clip
from tests.flows import write_folder

_COLUMNS = "path,label,num_frames,start_frame,end_frame,left,top,width,height\n"


def _manifest(folder: Path, *paths: str) -> Manifest:
    write_manifest(folder / "list.csv", [ManifestRow(path, 0) for path in paths])
    return read_manifest(folder / "list.csv")


def _path(manifest: Manifest, clip: int, **data: Any) -> str:
    store = open_store(DataSpec(train="x", val="x", **data), manifest)
    assert isinstance(store, FileStore)
    return store.path(clip)


def test_a_video_lies_below_root_or_without_one_beside_the_manifest(tmp_path: Path) -> None:
    manifest, below = _manifest(tmp_path, "a.mp4", "b.mp4"), tmp_path / "below"
    below.mkdir()
    assert _path(manifest, 1) == str(tmp_path / "b.mp4")
    assert _path(manifest, 1, root=str(below)) == str(below / "b.mp4")
    for folder in (tmp_path, below):
        (folder / "a.mp4").touch()
    assert _path(manifest, 1, root=str(below)) == str(below / "b.mp4")
    assert _path(_manifest(tmp_path, "/abs/a.mp4"), 0, root="/else/where") == "/abs/a.mp4"


def test_a_root_that_does_not_fit_the_manifest_is_refused(tmp_path: Path) -> None:
    manifest, other = _manifest(tmp_path, "a.mp4", "b.mp4"), tmp_path / "other"
    with pytest.raises(UserError, match=r"got .*other: no such folder"):
        _path(manifest, 1, root=str(other))
    other.mkdir()
    (tmp_path / "a.mp4").touch()  # reading it would replace what the user named
    with pytest.raises(
        UserError, match=r"got .*other, which lacks a\.mp4; try without a root: the manifest's own folder has it"
    ):
        _path(manifest, 1, root=str(other))


# What is read.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A video and a folder of pictures of 6 frames each."""
    frames = np.full((6, 16, 32, 3), 90, np.uint8)
    write_video(tmp_path / "a.mp4", frames)
    (tmp_path / "b").mkdir()
    for number, frame in enumerate(frames):
        VideoFrame.from_ndarray(frame, "rgb24").save(str(tmp_path / "b" / f"{number:05}.jpg"))
    return tmp_path


def test_each_path_is_a_video_or_a_folder_of_pictures(folder: Path) -> None:
    store = FileStore(_manifest(folder, "a.mp4", "b"), str(folder))
    assert pickle.loads(pickle.dumps(store)).path(1) == store.path(1)
    for clip in range(2):
        views = read_clip(store, clip, lambda n: np.array([[0, n - 1], [1, 2]]), lambda w, h: [all_of(w, h)]).pixels
        assert views.shape == (2, 2, 16, 32, 3)
        np.testing.assert_allclose(views, 90, atol=5)
        one = stored_clip(store, clip, lambda n: np.array([n - 1]), all_of)
        np.testing.assert_array_equal(one[0], views[0, 1])


@pytest.mark.parametrize("kind", ["files", "flow", "bytes", "jpeg", "video"])
def test_a_read_returns_the_frames_and_the_views_that_were_used(tmp_path: Path, kind: str) -> None:
    """Of spans and regions, in every store: choices that differ in each call give the same clips when they are kept."""
    generator = np.random.default_rng(0)
    pictures = generator.integers(0, 256, (12, 2, 48, 64)).astype(np.uint8).repeat(2, axis=1)[..., :3, :, :]
    write_video(tmp_path / "a.mp4", np.moveaxis(pictures[:, :3], 1, -1))
    write_folder(tmp_path / "flow", pictures[:, :2])
    region = "11,3,30,20"
    (tmp_path / "list.csv").write_text(f"{_COLUMNS}a.mp4,0,12,2,11,{region}\n")
    (tmp_path / "flow.csv").write_text(f"{_COLUMNS}flow,0,12,,,{region}\n")
    modality = "flow" if kind == "flow" else "rgb"
    data = DataSpec(train="x", val="x", region="columns", modality=modality, flow_length=2, sampling="uniform")
    manifest = read_manifest(tmp_path / ("flow.csv" if kind == "flow" else "list.csv"), "columns")
    if kind in ("bytes", "jpeg", "video"):
        cut = [] if kind == "bytes" else ["--region", "columns"]
        assert main(["data", "pack", str(tmp_path / "list.csv"), str(tmp_path / kind), "--kind", kind, *cut]) == 0
        data, manifest = data.model_copy(update={"region": cut[-1] if cut else None}), read_manifest(tmp_path / kind)
    store = open_store(data, manifest)

    def sample(number: int) -> NDArray[np.int64]:
        return generator.integers(0, number, (2, 3))

    def crop(width: int, height: int) -> list[View]:
        xs = generator.integers(0, width - 10, 2).tolist()
        return [View(width, height, x, 0, 10, 12, flip=x % 2 == 1) for x in xs]

    for _ in range(8):
        read = read_clip(store, 0, sample, crop)
        with store.open(0) as opened:
            again = opened.read(read.frames - manifest.clip(0).span.start, read.views)
        np.testing.assert_array_equal(again, read.pixels)
        assert (read.frames.shape, len(read.views), len(read.pixels)) == ((2, 3), 2, 4)


@pytest.mark.parametrize("max_held", [0, 1 << 20])
def test_a_file_that_is_not_the_one_that_was_indexed_is_named(
    folder: Path, max_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("source", "films"):
        monkeypatch.setattr(f"summit_train.data.video.{module}.MAX_HELD_BYTES", max_held)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    content = (folder / "a.mp4").read_bytes()
    write_manifest(folder / "list.csv", [ManifestRow("a.mp4", 0, 6, sha256=hashlib.sha256(content).hexdigest())])
    store = FileStore(read_manifest(folder / "list.csv"), str(folder))
    assert stored_clip(store, 0, np.arange, all_of).shape == (6, 16, 32, 3)
    # A byte of the title, which no decoder looks at.
    (folder / "a.mp4").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DecodeError, match=r"a\.mp4: has changed since it was indexed"):
        stored_clip(store, 0, np.arange, all_of)
