"""The stream against the clip network; its average by hand; which frames are seen, dropped and counted."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed
from summit_train.data.video.clips import VideoClip
from summit_train.data.video.source import DecodeError, Encoded
from summit_train.data.video.stream import Progress, StreamFrame, file_frames
from summit_train.inference.stream.stream import Follower, Show, newest, stream_view
from summit_train.inference.trained import Trained, open_trained
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise, parameter_type
from summit_train.tasks.classification.stream import Labeller
from tests.closeness import assert_near

CPU = torch.device("cpu")
Frames = NDArray[np.uint8]


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    return open_trained(trained_run)


@pytest.fixture(scope="module")
def pictures(trained: Trained, motion_set: Path) -> list[Frames]:
    """All 8 frames of a video, as the stream sees them."""
    stream, path = Labeller(trained, CPU), str(motion_set / "videos/val_000002.mp4")
    return [stream.picture(frame) for frame in file_frames(path, Progress())]


def clip_logits(trained: Trained, video: Path, frames: Sequence[int]) -> NDArray[np.float64]:
    """What the clip network, run as evaluation runs it, gives these frames of a file."""
    with VideoClip(Encoded(str(video))) as opened:
        views = opened.read(np.array([frames]), [stream_view(trained.spec, *opened.size(np.array([frames])))])
    normalise = Normalise(parameter_type(trained.spec.precision), CPU)
    with torch.inference_mode():
        logits: NDArray[np.float64] = trained.network(CPU)(normalise(torch.from_numpy(views)))[0].double().numpy()
    return logits


@pytest.mark.parametrize(("stride", "precision"), [(1, "fp32"), (2, "fp32"), (1, "fp64")])
def test_after_the_frames_of_a_clip_the_stream_has_the_clips_logits(
    trained_run: Path, motion_set: Path, pictures: list[Frames], stride: int, precision: str
) -> None:
    trained = open_trained(trained_run, [f"precision={precision}"])
    stream = Labeller(trained, CPU)  # the window is that of training, 4 frames
    for picture in pictures[: 4 * stride : stride]:
        logits = stream.logits(picture)
    expected = clip_logits(trained, motion_set / "videos/val_000002.mp4", [0, stride, 2 * stride, 3 * stride])
    assert_near(logits, expected, 1e-5 if precision == "fp32" else 1e-12)
    assert np.ptp(expected) > 1e-3


def test_the_average_spans_the_window(trained: Trained, pictures: list[Frames]) -> None:
    def streamed(window: int) -> NDArray[np.float64]:
        stream = Labeller(trained, CPU, window)
        return np.stack([stream.logits(picture) for picture in pictures])

    own = streamed(1)
    assert np.ptp(own, axis=0).min() > 1e-4
    for window in (2, 3):
        means = [own[max(0, n + 1 - window) : n + 1].mean(0) for n in range(len(own))]
        assert_near(streamed(window), np.stack(means), 1e-12)
    assert_near(streamed(0), np.cumsum(own, 0) / np.arange(1, 9)[:, None], 1e-12)


def test_scores_that_are_no_numbers_end_the_stream(trained: Trained) -> None:
    weights = {**trained.weights, "fc.bias": torch.full((4,), math.nan)}
    stream = Labeller(dataclasses.replace(trained, weights=weights), CPU)
    with pytest.raises(RunFailed, match="not finite"):
        stream.logits(np.zeros((32, 32, 3), np.uint8))


def test_the_2d_twin_streams_and_an_accelerated_network_does_not(
    trained: Trained, trained_run: Path, pictures: list[Frames]
) -> None:
    twin = open_trained(trained_run, ["model.arch=tsn"])
    assert len(Labeller(twin, CPU).logits(pictures[0])) == 4
    with pytest.raises(ValueError, match="plain network"):
        StreamNetwork(trained.network(CPU))


@pytest.mark.parametrize(("crops", "size"), [("1", (20, 20)), ("3", (20, 20)), ("full", (40, 20))])
def test_the_picture_is_the_centre_or_the_whole(trained_run: Path, crops: str, size: tuple[int, int]) -> None:
    spec = open_trained(trained_run, ["evaluate.short_side=20", f"evaluate.crops={crops}"]).spec
    view = stream_view(spec, 80, 40)
    assert (view.crop_width, view.crop_height) == size and view.x == (40 - size[0]) // 2


# A stream followed to its end.

NOTHING = cast(Any, None)


def frames(*numbers: int) -> list[StreamFrame]:
    return [StreamFrame(number, number / 25, 0.0, cast(VideoFrame, [None])) for number in numbers]


def down(frame: StreamFrame) -> dict[str, Any]:
    """What is seen in every frame."""
    return {"label": 1, "name": "down", "score": 0.75}


def follower(stride: int) -> Follower:
    return Follower(down, Progress(), stride)


def test_the_stride_counts_from_the_first_frame_and_captions_stay() -> None:
    one, shown = follower(4), list[tuple[int, str]]()
    show: Show = lambda frame, values: shown.append((frame.number, Labeller.text(NOTHING, values or {})))  # noqa: E731
    found = list(one.follow(frames(*range(10)), live=False, show=show))
    assert [line["frame"] for line in found] == [0, 4, 8] and (one.num_seen, one.num_skipped) == (3, 7)
    assert shown == [(number, "0.75  down") for number in range(10)]
    assert list(found[0]) == ["frame", "seconds", "label", "name", "score", "latency_ms"]
    assert found[1].items() >= {"label": 1, "name": "down", "score": 0.75, "seconds": 0.16}.items()
    # A damaged frame, 4, does not move the others.
    one = follower(4)
    found = list(one.follow(frames(0, 1, 2, 3, 5, 6, 7, 8), live=False, show=None))
    assert [line["frame"] for line in found] == [0, 8] and one.num_skipped == 6


def test_the_summary_has_every_frame() -> None:
    one = Follower(NOTHING, Progress(1200, 2), 1, num_seen=200, num_skipped=900, num_dropped=98)
    one.latencies.extend(milliseconds / 1000 for milliseconds in range(1, 202))
    counts = "1,200 frames (200 seen, 900 skipped by the stride, 98 dropped, 2 damaged)"
    assert one.summary().startswith(f"{counts}; latency median 101.0 ms, 99th percentile 199.0 ms, max 201.0 ms; ")
    assert "max 0.0 ms" in follower(1).summary()  # ended before the first frame


def test_a_source_that_waits_loses_nothing() -> None:
    taken = threading.Semaphore(4)

    def slowly() -> Iterator[StreamFrame]:
        for frame in frames(*range(50)):
            taken.acquire()
            yield frame

    for number, (frame, dropped) in enumerate(newest(slowly())):
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


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (DecodeError("a.mkv", "is damaged"), DecodeError, r"a\.mkv: is damaged"),
        (ValueError("a bug"), RunFailed, "the thread that reads the stream failed"),
    ],
)
def test_an_error_comes_after_the_frames_before_it(
    error: Exception, expected: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours is printed, too."""
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.set())

    def source() -> Iterator[StreamFrame]:
        yield from frames(0, 1)
        raise error

    taken = []
    with pytest.raises(expected, match=reason):
        for frame, _ in newest(source()):
            taken.append(frame.number)
    assert taken == [0, 1] and (expected is DecodeError or printed.wait(10))
