"""The check of an exported graph, on logits worked by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from summit_train.data.batches.loader import BadClip, TestBatch
from summit_train.inference.export.onnx_file import TensorInfo
from summit_train.inference.export.verify import (
    Exported,
    compare_accuracy,
    difference,
    normalised,
    random_clips,
    state_names,
)


class Summing:
    """A runtime of two streams: the logit is the sum of the frames so far, or of the clip."""

    def __init__(self, *inputs: TensorInfo) -> None:
        self.inputs = list(inputs)

    def __call__(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if "clip" in values:
            return {"logits": values["clip"].sum((1, 2, 3, 4))[:, None]}
        total = values["cache_in_0"] + values["frame"].sum((1, 2, 3))[:, None]
        return {"logits": total, "cache_out_0": total}


CLIPS = torch.arange(6.0).reshape(3, 2, 1, 1, 1)  # three clips of two frames: 0 1, 2 3, 4 5


def test_clips_that_do_not_fill_a_batch() -> None:
    clip = Summing(TensorInfo("clip", (2, 2, 1, 1, 1), "float32"))
    assert Exported(clip, stream=False)(CLIPS).tolist() == [[[1]], [[5]], [[9]]]


def test_each_clip_is_a_stream_of_its_own() -> None:
    inputs = TensorInfo("frame", (2, 1, 1, 1), "float32"), TensorInfo("cache_in_0", (2, 1), "float32")
    assert Exported(Summing(*inputs), stream=True)(CLIPS).tolist() == [[[0], [1]], [[2], [5]], [[4], [9]]]


def test_the_names_of_the_state() -> None:
    assert state_names(["frame", "cache_in_0", "cache_in_10"]) == {
        "cache_in_0": "cache_out_0",
        "cache_in_10": "cache_out_10",
    }


def test_the_largest_difference() -> None:
    ours, theirs = np.array([[[1.0, -4.0]]]), np.array([[[1.5, -4.25]]])
    found = difference(ours, theirs)
    assert (found.largest, found.largest_logit) == (0.5, 4.0)
    for wrong in (np.nan, np.inf):
        assert difference(ours, np.array([[[1.0, wrong]]])).largest == np.inf
    with pytest.raises(AssertionError):
        difference(ours, theirs[0])


def test_pixels_are_normalised() -> None:
    pixels = torch.tensor([124, 116, 104], dtype=torch.uint8).reshape(1, 1, 1, 1, 3)
    wanted = [(124 - 0.485 * 255) / (0.229 * 255), (116 - 0.456 * 255) / (0.224 * 255), (104 - 103.53) / 57.375]
    assert normalised(pixels).flatten().tolist() == pytest.approx(wanted, rel=1e-5)
    assert random_clips(2, 3, 5, 4).shape == (2, 3, 3, 5, 4)
    assert torch.equal(random_clips(1, 1, 4, 4), random_clips(1, 1, 4, 4))


def test_accuracy_by_hand() -> None:
    def batch(video: int, label: int, *levels: int) -> TestBatch:
        return TestBatch(
            video, label, torch.tensor(levels, dtype=torch.uint8).reshape(-1, 1, 1, 1, 1).repeat(1, 1, 1, 1, 3)
        )

    def levels(clips: torch.Tensor) -> Any:
        red = (clips[:, 0, 0, 0, 0] * 0.229 * 255 + 0.485 * 255).round().numpy()
        return np.stack([red, 10 - red], axis=1)[:, None]

    biased = lambda clips: levels(clips) + np.array([3.0, 0.0])  # noqa: E731
    # The means are 6, 4, 1 of 10: class 0, 1, 1. With 3 more for class 0 the second becomes 0.
    bad = TestBatch(3, 0, torch.zeros(0, dtype=torch.uint8), BadClip(3, "torn.mp4", "is torn", None))
    said = list[str]()
    batches = [batch(0, 0, 8, 4), batch(1, 1, 4), bad, batch(2, 0, 1)]
    assert compare_accuracy(levels, biased, batches, said.append) == {
        "videos": 3,
        "unreadable": 1,
        "top1_fp32": pytest.approx(200 / 3),
        "top1": pytest.approx(100 / 3),
        "agreement": pytest.approx(200 / 3),
        "largest_difference": pytest.approx(3.0, rel=1e-5),
    }
    assert said == ["left out: torn.mp4: is torn"]
    nothing = compare_accuracy(levels, biased, [bad], said.append)
    assert (nothing["videos"], nothing["top1"], nothing["agreement"]) == (0, None, None)
