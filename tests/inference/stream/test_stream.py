"""The stream against the clip network on real videos; its average, cuts and resets by hand; what cannot stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.video.clips import read_views
from summit_train.data.video.source import Encoded
from summit_train.data.video.stream import Reading, file_frames
from summit_train.inference.stream.stream import CUT_THRESHOLD, Stream, open_stream, renderer
from summit_train.inference.trained import Trained, open_trained
from summit_train.models.precision import Normalise, parameter_type
from tests.closeness import assert_near

CPU = torch.device("cpu")
Frames = NDArray[np.uint8]


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    return open_trained(trained_run)


@pytest.fixture(scope="module")
def pictures(trained: Trained, motion_set: Path) -> list[Frames]:
    """All 8 frames of a video, as the stream sees them."""
    render = renderer(trained.spec.evaluate)
    path = str(motion_set / "videos/val_000002.mp4")
    return [render(frame.decoded)[0] for frame in file_frames(path, Reading())]


def clip_logits(trained: Trained, video: Path, frames: Sequence[int]) -> NDArray[np.float64]:
    """What the clip network, run as evaluation runs it, gives these frames of a file."""
    views_of = lambda width, height: renderer(trained.spec.evaluate)._views_of(width, height)  # noqa: E731
    views = read_views(Encoded(str(video)), lambda n: np.array([frames]), views_of)
    normalise = Normalise(parameter_type(trained.spec.precision), CPU)
    with torch.inference_mode():
        logits: NDArray[np.float64] = trained.network(CPU)(normalise(torch.from_numpy(views)))[0].double().numpy()
    return logits


@pytest.mark.parametrize(("stride", "precision"), [(1, "fp32"), (2, "fp32"), (1, "fp64")])
def test_after_the_frames_of_a_clip_the_stream_has_the_clips_logits(
    trained_run: Path, motion_set: Path, pictures: list[Frames], stride: int, precision: str
) -> None:
    trained = open_trained(trained_run, [f"precision={precision}"])
    stream = open_stream(trained, CPU)  # the window is that of training, 4 frames
    for picture in pictures[: 4 * stride : stride]:
        logits, _ = stream.see(picture)
    expected = clip_logits(trained, motion_set / "videos/val_000002.mp4", [0, stride, 2 * stride, 3 * stride])
    assert_near(logits, expected, 1e-5 if precision == "fp32" else 1e-12)
    assert np.ptp(expected) > 1e-3


@pytest.mark.parametrize("window", [4, 0])
def test_after_a_cut_a_clip_begins(trained: Trained, motion_set: Path, pictures: list[Frames], window: int) -> None:
    stream = open_stream(trained, CPU, window, cut=45)
    stream.see(pictures[0] // 2 + 128)
    found = [stream.see(picture) for picture in pictures[4:]]
    assert [is_reset for _, is_reset in found] == [True, False, False, False]
    assert_near(found[-1][0], clip_logits(trained, motion_set / "videos/val_000002.mp4", [4, 5, 6, 7]), 1e-5)


def test_the_average_spans_the_window(trained: Trained, pictures: list[Frames]) -> None:
    def streamed(window: int) -> NDArray[np.float64]:
        stream = open_stream(trained, CPU, window)
        return np.stack([stream.see(picture)[0] for picture in pictures])

    own = streamed(1)
    assert np.ptp(own, axis=0).min() > 1e-4
    for window in (2, 3):
        means = [own[max(0, n + 1 - window) : n + 1].mean(0) for n in range(len(own))]
        assert_near(streamed(window), np.stack(means), 1e-12)
    assert_near(streamed(0), np.cumsum(own, 0) / np.arange(1, 9)[:, None], 1e-12)


def grey(level: int) -> Frames:
    return np.full((32, 32, 3), level, np.uint8)


def resets(trained: Trained, shown: Sequence[Frames], cut: float | None) -> list[bool]:
    stream = open_stream(trained, CPU, cut=cut)
    return [stream.see(picture)[1] for picture in shown]


def test_a_cut_is_a_difference_of_thumbnails_above_the_threshold(trained: Trained) -> None:
    shown = [grey(level) for level in (50, 94, 50, 96, 97)]  # differences of 44, 44, 46, 1
    assert resets(trained, shown, 45) == [False, False, False, True, False]
    assert resets(trained, shown, None) == [False] * 5
    board = (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)  # squares of one pixel: its thumbnail is grey
    assert resets(trained, [np.stack([board] * 3, 2), np.stack([255 - board] * 3, 2)], 5) == [False, False]
    left = grey(0)
    left[:, :8] = 200  # a quarter of the picture changes by 200: 50 in the mean
    assert resets(trained, [grey(0), left], 49) == [False, True]
    assert resets(trained, [grey(0), left], 51) == [False, False]


def test_motion_is_no_cut_and_another_scene_is(trained: Trained, motion_set: Path, pictures: list[Frames]) -> None:
    assert not any(resets(trained, pictures, CUT_THRESHOLD))
    cut_at_4 = resets(trained, [*pictures[:4], *(255 - picture // 4 for picture in pictures[4:])], CUT_THRESHOLD)
    assert cut_at_4 == [False] * 4 + [True] + [False] * 3


def test_scores_that_are_no_numbers_end_the_stream(trained: Trained) -> None:
    weights = {**trained.weights, "fc.bias": torch.full((4,), math.nan)}
    stream = open_stream(dataclasses.replace(trained, weights=weights), CPU)
    with pytest.raises(RunFailed, match="not finite"):
        stream.see(grey(7))


RESNET50 = ("model.backbone=resnet50", "data.num_frames=16")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("model.shift_direction=both",), "its shift needs the next frame"),
        ((*RESNET50, "model.non_local=tsm"), "non-local blocks attend to all frames"),
        ((*RESNET50, "model.arch=i3d_3x1x1"), "i3d_3x1x1 cannot stream: it sees whole clips"),
        ((*RESNET50, "model.arch=i3d_3x3x3"), "i3d_3x3x3 cannot stream: it sees whole clips"),
    ],
)
def test_networks_that_cannot_stream(trained_run: Path, overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        open_stream(open_trained(trained_run, overrides), CPU)
    assert "step_00000020.pt" in str(caught.value) and "\n" not in str(caught.value)


def test_the_2d_twin_streams_and_an_accelerated_network_does_not(
    trained: Trained, trained_run: Path, pictures: list[Frames]
) -> None:
    twin = open_trained(trained_run, ["model.arch=tsn"])
    assert len(open_stream(twin, CPU).see(pictures[0])[0]) == 4
    with pytest.raises(ValueError, match="plain network"):
        Stream(trained.network(CPU), CPU, 4)


@pytest.mark.parametrize(("crops", "size"), [("1", (20, 20)), ("3", (20, 20)), ("full", (40, 20))])
def test_the_picture_is_the_centre_or_the_whole(trained_run: Path, crops: str, size: tuple[int, int]) -> None:
    spec = open_trained(trained_run, ["evaluate.short_side=20", f"evaluate.crops={crops}"]).spec
    (view,) = renderer(spec.evaluate)._views_of(80, 40)
    assert (view.crop_width, view.crop_height) == size and view.x == (40 - size[0]) // 2
