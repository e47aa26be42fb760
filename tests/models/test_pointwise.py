"""A 1x1 convolution as a matrix product against the convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from summit_train.models.pointwise import POINTWISE, Conv2d, Geometry, convolve, gradients


def frames(dtype: torch.dtype, memory_format: torch.memory_format = torch.channels_last) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 32, 9, 7, generator=generator).to(dtype).to(memory_format=memory_format)


def products(layer: nn.Module, x: torch.Tensor) -> set[str]:
    """The operators that multiplied."""
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return {str(operator) for operator in counter.get_flop_counts()["Global"]}


@pytest.mark.parametrize("autocast", [True, False])
def test_values_and_gradients_are_the_convolutions(autocast: bool) -> None:
    layer = Conv2d(32, 48, 1, bias=False) if autocast else Conv2d(32, 48, 1, bias=False).bfloat16()
    twin = nn.Conv2d(32, 48, 1, bias=False).double()
    twin.load_state_dict(layer.state_dict())
    x = frames(torch.bfloat16).requires_grad_()
    exact = x.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert products(layer, x) == {"aten.mm"}
        out = layer(x)
    assert out.dtype == torch.bfloat16 and out.is_contiguous(memory_format=torch.channels_last)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(upstream.contiguous(memory_format=torch.channels_last))
    twin(exact).backward(upstream.double())
    assert layer.weight.grad.shape == layer.weight.shape and x.grad.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in [(x.grad, exact.grad), (layer.weight.grad, twin.weight.grad), (out, twin(exact))]:
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()  # bf16 has 8 bits: 0.004


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kernel", "geometry"), [(1, POINTWISE), (3, Geometry((2, 2), (1, 1)))])
def test_gradients_are_autograds(
    kernel: int, geometry: Geometry, dtype: torch.dtype, wanted: tuple[bool, bool]
) -> None:
    x = frames(dtype)
    weight = (torch.randn(16, 32, kernel, kernel, generator=torch.Generator().manual_seed(1)) / 32).to(dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
    out = nn.functional.conv2d(*leaves, None, *geometry)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    grad = grad.contiguous(memory_format=torch.channels_last)
    near = 0.01 if dtype == torch.bfloat16 else 1e-12
    assert (convolve(x, weight, geometry) - out).norm() < near * out.norm()
    expected = torch.autograd.grad(out, leaves, grad.double())
    for asked, ours, theirs in zip(wanted, gradients(grad, x, weight, geometry, wanted), expected, strict=True):
        assert (ours is not None) == asked
        if ours is not None:
            assert ours.dtype == dtype and ours.shape == theirs.shape
            assert (ours - theirs).norm() < near * theirs.norm()


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (Conv2d(32, 8, 1, bias=False), frames(torch.float32)),
        (Conv2d(32, 8, 1, bias=False).bfloat16(), frames(torch.bfloat16, torch.contiguous_format)),
        (Conv2d(32, 8, 1, stride=2, bias=False).bfloat16(), frames(torch.bfloat16)),
        (Conv2d(32, 8, 3, bias=False).bfloat16(), frames(torch.bfloat16)),
        (Conv2d(32, 8, 1, padding=1, bias=False).bfloat16(), frames(torch.bfloat16)),
        (Conv2d(32, 8, 1).bfloat16(), frames(torch.bfloat16)),
    ],
    ids=["fp32", "channels first", "stride", "3x3", "padding", "bias"],
)
def test_all_else_is_left_to_the_convolution(layer: Conv2d, x: torch.Tensor) -> None:
    twin = nn.Conv2d(32, 8, layer.kernel_size, layer.stride, layer.padding, bias=layer.bias is not None).to(x.dtype)
    twin.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert products(layer, x) == {"aten.convolution"}
    assert torch.equal(layer(x), twin(x))
