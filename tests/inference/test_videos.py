"""Words of a command line as videos: files, folders, folders of pictures, manifests, packed sets."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.inference.trained import open_trained
from summit_train.inference.videos import Listing, list_named
from summit_train.spec import Spec

CLASSES = ("right", "up", "left", "down")


@pytest.fixture
def spec(trained_run: Path) -> Spec:
    """The spec of a network of four classes, with the motion set as its data."""
    return open_trained(trained_run).spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Videos at two depths, a clip of pictures, hidden entries, and files that are no videos. Nothing decodes."""
    top = tmp_path / "top"
    names = (
        "b.mp4",
        "a.AVI",
        "notes.txt",
        "cover.pdf",
        ".hidden.mp4",
        ".cache/c.mp4",
        "in/deep/d.mkv",
        "in/deep/1.jpg",
    )
    for name in (*names, "in/deep/1.jpg", "clip/img_00001.jpg", "clip/img_00002.jpg", "clip/README"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"\0")
    return top


def paths(listing: Listing) -> list[str]:
    return [listing.manifest.path(clip) for clip in range(len(listing.manifest))]


def test_a_folder_is_searched_at_any_depth(folder: Path, spec: Spec) -> None:
    (listing,), (note,) = list_named([str(folder)], spec, CLASSES)
    assert paths(listing) == [f"{folder}/{name}" for name in ("a.AVI", "b.mp4", "clip", "in/deep/d.mkv")]
    assert note == f"{folder}: no videos by their names: 1 .jpg, 1 .pdf, 1 .txt, 1 without an extension"
    assert not listing.has_labels and len(listing.kept) == 4 and listing.manifest.labels[0] == -1


def test_a_folder_of_pictures_is_one_clip(folder: Path, spec: Spec) -> None:
    (listing,), _ = list_named([str(folder / "clip")], spec, CLASSES)
    assert paths(listing) == [str(folder / "clip")]


def test_neighbouring_files_and_folders_are_read_by_one_store(folder: Path, motion_set: Path, spec: Spec) -> None:
    words = [str(folder / "b.mp4"), str(folder / "in"), str(motion_set / "val.csv"), str(folder / "a.AVI")]
    (before, manifest, after), _ = list_named(words, spec, CLASSES)
    assert paths(before) == [str(folder / "b.mp4"), str(folder / "in/deep/d.mkv")]
    assert (len(manifest.kept), manifest.has_labels) == (41, True)
    assert paths(after) == [str(folder / "a.AVI")]


@pytest.mark.parametrize(("name", "content", "is_list"), [
    ("list", "path,label\na.mp4,0\n", True),
    ("list.mp4", "path,label\na.mp4,0\n", False),
    ("clip", "\0\1", False),
])  # fmt: skip
def test_a_text_without_a_videos_extension_is_a_manifest(
    tmp_path: Path, spec: Spec, name: str, content: str, is_list: bool
) -> None:
    (tmp_path / name).write_text(content)
    (listing,), _ = list_named([str(tmp_path / name)], spec, CLASSES)
    assert paths(listing) == (["a.mp4"] if is_list else [str(tmp_path / name)])


def test_what_would_block_is_not_opened(tmp_path: Path, spec: Spec) -> None:
    os.mkfifo(tmp_path / "pipe")
    (listing,), _ = list_named([str(tmp_path / "pipe")], spec, CLASSES)
    assert paths(listing) == [str(tmp_path / "pipe")]


def test_a_packed_set(motion_set: Path, tmp_path: Path, spec: Spec) -> None:
    out = str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "val.csv"), out, "--kind", "bytes", "--workers", "0"]) == 0
    (listing,), _ = list_named([out], spec, CLASSES)
    assert listing.manifest.is_packed and listing.has_labels and len(listing.kept) == 41
    (tmp_path / "half/.packing").mkdir(parents=True)
    with pytest.raises(UserError, match="its packing was not finished"):
        list_named([str(tmp_path / "half")], spec, CLASSES)


@pytest.mark.parametrize(
    ("names", "label", "classes", "reason"),
    [
        (CLASSES, 3, CLASSES, ""),
        (CLASSES, 3, None, ""),
        (None, 3, CLASSES, ""),
        (None, 4, CLASSES, "there is a label 4, the network has 4 classes"),
        (CLASSES[:3], 2, CLASSES, "it has 3 classes, the network 4"),
        (("right", "left", "up", "down"), 0, CLASSES, "label 1 is 'left' there and 'up' in the network"),
    ],
)
def test_labels_of_other_classes_are_not_used(
    tmp_path: Path, spec: Spec, names: tuple[str, ...] | None, label: int, classes: tuple[str, ...] | None, reason: str
) -> None:
    (tmp_path / "list.csv").write_text(f"path,label\na.mp4,{label}\n")
    if names is not None:
        (tmp_path / "classes.txt").write_text("\n".join(names))
    words = [str(tmp_path / "list.csv")]
    (listing,), notes = list_named(words, spec, classes, use_labels=False)
    assert not listing.has_labels and notes == ()
    (listing,), notes = list_named(words, spec, classes)
    assert listing.has_labels == (not reason)
    assert list(notes) == ([f"{tmp_path}/list.csv: its labels are not used: {reason}"] if reason else [])


def test_the_quarantine_counts_where_it_is(motion_set: Path, tmp_path: Path, trained_run: Path) -> None:
    (tmp_path / "bad.csv").write_text("path,reason\nvideos/val_000000.mp4,is empty\n")
    spec = open_trained(trained_run, [f"data.quarantine={tmp_path}/bad.csv"]).spec
    val = str(motion_set / "val.csv")
    (listing,), notes = list_named([val], spec, CLASSES)
    assert (listing.kept.excluded.tolist(), len(listing.kept)) == ([0], 40)
    assert notes == (f"{val}: 1 video left out, by {tmp_path}/bad.csv",)
    (tmp_path / "bad.csv").unlink()
    (listing,), notes = list_named([val], spec, CLASSES)
    assert len(listing.kept) == 41
    assert notes == (f"{val}: the list {tmp_path}/bad.csv (data.quarantine) is not there, so nothing is left out",)


def test_words_that_name_nothing(folder: Path, spec: Spec) -> None:
    shutil.rmtree(folder / "in")
    (folder / "empty").mkdir()
    for words, reason in (
        (["gone.mp4", str(folder), "lost"], "gone.mp4, lost: No such file or directory"),
        ([str(folder / "empty")], "empty: no video in this folder"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            list_named(words, spec, CLASSES)
        assert "\n" not in str(caught.value)
