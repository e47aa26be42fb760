"""The pictures of an exported graph: the centre of a scaled frame, of a file or of the validation set."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from summit_train.data.video import augment
from summit_train.data.video.augment import View
from summit_train.data.video.source import DecodeError
from summit_train.inference.export.data import Picture, clips_of, open_validation
from summit_train.spec import Spec, load_spec
from tests.conftest import WriteSpec


@pytest.mark.parametrize("size", [(340, 256), (256, 340), (161, 121), (64, 64)])
def test_the_square_of_eval(size: tuple[int, int]) -> None:
    assert Picture(112, 112, 112).views(*size) == augment.test_views(112, 1, *size)


def test_the_centre_of_a_frame() -> None:
    assert Picture(256, 224, 224).views(340, 256) == [View(340, 256, 58, 16, 224, 224)]
    # 320 pixels across of a frame that is higher than wide: scaled until they are there.
    assert Picture(256, 256, 320).views(240, 320) == [View(320, 426, 0, 85, 320, 256)]
    assert Picture(256, 256, 320).views(320, 240) == [View(341, 256, 10, 0, 320, 256)]


@pytest.fixture
def spec(write_spec: WriteSpec) -> Spec:
    return load_spec(write_spec())


def test_clips_of_a_file(spec: Spec, motion_set: Path, tmp_path: Path) -> None:
    picture = Picture(32, 32, 32)
    video = str(motion_set / "videos/val_000000.mp4")
    assert clips_of(video, spec.data, 3, picture).clips.shape == (3, 4, 32, 32, 3)
    with pytest.raises(DecodeError, match="without frames"):
        clips_of(str(tmp_path / "."), spec.data, 1, picture)


def test_the_validation_set(spec: Spec) -> None:
    validation = open_validation(spec)
    assert (len(validation.videos), validation.reason) == (41, "")
    assert validation.spread(None) == validation.spread(200) == validation.videos
    assert validation.spread(4) == (0, 10, 20, 30)
    clips, reason = validation.first_clips(spec.data, 2, Picture(32, 32, 32), print)
    assert clips is not None and reason == ""
    assert clips.path == "videos/val_000000.mp4" and clips.clips.shape == (2, 4, 32, 32, 3)


def test_the_first_that_can_be_read(spec: Spec, motion_set: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/torn.mp4").write_bytes(b"no video")
    shutil.copy(motion_set / "videos/val_000001.mp4", tmp_path / "videos/good.mp4")
    there = lambda names: spec.model_copy(update={"data": spec.data.model_copy(update={"val": listed(names)})})  # noqa: E731

    def listed(names: list[str]) -> str:
        path = tmp_path / f"{len(names)}.csv"
        path.write_text("path,label\n" + "".join(f"videos/{name},0\n" for name in names))
        return str(path)

    picture, said = Picture(32, 32, 32), list[str]()
    clips, _ = open_validation(there(["torn.mp4", "good.mp4"])).first_clips(spec.data, 1, picture, said.append)
    assert len(said) == 1 and said[0].startswith(f"left out: {tmp_path}/videos/torn.mp4: is no video")
    assert clips is not None and clips.path == "videos/good.mp4"
    clips, reason = open_validation(there(["torn.mp4"])).first_clips(spec.data, 1, picture, said.append)
    assert clips is None and reason.startswith("none of the first 1 videos of ")


@pytest.mark.parametrize(("content", "reason"), [(None, "there is no validation set"), ("path,label\na.mp4,9\n", "9")])
def test_why_there_is_none(content: str | None, reason: str, spec: Spec, tmp_path: Path) -> None:
    path = tmp_path / "val.csv"
    if content is not None:
        path.write_text(content)
    changed = spec.model_copy(update={"data": spec.data.model_copy(update={"val": str(path)})})
    validation = open_validation(changed)
    assert validation.store is None and validation.videos == ()
    assert reason in validation.reason
    assert validation.first_clips(spec.data, 1, Picture(32, 32, 32), print) == (None, validation.reason)
