"""A 1x1 convolution as a matrix product against the convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from summit_train.models.pointwise import Conv2d


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
