"""The forms that are exported against the networks' own: the same numbers, named inputs, at most four dimensions."""

from __future__ import annotations

import pytest
import torch

from summit_train.inference.export.graph import ConcatenatedShift, clip_graph, stream_graph
from summit_train.models import build_model
from summit_train.models.online import StreamNetwork
from summit_train.models.shift import TemporalShift
from summit_train.spec.catalog import ShiftDirection


@pytest.mark.parametrize(
    ("direction", "fraction"),
    [("both", 0.125), ("both", 0.25), ("both", 0.5), ("both", 0.0), ("past", 0.125), ("past", 1.0), ("past", 0.1)],
)
@pytest.mark.parametrize("num_frames", [1, 4])
def test_the_concatenation_is_the_shift(direction: ShiftDirection, fraction: float, num_frames: int) -> None:
    shift = TemporalShift(num_frames, fraction, direction)
    x = torch.randn(2 * num_frames, 8, 3, 2)
    assert torch.equal(ConcatenatedShift(shift)(x), shift(x))


def test_two_frames_by_hand() -> None:
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, :, None, None]
    both, past = (ConcatenatedShift(TemporalShift(2, 0.25, direction))(x)[..., 0, 0] for direction in ("both", "past"))
    assert both.tolist() == [[5, 0, 3, 4], [0, 2, 7, 8]]
    assert past.tolist() == [[0, 2, 3, 4], [1, 6, 7, 8]]


@torch.inference_mode()
def test_the_clips_graph_is_the_network_and_leaves_it_as_it_is() -> None:
    network = build_model("tsm", "resnet18", 3, 5, width=0.125).eval()
    before = repr(network)
    graph = clip_graph(network, 2, 48, 32)
    assert {name: value.shape for name, value in graph.inputs.items()} == {"clip": (2, 3, 3, 48, 32)}
    assert graph.outputs == ("logits",)
    assert not any(isinstance(module, TemporalShift) for module in graph.module.modules())
    clip = torch.randn(2, 3, 3, 48, 32)
    assert torch.equal(graph.module(clip), network(clip))
    assert repr(network) == before


@torch.inference_mode()
def test_a_stream_without_the_caches_of_no_channel() -> None:
    network = build_model("tsm", "resnet18", 3, 5, width=0.125, shift_direction="past", shift_fraction=0.1).eval()
    graph = stream_graph(network, 2, 48, 32)
    # Of 8, 8, 8, 16, 16, 32, 32, 64 channels a tenth; the first three shifts move nothing.
    caches = [(2, 1, 6, 4), (2, 1, 6, 4), (2, 3, 3, 2), (2, 3, 3, 2), (2, 6, 2, 1)]
    shapes = {"frame": (2, 3, 48, 32)} | {f"cache_in_{number}": shape for number, shape in enumerate(caches)}
    assert {name: tuple(value.shape) for name, value in graph.inputs.items()} == shapes
    assert graph.outputs == ("logits", *(f"cache_out_{number}" for number in range(5)))
    stream, frames, before = StreamNetwork(network), torch.randn(3, 2, 3, 48, 32), list(graph.inputs.values())[1:]
    theirs: list[torch.Tensor] = []
    for frame in frames:
        logits, *before = graph.module(frame, *before)
        wanted, theirs = stream(frame, theirs)
        assert torch.equal(logits, wanted)
    assert [tuple(cache.shape) for cache in before] == caches
