"""The temporal shift against a plain loop over frames and channels."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradgradcheck

from summit_train.models.shift import num_shifted_channels, temporal_shift

# Two clips of T frames with C channels: odd channels, T = 1, no channel shifted, all of them shifted.
SHAPES = [(1, 8, 0.125), (2, 5, 0.2), (3, 7, 0.25), (4, 9, 0.5), (4, 16, 0.125), (8, 3, 0.1), (5, 6, 0.5)]
# Views of (8, 16, 4, 6) that are not contiguous.
VIEWS = {
    "channel step": lambda x: x[:, ::2],
    "crop": lambda x: x[..., 1:],
    "transposed": lambda x: x.transpose(2, 3),
    "expanded": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "frame step": lambda x: x[::2],
}


def shifted_by_hand(x: torch.Tensor, num_frames: int, fold: int, direction: str) -> torch.Tensor:
    """The definition, one frame and one channel at a time."""
    clips = x.reshape(-1, num_frames, *x.shape[1:])
    sources = (1, -1) if direction == "both" else (-1,)
    rows = []
    for t in range(num_frames):
        for c in range(x.shape[1]):
            source = t + sources[c // fold] if c < len(sources) * fold else t
            inside = 0 <= source < num_frames
            rows.append(clips[:, source, c] if inside else torch.zeros_like(clips[:, 0, c]))
    out = torch.stack(rows, dim=1)
    return out.reshape(x.shape)


@pytest.mark.parametrize("direction", ["both", "past"])
@pytest.mark.parametrize(("num_frames", "channels", "fraction"), SHAPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_forward_and_gradient_equal_the_plain_loop(
    num_frames: int, channels: int, fraction: float, direction: str, memory_format: torch.memory_format
) -> None:
    x = torch.randn(2 * num_frames, channels, 3, 2, dtype=torch.double).to(memory_format=memory_format)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(x.shape, dtype=torch.double)  # the gradient's format is not always that of x
    fold = num_shifted_channels(channels, fraction)
    out = temporal_shift(ours, num_frames, fraction, direction)
    expected = shifted_by_hand(theirs, num_frames, fold, direction)
    assert torch.equal(out, expected) and out.stride() == x.stride()
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("direction", ["both", "past"])
@pytest.mark.parametrize("num_frames", [1, 4])
def test_the_second_gradient(num_frames: int, direction: str) -> None:
    x = torch.randn(num_frames, 5, 2, 2, dtype=torch.double, requires_grad=True)
    assert gradgradcheck(lambda x: temporal_shift(x, num_frames, 0.4, direction).pow(3), x)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_non_contiguous_input(view: object) -> None:
    x = view(torch.randn(8, 16, 4, 6))  # type: ignore[operator]
    before = x.clone()
    fold = num_shifted_channels(x.shape[1], 0.25)
    assert torch.equal(temporal_shift(x, 4, 0.25), shifted_by_hand(x, 4, fold, "both"))
    assert torch.equal(x, before)


def test_under_autocast_the_type_stays_what_the_convolution_gave() -> None:
    convolution = torch.nn.Conv2d(3, 8, 1)
    with torch.autocast("cpu", torch.bfloat16):
        x = convolution(torch.randn(4, 3, 5, 5))
        out = temporal_shift(x, 4)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, shifted_by_hand(x, 4, 1, "both"))
    out.float().sum().backward()
    assert convolution.weight.grad is not None


def test_channels_are_counted_as_meant_in_decimals() -> None:
    meant = {(64, 0.125): 8, (100, 0.29): 29, (10, 0.3): 3, (7, 0.5): 3, (7, 0.125): 0}
    assert {pair: num_shifted_channels(*pair) for pair in meant} == meant
