"""The shift in place and the convolution on shifted frames against a plain loop, and what is put back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from summit_train.models import build_model
from summit_train.models.fast import accelerate, kernels
from summit_train.models.fast.kernels import Group, Kernels
from summit_train.models.fast.shifted_conv import ShiftedConv2d
from summit_train.models.shift import TemporalShift, num_shifted_channels
from tests.closeness import assert_near
from tests.held import held_bytes
from tests.models.test_shift import SHAPES, VIEWS, shifted_by_hand
from tests.networks import clips


def convolution(
    channels: int, num_frames: int, fraction: float = 0.25, direction: str = "both", kernel: int = 1, stride: int = 1
) -> ShiftedConv2d:
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(channels, 4, kernel, stride, kernel // 2, bias=False)
    return ShiftedConv2d(plain, TemporalShift(num_frames, fraction, direction))


def by_loop(
    layer: ShiftedConv2d, x: torch.Tensor, weight: torch.Tensor, fraction: float = 0.25, direction: str = "both"
) -> torch.Tensor:
    """The definition: shift one frame and one channel at a time, then convolve."""
    shifted = shifted_by_hand(x, layer.num_frames, num_shifted_channels(x.shape[1], fraction), direction)
    return functional.conv2d(shifted, weight, None, layer.stride, layer.padding)


@pytest.mark.parametrize("direction", ["both", "past"])
@pytest.mark.parametrize(("num_frames", "channels", "fraction"), SHAPES)
@pytest.mark.parametrize(
    ("memory_format", "kernel", "stride"),
    [(torch.contiguous_format, 3, 2), (torch.channels_last, 3, 2), (torch.channels_last, 1, 1)],
)
def test_forward_and_gradients_equal_the_plain_loop(
    num_frames: int, channels: int, fraction: float, direction: str, memory_format: torch.memory_format,
    kernel: int, stride: int,
) -> None:  # fmt: skip
    layer = convolution(channels, num_frames, fraction, direction, kernel, stride).double()
    x = torch.randn(2 * num_frames, channels, 5, 4, dtype=torch.double).to(memory_format=memory_format)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    out, expected = layer(ours), by_loop(layer, theirs, weight, fraction, direction)
    assert_near(out, expected, 1e-13)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    assert_near(ours.grad, theirs.grad, 1e-13)
    assert_near(layer.weight.grad, weight.grad, 1e-13)
    assert torch.equal(ours, x)  # what was moved lies where it lay


def _with(layer: ShiftedConv2d, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


def test_a_convolution_that_fails_leaves_its_input() -> None:
    layer = convolution(8, 4)
    x = torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)  # lent itself, not a copy
    before = x.clone()
    with pytest.raises(RuntimeError, match="weight"):
        _with(layer, torch.zeros(4, 7, 1, 1), x)
    assert torch.equal(x, before)


def test_what_others_saved_of_the_input_is_still_accepted() -> None:
    """relu saves its result, which the convolution borrows; a shortcut reads it too."""
    layer = convolution(8, 4).double()
    x = torch.randn(8, 8, 3, 3, dtype=torch.double).to(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    active, expected_active = torch.relu(ours), torch.relu(theirs)
    (layer(active).sum() + active.square().sum()).backward()
    (by_loop(layer, expected_active, layer.weight).sum() + expected_active.square().sum()).backward()
    assert_near(ours.grad, theirs.grad, 1e-13)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_non_contiguous_input(view: object) -> None:
    x = view(torch.randn(8, 16, 4, 6))  # type: ignore[operator]
    before = x.clone()
    layer = convolution(x.shape[1], 4)
    assert_near(layer(x), by_loop(layer, x, layer.weight), 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        wide = convolution(8, 4).double()(torch.randn(4, 8, 3, 3, dtype=torch.double))
    assert wide.dtype == torch.double
    layer = convolution(16, 4)
    x = torch.randn(8, 16, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    reference = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        out, expected = layer(x), by_loop(layer, reference, weight)
    assert out.dtype == expected.dtype == dtype
    assert torch.equal(out, expected)
    out.float().sum().backward()
    expected.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert_near(layer.weight.grad, weight.grad, 2e-2)
    assert_near(x.grad, reference.grad, 2e-2)


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_autograd_saves_no_shifted_copy(backbone: str) -> None:
    """An accelerated TSM keeps its 2D twin's bytes; the plain one keeps a copy for each shift besides."""
    kept = {}
    for name, arch, fast in (("2d", "tsn", True), ("tsm", "tsm", True), ("plain", "tsm", False)):
        model = build_model(arch, backbone, 4, 3, width=0.25).train()
        if fast:
            accelerate(model)
        with held_bytes(model.parameters()) as held:
            logits = model(clips(1, 4, 64, 64).float())
        kept[name] = held[-1]
        assert logits.requires_grad
    assert kept["tsm"] == kept["2d"] < 0.97 * kept["plain"]


needs_kernels = pytest.mark.skipif(not isinstance(kernels.loaded(), Kernels), reason=f"no kernels: {kernels.loaded()}")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    clips=st.integers(1, 3),
    num_frames=st.integers(1, 5),
    channels=st.integers(2, 40),
    side=st.integers(1, 12),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    share=st.floats(0.05, 0.5),
)
def test_any_shape(
    clips: int, num_frames: int, channels: int, side: int, threads: int, dtype: torch.dtype, share: float
) -> None:
    fold = max(1, int(channels * share))
    groups = [Group(0, fold, 1), Group(fold, 2 * fold, -1)]
    x = torch.randn(clips * num_frames, channels, side, side + 1).to(dtype).to(memory_format=torch.channels_last)
    before, bits = x.clone(), x.clone()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ends = x.new_empty(clips, side, side + 1, 2 * fold)
        kernels.shift(x, num_frames, groups, ends)
        assert torch.equal(x, shifted_by_hand(before, num_frames, fold, "both"))
        kernels.shift(x, num_frames, groups, ends, restore=True)
        assert torch.equal(x, bits)
        kernels.shift(x, num_frames, groups)
        assert torch.equal(x, shifted_by_hand(before, num_frames, fold, "both"))
    finally:
        torch.set_num_threads(threads_before)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_and_negative_zero_come_back(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    x[1, 0], x[2, 1], x[0, 0], x[3, 1] = float("nan"), float("inf"), -0.0, float("nan")
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.clone().view(integers)
    groups = [Group(0, 1, 1), Group(1, 2, -1)]
    ends = x.new_empty(1, 3, 3, 2)
    kernels.shift(x, 4, groups, ends)
    kernels.shift(x, 4, groups, ends, restore=True)
    assert torch.equal(x.view(integers), bits)


@needs_kernels
def test_the_kernels_take_what_they_know() -> None:
    x = torch.zeros(1, 1, 1, 1)
    assert all(kernels.take(x.to(dtype)) for dtype in DTYPES)
    assert not kernels.take(x.to(torch.float16)) and not kernels.take(x.to("meta"))
