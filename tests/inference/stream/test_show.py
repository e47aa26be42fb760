"""The copy of a streamed video with its labels: whole, upright, on time, and there when it is complete."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Renderer
from summit_train.data.video.stream import Reading, StreamFrame, file_frames
from summit_train.inference.stream.show import Show
from tests.data.video.test_stream import whole

LEVELS = 20 + 10 * np.arange(20)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """20 grey frames of 96 x 64 pixels, stored turned by 90 degrees, of variable rate."""
    frames = np.broadcast_to(LEVELS[:, None, None, None].astype(np.uint8), (20, 96, 64, 3))
    times = [n if n < 10 else 3 * n for n in range(20)]
    write_video(tmp_path / "a.mkv", np.ascontiguousarray(frames), 10, rotation=90, times=times)
    return tmp_path / "a.mkv"


def read(path: Path) -> tuple[list[StreamFrame], NDArray[np.uint8]]:
    frames, render = list(file_frames(str(path), Reading())), Renderer(whole)
    return frames, np.stack([render(frame.decoded)[0] for frame in frames])


def test_every_frame_is_there_upright_and_on_time(video: Path, tmp_path: Path) -> None:
    out, reading = tmp_path / "show.mp4", Reading()
    with Show(out, str(video), reading) as show:
        for frame in file_frames(str(video), reading):
            show.add(frame, "walk 0.93" if frame.number >= 5 else "")
            assert not out.exists()
    (source, _), (frames, pictures) = read(video), read(out)
    assert [frame.seconds for frame in frames] == pytest.approx([frame.seconds for frame in source], abs=1e-3)
    assert pictures.shape == (20, 64, 96, 3)
    assert pictures[:, 40:, 50:].mean((1, 2, 3)) == pytest.approx(LEVELS, abs=2)
    corner = pictures[:, :8, :20].min((1, 2, 3))
    assert (corner[5:] < 12).all() and corner[:5] == pytest.approx(LEVELS[:5], abs=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mkv", "show.mp4"]


def test_two_frames_of_one_time(video: Path, tmp_path: Path) -> None:
    frames, _ = read(video)
    with Show(tmp_path / "show.mkv", str(video), Reading()) as show:
        for number in (0, 1, 1, 0, 2):
            show.add(frames[number], "")
    seconds = [frame.seconds for frame in read(tmp_path / "show.mkv")[0]]
    assert len(seconds) == 5 and seconds == sorted(seconds) and seconds[-1] == pytest.approx(0.2, abs=1e-3)


def test_after_an_error_nothing_is_left(video: Path, tmp_path: Path) -> None:
    frames, _ = read(video)
    with pytest.raises(ZeroDivisionError), Show(tmp_path / "show.mp4", str(video), Reading()) as show:
        show.add(frames[0], "")
        _ = 1 / 0
    with Show(tmp_path / "show.mp4", str(video), Reading()):
        pass  # without a frame there is no video
    assert [path.name for path in tmp_path.iterdir()] == ["a.mkv"]


def test_what_cannot_be_written_is_said_before(video: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    for name, reason in (
        ("show.avi", r"a video is written as \.mp4, \.mkv, \.mov"),
        ("folder.mp4", "is a folder"),
        ("a.mkv", "is the video that is streamed"),
        ("nowhere/show.mp4", "cannot be written: No such file or directory"),
        ("file/show.mp4", "cannot be written: Not a directory"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            Show(tmp_path / name, str(video), Reading())
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 3
