"""Words of a command line as videos: files, folders, folders of pictures, manifests, packed sets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.data.manifest.files import FileStore
from summit_train.inference.trained import Trained, open_trained
from summit_train.inference.videos import VideoList, list_videos
from summit_train.tasks.classification.stream import Labeller
from tests.worlds import received

CLASSES = ("right", "up", "left", "down")


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    """A network of the four CLASSES."""
    return open_trained(trained_run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Videos at two depths, a clip of pictures, hidden entries, and files that are no videos. Nothing decodes."""
    top = tmp_path / "top"
    videos = ("b.mp4", "a.AVI", ".hidden.mp4", ".cache/c.mp4", "in/deep/d.mkv")
    others = ("notes.txt", "cover.pdf", "in/deep/1.jpg", "clip/img_00001.jpg", "clip/img_00002.jpg", "clip/README")
    for name in (*videos, *others):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"\0")
    return top


def listed(trained: Trained, *words: Path, use_labels: bool = True) -> tuple[list[VideoList], list[str]]:
    notes = list[str]()
    return list_videos([str(word) for word in words], trained, notes.append, use_labels=use_labels), notes


def paths(listing: VideoList) -> list[str]:
    return [listing.manifest.path(clip) for clip in range(len(listing.manifest))]


def test_a_folder_is_searched_at_any_depth_and_pictures_are_one_clip(folder: Path, trained: Trained) -> None:
    (listing,), (note,) = listed(trained, folder)
    assert paths(listing) == [f"{folder}/{name}" for name in ("a.AVI", "b.mp4", "clip", "in/deep/d.mkv")]
    assert note == f"{folder}: no videos by their names: 1 .jpg, 1 .pdf, 1 .txt, 1 without an extension"
    assert not listing.has_labels and len(listing) == 4 and listing.manifest.labels[0] == -1
    assert paths(listed(trained, folder / "clip")[0][0]) == [str(folder / "clip")]


def test_other_ranks_read_the_same_videos(folder: Path, motion_set: Path, trained: Trained, tmp_path: Path) -> None:
    """Those of files, of a list below data.root, and of a packed set."""
    words = ["data", "pack", str(motion_set / "val.csv"), str(tmp_path / "packed"), "--kind", "bytes", "--workers", "0"]
    assert main(words) == 0
    data = trained.spec.data.model_copy(update={"root": str(motion_set)})
    trained = replace(trained, spec=trained.spec.model_copy(update={"data": data}))
    listings, _ = listed(trained, folder, motion_set / "val.csv", tmp_path / "packed")
    for listing in listings:
        other = VideoList.of_message(received(listing.message()), data)
        assert paths(other) == paths(listing)
        assert other.manifest.fingerprint() == listing.manifest.fingerprint()
        assert (other.has_labels, type(other.store)) == (listing.has_labels, type(listing.store))
        if isinstance(listing.store, FileStore):
            assert isinstance(other.store, FileStore) and other.store.path(0) == listing.store.path(0)
    found = [(len(listing), listing.has_labels, listing.manifest.is_packed) for listing in listings]
    assert found == [(4, False, False), (11, True, False), (11, True, True)]


def test_neighbouring_files_and_folders_are_read_by_one_store(folder: Path, motion_set: Path, trained: Trained) -> None:
    words = (folder / "b.mp4", folder / "in", motion_set / "val.csv", folder / "a.AVI")
    (before, manifest, after), _ = listed(trained, *words)
    assert paths(before) == [str(folder / "b.mp4"), str(folder / "in/deep/d.mkv")]
    assert (len(manifest), manifest.has_labels) == (11, True)
    assert paths(after) == [str(folder / "a.AVI")]


@pytest.mark.parametrize(("name", "content", "is_list"), [
    ("list", "path,label\na.mp4,0\n", True), ("list.mp4", "path,label\na.mp4,0\n", False), ("clip", "\0\1", False),
    ("pipe", None, False),  # opening it would block
])  # fmt: skip
def test_a_text_without_a_videos_extension_is_a_manifest(
    tmp_path: Path, trained: Trained, name: str, content: str | None, is_list: bool
) -> None:
    path = tmp_path / name
    os.mkfifo(path) if content is None else path.write_text(content)
    (listing,), _ = listed(trained, path)
    assert paths(listing) == (["a.mp4"] if is_list else [str(path)])


def test_a_packed_set_that_is_unfinished_is_refused(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "half/.packing").mkdir(parents=True)
    with pytest.raises(UserError, match="its packing was not finished"):
        listed(trained, tmp_path / "half")


@pytest.mark.parametrize(
    ("names", "label", "is_named", "reason"),
    [
        (CLASSES, 3, True, ""),
        (CLASSES[::-1], 3, False, ""),
        (None, 3, True, ""),
        (None, 4, True, "it has a label 4, the network has 4 classes"),
        (CLASSES[:3], 2, True, "it has 3 classes, the network 4"),
        (("right", "left", "up", "down"), 0, True, "label 1 is 'left' in it and 'up' in the network"),
    ],
)
def test_labels_of_other_classes_are_not_used(
    tmp_path: Path, trained: Trained, names: tuple[str, ...] | None, label: int, is_named: bool, reason: str
) -> None:
    (tmp_path / "list.csv").write_text(f"path,label\na.mp4,{label}\n")
    if names is not None:
        (tmp_path / "classes.txt").write_text("\n".join(names))
    network = replace(trained, has_names=is_named)
    (listing,), notes = listed(network, tmp_path / "list.csv", use_labels=False)
    assert not listing.has_labels and notes == []
    (listing,), notes = listed(network, tmp_path / "list.csv")
    assert listing.has_labels == (not reason)
    assert notes == ([f"{tmp_path}/list.csv: its labels are not used: {reason}"] if reason else [])


def test_a_network_of_regions_takes_lists_that_name_them(motion_set: Path, tmp_path: Path, trained_run: Path) -> None:
    trained = open_trained(trained_run, ["data.region=columns"])
    video = motion_set / "videos/val_000000.mp4"
    with pytest.raises(UserError, match=r"val_000000.mp4: the network was trained on regions of frames .*region=null"):
        listed(trained, video)
    (tmp_path / "list.csv").write_text(f"path,label,left,top,width,height\n{video},0,3,4,20,10\n")
    ((listing,), _) = listed(trained, tmp_path / "list.csv")
    assert listing.manifest.clip(0).region == (3, 4, 20, 10)
    with pytest.raises(UserError, match=r"trained on regions of frames \(data\.region\)"):
        Labeller(trained, torch.device("cpu"))
