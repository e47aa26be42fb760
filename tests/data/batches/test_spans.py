"""Clips that are spans of their files, drawn by the loader: the frames are those of the file cut to the span."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.data.batches.loader import TrainingClips, test_batches
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import WHOLE, Span
from summit_train.spec import DataSpec, EvaluateSpec

NUM_FRAMES = 14
FRAMES = np.random.default_rng(3).integers(0, 256, (NUM_FRAMES, 4, 5, 3), np.uint8).repeat(8, 1).repeat(8, 2)


@st.composite
def _some_span(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, NUM_FRAMES - 1))
    return draw(st.sampled_from([WHOLE, Span(start), Span(start, draw(st.integers(start + 1, NUM_FRAMES)))]))


def _batches(folder: Path, row: ManifestRow, data: DataSpec) -> tuple[Any, Any]:
    """The pixels of two epochs of training and of the test's views of a manifest's only clip."""
    write_manifest(folder / "list.csv", [row])
    store = open_store(data, read_manifest(folder / "list.csv"))
    order = Order(1, 7, virtual_gpus=1, clips_per_gpu=1, steps_per_epoch=1)
    read = TrainingClips(data, store, order.seed)
    drawn = [batch.clips.numpy() for batch in read.batches(order, 0, 1, range(2))]
    (tested,) = test_batches(data, EvaluateSpec(clips=3, crops=1, short_side=24), store, [0])
    return np.concatenate(drawn), tested.views.numpy()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    span=_some_span(),
    sampling=st.sampled_from(["dense", "uniform"]),
    stride=st.integers(1, 4),
    is_reversed=st.booleans(),
    is_counted=st.booleans(),
)
def test_a_span_gives_the_frames_of_the_cut_file(
    tmp_path: Path, span: Span, sampling: Any, stride: int, is_reversed: bool, is_counted: bool
) -> None:
    frames = FRAMES[span.start :] if span.end < 0 else FRAMES[span.start : span.end]
    for name, content in (("whole.mkv", FRAMES), ("cut.mkv", frames)):  # without loss, and each frame by itself
        write_video(tmp_path / name, content, codec="ffv1", b_frames=0)
    data = DataSpec(
        train="x", val="x", num_frames=4, frame_stride=stride, sampling=sampling, short_side=(24, 32), crop=24,
        workers=0,
    )  # fmt: skip
    whole = ManifestRow("whole.mkv", 0, NUM_FRAMES if is_counted else None, reversed=is_reversed, span=span)
    cut = ManifestRow("cut.mkv", 0, len(frames) if is_counted else None, reversed=is_reversed)
    found, wanted = _batches(tmp_path, whole, data), _batches(tmp_path, cut, data)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize(("is_reversed", "numbers"), [(False, [3, 5, 7, 9]), (True, [11, 9, 7, 5])])
def test_frame_numbers_are_those_in_the_video(tmp_path: Path, is_reversed: bool, numbers: list[int]) -> None:
    write_video(tmp_path / "whole.mkv", FRAMES, codec="ffv1", b_frames=0)
    # 9 frames and a window of 2 * 4: the only clip starts at the first of two places.
    row = ManifestRow("whole.mkv", 0, reversed=is_reversed, span=Span(3, 12))
    write_manifest(tmp_path / "list.csv", [row])
    data = DataSpec(train="x", val="x", num_frames=4, frame_stride=2, short_side=(24, 32), crop=24, workers=0)
    store = open_store(data, read_manifest(tmp_path / "list.csv"))
    (tested,) = test_batches(data, EvaluateSpec(clips=1, crops="full", short_side=32), store, [0])
    assert tested.frames.tolist() == [numbers]
    for number, seen in zip(numbers, tested.views[0].numpy(), strict=True):
        assert np.abs(FRAMES.astype(int) - seen).mean((1, 2, 3)).argmin() == number
