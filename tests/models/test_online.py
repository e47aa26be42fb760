"""The stream against the clip network: the same logits frame by frame, and caches of the sizes worked out by hand."""

from __future__ import annotations

import pytest
import torch

from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.models.online import StreamNetwork, cache_shapes
from tests.closeness import assert_near
from tests.networks import random_network

FRAMES = 5


def past_only(backbone: str, *, dtype: torch.dtype = torch.float64, **options: object) -> VideoNetwork:
    """A past-only TSM whose normalisations and classifier show in the logits."""
    return random_network("tsm", backbone, FRAMES, 6, shift_direction="past", **options).to(dtype).eval()


def frame_logits(model: VideoNetwork, clip: torch.Tensor) -> torch.Tensor:
    """The clip network's logits of each frame, (T, N, classes), before they are averaged."""
    logits = model.classify(model.extract(model.to_input(clip)))
    return logits.view(*clip.shape[:2], -1).transpose(0, 1)


def streamed(model: VideoNetwork, clip: torch.Tensor) -> torch.Tensor:
    stream, caches, logits = StreamNetwork(model), (), []
    for frame in clip.unbind(1):
        one, caches = stream(frame, caches)
        logits.append(one)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("backbone", "place", "dtype", "bound"),
    [
        ("resnet50", "residual", torch.float64, 1e-12),
        ("resnet101", "residual", torch.float64, 1e-12),
        ("mobilenet_v2", "residual", torch.float64, 1e-12),
        ("mobilenet_v2", "residual", torch.float32, 1e-5),
        ("resnet18", "in_place", torch.float64, 1e-12),
    ],
)
@torch.inference_mode()
def test_the_stream_gives_each_frame_the_clip_networks_logits(
    backbone: str, place: str, dtype: torch.dtype, bound: float
) -> None:
    model = past_only(backbone, dtype=dtype, shift_place=place).train()
    before, clip = repr(model), torch.randn(2, FRAMES, 3, 32, 32, dtype=dtype)
    ours = streamed(model, clip)
    assert repr(model) == before and model.training  # left alone
    theirs = frame_logits(model.eval(), clip)
    assert theirs.std(0).min() > 1e-6 * theirs.abs().max(), "the frames differ"
    assert_near(ours, theirs, bound)
    assert_near(ours.mean(0), model(clip), bound)


@torch.inference_mode()
def test_the_past_changes_the_logits_and_the_state_is_the_callers() -> None:
    stream, frames = StreamNetwork(past_only("resnet18", width=0.25)), torch.randn(3, 1, 3, 32, 32, dtype=torch.float64)
    alone, _ = stream(frames[2])
    _, caches = stream(frames[0])
    kept = [cache.clone() for cache in caches]
    after, _ = stream(frames[2], caches)
    again, _ = stream(frames[2], kept)
    started, _ = stream(frames[2], [torch.zeros_like(cache) for cache in caches])
    assert not torch.equal(after, alone)
    assert torch.equal(again, after) and torch.equal(started, alone)
    assert all(torch.equal(cache, copy) for cache, copy in zip(caches, kept, strict=True))


@torch.inference_mode()
def test_the_2d_twin_streams_without_a_cache() -> None:
    stream = StreamNetwork(build_model("tsn", "resnet18", FRAMES, 4, width=0.125).eval())
    assert stream(torch.randn(1, 3, 32, 32))[1] == []


def test_what_a_stream_cannot_be_made_of() -> None:
    with pytest.raises(ValueError, match=r"layer1\.0\.shift needs the next frame"):
        StreamNetwork(build_model("tsm", "resnet18", 4, 4, width=0.125))
    fast = past_only("resnet18", dtype=torch.float32)
    fast.execution = accelerate(fast)
    with pytest.raises(ValueError, match="needs a plain network"):
        StreamNetwork(fast)


def test_the_caches_shapes() -> None:
    """Derived from the networks' shapes at 224 x 224, 1/8 of the channels: 27,048 and 702,464 elements."""
    with torch.device("meta"):
        mobile = build_model("tsm", "mobilenet_v2", 8, 400, shift_direction="past")
        resnet = build_model("tsm", "resnet50", 8, 400, shift_direction="past")
    wanted = [(3, 56, 56), *2 * [(4, 28, 28)], *3 * [(8, 14, 14)], *2 * [(12, 14, 14)], *2 * [(20, 7, 7)]]
    assert cache_shapes(mobile, 224, 224) == wanted
    wanted = [(8, 56, 56), *3 * [(32, 56, 56)], *4 * [(64, 28, 28)], *6 * [(128, 14, 14)], *2 * [(256, 7, 7)]]
    assert cache_shapes(resnet, 224, 224) == wanted
