"""Class folders: the clips below them, links, and folders that are no clips or vanish."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import read_manifest, tables
from summit_train.data.manifest.clip import Clip


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_class_folders_hold_videos_and_folders_of_pictures(tmp_path: Path) -> None:
    """A folder with a clip below it is none, such as one of videos with a cover; nor is a class folder."""
    touch(tmp_path / "set", "walk/b.mp4", "walk/a.AVI", "run/deep/c.webm", "run/notes.txt", "jump/.hidden.mp4",
           ".git/x.mp4", "walk/b/img_00001.jpg", "walk/b/.thumbs/1.jpg", "walk/deep/c/1.PNG", "walk/d/cover1.jpg",
           "walk/d/e/f.mp4", "walk/1.jpg", "walk/notes/a.txt", "walk/g/h.mp4", "walk/g/2.jpg", "run/1.jpg",
           "walk/x/flow_x_1.jpg", "walk/x/flow_y_1.jpg", "walk/.hidden/1.jpg")  # fmt: skip
    manifest = read_manifest(tmp_path / "set")
    assert manifest.classes == ("jump", "run", "walk")
    paths = ["run/deep/c.webm", "walk/a.AVI", "walk/b", "walk/b.mp4", "walk/d/e/f.mp4", "walk/deep/c", "walk/g/h.mp4"]
    listed = [(str(tmp_path / "set" / path), 1 + path.startswith("walk")) for path in [*paths, "walk/x"]]
    assert [(manifest.path(index), manifest.labels[index]) for index in range(len(manifest))] == listed
    # Their fingerprint is the same wherever they are.
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = read_manifest(tmp_path / "moved")
    assert moved.fingerprint() == manifest.fingerprint() and moved.path(0) != manifest.path(0)
    assert moved.clip(0) == manifest.clip(0) == Clip("run/deep/c.webm")


def test_a_class_folder_that_vanishes_does_not_shift_the_labels_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "set", "jump/a.mp4", "run/b.mp4", "walk/c.mp4")
    class_folders = tables.class_folders

    def then_vanishes(source: Path) -> tuple[str, ...]:
        names = class_folders(source)
        (tmp_path / "set/jump").rename(tmp_path / "jump")
        return names

    monkeypatch.setattr(tables, "class_folders", then_vanishes)
    with pytest.raises(UserError, match="set/jump: cannot be read: No such file or directory"):
        read_manifest(tmp_path / "set")


def test_videos_behind_links_are_clips(tmp_path: Path) -> None:
    touch(tmp_path, "set/walk/1.mp4", "set/run/1.mp4", "disk/session/2.mp4", "disk/session/deeper/3.mp4")
    touch(tmp_path, "elsewhere/4.mp4")
    (tmp_path / "set/walk/session").symlink_to(tmp_path / "disk/session")
    (tmp_path / "set/jump").symlink_to("../elsewhere")
    (tmp_path / "set/run/5.mp4").symlink_to("../walk/1.mp4")
    manifest = read_manifest(tmp_path / "set")
    assert manifest.classes == ("jump", "run", "walk")
    paths = ["jump/4.mp4", "run/1.mp4", "run/5.mp4", "walk/1.mp4", "walk/session/2.mp4", "walk/session/deeper/3.mp4"]
    assert [manifest.clip(clip).path for clip in range(len(manifest))] == paths


@pytest.mark.parametrize(
    ("link", "target", "wrong"),
    [
        ("jump", "/not/mounted", r"set/jump: is a link to /not/mounted, which is not there; mount it, or remove"),
        ("walk/session", "../gone", r"set/walk/session: is a link to ../gone, which is not there"),
        ("walk/2.mp4", "gone.mp4", r"set/walk/2.mp4: is a link to gone.mp4, which is not there"),
        ("walk/up", "..", r"set/walk/up/walk: leads to .*set/walk once more, through a link; remove one of the two"),
        ("walk/again", ".", r"set/walk/again: leads to .*set/walk once more, through a link"),
    ],
)
def test_links_that_lead_nowhere_or_in_a_loop_are_named(tmp_path: Path, link: str, target: str, wrong: str) -> None:
    touch(tmp_path, "set/walk/1.mp4", "set/run/1.mp4")
    (tmp_path / "set" / link).symlink_to(target)
    with pytest.raises(UserError, match=wrong):
        read_manifest(tmp_path / "set")
