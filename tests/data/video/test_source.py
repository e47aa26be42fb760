from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.video.encode import write_video
from summit_train.data.video.source import Budget, DecodeError, Limits
from summit_train.data.video.span import WHOLE, Span
from tests.data.clips import all_of, probe, read_clip


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "a.mp4"
    write_video(path, np.zeros((20, 32, 48, 3), np.uint8), b_frames=0)
    return path


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(pixels=32 * 48 - 1), "a frame of 48 x 32 pixels is not read"),
        (Limits(packets=19), "does not end after 19 packets"),
        (Limits(seconds=0), "takes longer than 0 s to read"),
    ],
)
def test_a_video_beyond_a_limit_is_refused(video: Path, limits: Limits, reason: str) -> None:
    for count in (None, 20):
        with pytest.raises(DecodeError, match=reason):
            read_clip(video, lambda n: np.array([n - 1]), all_of, count, limits=limits)
    with pytest.raises(DecodeError, match=reason):
        probe(video, limits)


def test_the_time_in_which_a_process_was_stopped_does_not_count() -> None:
    budget = Budget("a.mp4", Limits(seconds=20))
    budget.began -= 1000
    budget.checked -= 1000
    budget.check()
    budget.began -= 11  # ten seconds of those count
    with pytest.raises(DecodeError, match="takes longer than 20 s to read"):
        budget.check()


def test_the_decoder_itself_refuses_a_size_that_only_comes_later(tmp_path: Path) -> None:
    # Two raw streams in one: the header's size is the first one's.
    small, large = np.zeros((3, 32, 32, 3), np.uint8), np.zeros((3, 64, 64, 3), np.uint8)
    for name, frames in (("small.mpg", small), ("large.mpg", large)):
        write_video(tmp_path / name, frames, codec="mpeg1video", b_frames=0)
    both = (tmp_path / "small.mpg").read_bytes()[:-4] + (tmp_path / "large.mpg").read_bytes()
    (tmp_path / "both.mpg").write_bytes(both)
    with pytest.raises(DecodeError):
        probe(tmp_path / "both.mpg", Limits(pixels=33 * 33))


def test_an_error_travels_between_processes_with_its_span() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("a.mp4", "is outside", Span(3, 9))))
    assert (error.path, error.reason, error.span) == ("a.mp4", "is outside", Span(3, 9))
    assert str(error) == "a.mp4: is outside" and DecodeError("a", "b").span == WHOLE
