"""A stream followed to its end: which frames are seen, dropped and counted, the lines, and the copy with its labels."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import DecodeError
from summit_train.data.video.stream import Reading, StreamFrame, file_frames
from summit_train.inference.stream.follow import Follower, newest, shown_in
from tests.data.video.test_stream import whole

NOTHING = cast(Any, None)


def frames(*numbers: int) -> list[StreamFrame]:
    return [StreamFrame(number, number / 25, 0.0, cast(VideoFrame, [None])) for number in numbers]


class Network:
    """A stream whose logits are those of label 1 with a score of 3/4, and whose third frame comes after a reset."""

    count = 0

    def see(self, picture: Any) -> tuple[NDArray[np.float64], bool]:
        self.count += 1
        return np.array([1000.0, 1000.0 + math.log(3)]), self.count == 3


def follower(stride: int) -> Follower:
    return Follower(cast(Any, Network()), cast(Any, lambda decoded: decoded), ("up", "down"), Reading(), stride)


def test_the_stride_counts_from_the_first_frame_and_captions_stay() -> None:
    one, shown = follower(4), list[tuple[int, str]]()
    found = list(
        one.follow(frames(*range(10)), live=False, show=lambda frame, text: shown.append((frame.number, text)))
    )
    assert [line["frame"] for line in found] == [0, 4, 8] and (one.num_seen, one.num_skipped) == (3, 7)
    assert shown == [(number, "down 0.75") for number in range(10)]
    assert list(found[0]) == ["frame", "seconds", "label", "name", "score", "latency_ms"]
    assert [found[0][key] for key in ("label", "name", "score")] == [1, "down", 0.75]
    assert found[1]["seconds"] == 0.16 and [line.get("reset") for line in found] == [None, None, True]


def test_a_damaged_frame_does_not_move_the_others() -> None:
    one = follower(4)
    found = one.follow(frames(0, 1, 2, 3, 5, 6, 7, 8), live=False, show=None)  # 4 is damaged
    assert [line["frame"] for line in found] == [0, 8] and one.num_skipped == 6


def test_the_summary_has_every_frame() -> None:
    one = Follower(NOTHING, NOTHING, (), Reading(1200, 2), 1, num_seen=200, num_skipped=900, num_dropped=98)
    one.latencies.extend(milliseconds / 1000 for milliseconds in range(1, 202))
    counts = "1,200 frames (200 seen, 900 skipped by the stride, 98 dropped, 2 damaged)"
    assert one.summary().startswith(f"{counts}; latency median 101.0 ms, 99th percentile 199.0 ms, max 201.0 ms; ")
    one.num_resets = 2
    assert f"{counts}, 2 resets; latency" in one.summary()
    assert "max 0.0 ms" in follower(1).summary()  # ended before the first frame


def test_a_source_that_waits_loses_nothing() -> None:
    taken = threading.Semaphore(3)

    def slowly() -> Iterator[StreamFrame]:
        for frame in frames(*range(50)):
            taken.acquire()
            yield frame

    for number, (frame, dropped) in enumerate(newest(slowly(), max_waiting=3)):
        assert (frame.number, dropped) == (number, 0)
        taken.release()
    assert number == 49


def test_the_oldest_frames_are_dropped_and_counted() -> None:
    may_read, is_read, may_end = threading.Event(), threading.Event(), threading.Event()

    def source() -> Iterator[StreamFrame]:
        yield from frames(0)
        may_read.wait()
        yield from frames(*range(1, 11))
        is_read.set()
        may_end.wait()
        yield from frames(11)

    one = follower(1)
    live = one.follow(source(), live=True, show=None)
    found = [next(live)]
    may_read.set()
    is_read.wait()  # 1 to 10 have come while 0 was seen: 7 to 10 wait
    found += [next(live) for _ in range(4)]
    may_end.set()
    found += live
    assert [line["frame"] for line in found] == [0, 7, 8, 9, 10, 11] and (one.num_seen, one.num_dropped) == (6, 6)
    assert [line.get("dropped") for line in found] == [None, 6, None, None, None, None]


def test_an_error_comes_after_the_frames_before_it() -> None:
    def source() -> Iterator[StreamFrame]:
        yield from frames(0, 1)
        raise DecodeError("a.mkv", "is damaged")

    taken = []
    with pytest.raises(DecodeError, match=r"a\.mkv: is damaged"):
        for frame, _ in newest(source()):
            taken.append(frame.number)
    assert taken == [0, 1]


def test_a_fault_of_ours_ends_the_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.set())

    def source() -> Iterator[StreamFrame]:
        yield from frames(0)
        raise ValueError("a bug")

    with pytest.raises(RunFailed, match="the thread that reads the stream failed"):
        list(newest(source()))
    assert printed.wait(10)


LEVELS = 20 + 10 * np.arange(20)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """20 grey frames of 96 x 64 pixels, stored turned by 90 degrees, of variable rate."""
    pictures = np.broadcast_to(LEVELS[:, None, None, None].astype(np.uint8), (20, 96, 64, 3))
    times = [n if n < 10 else 3 * n for n in range(20)]
    write_video(tmp_path / "a.mkv", np.ascontiguousarray(pictures), 10, rotation=90, times=times)
    return tmp_path / "a.mkv"


def read(path: Path) -> tuple[list[StreamFrame], NDArray[np.uint8]]:
    found, render = list(file_frames(str(path), Reading())), Renderer(whole)
    return found, np.stack([render(frame.decoded)[0] for frame in found])


def test_every_frame_is_shown_upright_and_on_time(video: Path, tmp_path: Path) -> None:
    out, reading = tmp_path / "show.mp4", Reading()
    with shown_in(str(out), str(video), reading) as add:
        for frame in file_frames(str(video), reading):
            add(frame, "walk 0.93" if frame.number >= 5 else "")
            assert not out.exists()
    (source, _), (found, pictures) = read(video), read(out)
    assert [frame.seconds for frame in found] == pytest.approx([frame.seconds for frame in source], abs=1e-3)
    assert pictures.shape == (20, 64, 96, 3)
    assert pictures[:, 40:, 50:].mean((1, 2, 3)) == pytest.approx(LEVELS, abs=2)
    corner = pictures[:, :8, :20].min((1, 2, 3))
    assert (corner[5:] < 12).all() and corner[:5] == pytest.approx(LEVELS[:5], abs=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mkv", "show.mp4"]


def test_two_frames_of_one_time_and_an_error(video: Path, tmp_path: Path) -> None:
    source, _ = read(video)
    with shown_in(str(tmp_path / "show.mkv"), str(video), Reading()) as add:
        for number in (0, 1, 1, 0, 2):
            add(source[number], "")
    seconds = [frame.seconds for frame in read(tmp_path / "show.mkv")[0]]
    assert len(seconds) == 5 and seconds == sorted(seconds) and seconds[-1] == pytest.approx(0.2, abs=1e-3)
    with pytest.raises(ZeroDivisionError), shown_in(str(tmp_path / "torn.mp4"), str(video), Reading()) as add:
        add(source[0], "")
        _ = 1 / 0
    with shown_in(str(tmp_path / "empty.mp4"), str(video), Reading()):
        pass  # without a frame there is no video
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mkv", "show.mkv"]


def test_a_copy_that_cannot_be_written_is_refused_at_once(video: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    for name, reason in (
        ("show.avi", r"--show must be a name that ends in \.mp4, \.mkv, \.mov"),
        ("folder.mp4", "cannot be written: is not a regular file"),
        ("a.mkv", "is the video that is streamed"),
        ("file/show.mp4", "cannot be written: Not a directory"),
    ):
        with pytest.raises(UserError, match=reason) as caught, shown_in(str(tmp_path / name), str(video), Reading()):
            pass
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 3
