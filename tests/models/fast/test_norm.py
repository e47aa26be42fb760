"""The fused normalisation against PyTorch's operators one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from summit_train.models.fast import kernels
from summit_train.models.fast.kernels import Kernels
from summit_train.models.fast.norm import FusedNorm
from tests.closeness import assert_near

pytestmark = pytest.mark.skipif(not isinstance(kernels.loaded(), Kernels), reason=f"no kernels: {kernels.loaded()}")
WHAT = ["normalised", "rectified", "joined"]


def frames(*shape: int, dtype: torch.dtype = torch.double, seed: int = 0) -> torch.Tensor:
    """Random numbers (N, C, H, W) or (N, C, T, H, W) around 3, channels last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.double, generator=generator) * 2 + 3
    return kernels.channels_last(x.to(dtype))


def norm(channels: int, dtype: torch.dtype = torch.double, dims: int = 2) -> nn.Module:
    layer = (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(channels).to(dtype)
    generator = torch.Generator().manual_seed(7)
    nn.init.uniform_(layer.weight, -1.5, 1.5, generator=generator)
    nn.init.uniform_(layer.bias, -0.5, 0.5, generator=generator)
    return layer


def fused(layer: nn.Module, what: str = "normalised") -> FusedNorm:
    """A fused twin with parameters and buffers of its own."""
    return FusedNorm(copy.deepcopy(layer), relu=what != "normalised")


def applied(layer: nn.Module, x: torch.Tensor, shortcut: torch.Tensor | None, what: str) -> torch.Tensor:
    """The layer with what follows it, by its own means where it is fused."""
    if isinstance(layer, FusedNorm):
        return layer(x) if shortcut is None else layer(x, shortcut)
    out = layer(x)
    out = out if shortcut is None else out + shortcut
    return torch.relu(out) if what != "normalised" else out


def results(layer: nn.Module, x: torch.Tensor, shortcut: torch.Tensor | None, what: str) -> dict[str, torch.Tensor]:
    """What comes out, all gradients, and the running statistics after it."""
    x = x.clone().requires_grad_()
    shortcut = None if shortcut is None else shortcut.clone().requires_grad_()
    out = applied(layer, x * 1, None if shortcut is None else shortcut * 1, what)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    if shortcut is not None:
        found["shortcut"] = shortcut.grad
    return found | {f"running {name}": buffer for name, buffer in layer.named_buffers()}


def assert_fused_is_plain(layer: nn.Module, x: torch.Tensor, shortcut: torch.Tensor | None, what: str) -> None:
    ours, theirs = results(fused(layer, what), x, shortcut, what), results(copy.deepcopy(layer), x, shortcut, what)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # A gradient through a norm of few numbers is 0 but for rounding: beside it stands what is normalised.
        assert_near(value, theirs[name], 1e-9, name, beside=theirs["out"])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("shape", [(4, 5, 3, 2), (8, 64, 9, 7), (2, 3, 40, 41), (3, 130, 1, 1), (2, 6, 3, 5, 4)])
def test_values_gradients_and_statistics_are_pytorchs(shape: tuple[int, ...], what: str, training: bool) -> None:
    x, shortcut = frames(*shape), frames(*shape, seed=1) - 3
    layer = norm(shape[1], dims=len(shape) - 2)
    layer(x)  # so that there are running statistics
    assert_fused_is_plain(layer.train(training), x, shortcut if what == "joined" else None, what)


# Above 4 MiB results are written past the caches; three threads' shares do not fit into the rows.
@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(2, 10), st.integers(1, 9)),
    threads=st.integers(1, 3),
    what=st.sampled_from(WHAT),
)
@example(shape=(8, 96, 33, 35), threads=1, what="joined")
@example(shape=(8, 96, 33, 35), threads=3, what="joined")
def test_any_shape(shape: tuple[int, ...], threads: int, what: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shortcut = frames(*shape, seed=1) if what == "joined" else None
        assert_fused_is_plain(norm(shape[1]), frames(*shape), shortcut, what)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("what", WHAT)
def test_narrow_types_are_as_near_as_pytorchs(what: str, dtype: torch.dtype, tolerance: float) -> None:
    """Against the same in double. bf16 gradients are sums of thousands of rounded numbers: their norm is compared."""
    x = frames(8, 32, 28, 28, dtype=dtype)
    shortcut = frames(8, 32, 28, 28, dtype=dtype, seed=1) if what == "joined" else None
    layer = norm(32, torch.float32)
    ours, again = (results(fused(layer, what), x, shortcut, what) for _ in range(2))
    assert all(torch.equal(again[name], value) for name, value in ours.items())
    wide_shortcut = None if shortcut is None else shortcut.double()
    exact = results(copy.deepcopy(layer).double(), x.double(), wide_shortcut, what)
    assert ours["out"].dtype == dtype and ours["weight"].dtype == torch.float32
    for name, value in ours.items():
        far = (value.double() - exact[name].double()).norm() / exact[name].double().norm().clamp_min(1e-9)
        assert far < tolerance, name


def test_a_variance_that_is_small_beside_the_mean_is_exact() -> None:
    x = frames(8, 4, 30, 30, dtype=torch.float32) * 1e-3 + 1000
    layer = fused(norm(4, torch.float32))
    out = layer(x)
    expected = nn.functional.batch_norm(x.double(), None, None, layer.weight.double(), layer.bias.double(), True)
    # A step of fp32 at 1000 is 6e-5, 260 standard deviations of that make 0.02; sums of plain numbers would give 1.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05)


def test_nan_infinity_and_zero() -> None:
    plain = norm(2, torch.float32).eval()
    layer = fused(plain, "rectified")
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).repeat(2).view(1, 4, 2, 1).permute(0, 2, 1, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    expected = torch.relu(plain(x))
    assert torch.equal(layer(x).isnan(), expected.isnan())
    torch.testing.assert_close(layer(x), expected, equal_nan=True)


@pytest.mark.parametrize("what", ["rectified", "joined"])
def test_an_infinite_gradient_stops_where_relu_is_off(what: str) -> None:
    plain = norm(2, torch.float32).eval()
    x = torch.full((1, 2, 2, 2), -5.0).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = 5.0
    shortcut = torch.zeros_like(x) if what == "joined" else None
    grad = torch.tensor([float("inf"), -float("inf"), 1.0, -1.0]).view(1, 1, 2, 2).expand(1, 2, 2, 2)
    found = []
    for layer in (fused(copy.deepcopy(plain), what), plain):
        given = x.clone().requires_grad_()
        out = layer(given) if layer is plain else layer(given, *([] if shortcut is None else [shortcut]))
        out = torch.relu(out) if layer is plain else out
        found.append(torch.autograd.grad(out, given, grad)[0])
    assert torch.equal(*found) and 0 < found[0].isinf().sum() < grad.isinf().sum()


@pytest.mark.parametrize("number", [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-9), 3.4e38, 1e-40, float("nan")])
def test_bf16_is_rounded_as_pytorch_rounds(number: float) -> None:
    """Running statistics 0 and 1 - eps let numbers through: the bias, wide, plus a bf16 zero."""
    layer = FusedNorm(nn.BatchNorm2d(1).eval(), relu=False)
    nn.init.constant_(layer.bias, number)
    x = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    expected = torch.tensor(number).to(torch.bfloat16)
    torch.testing.assert_close(layer(x)[0, 0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_frozen_weights_and_input_get_no_gradient() -> None:
    layer, x = fused(norm(3), "joined").requires_grad_(False), frames(4, 3, 4, 4)
    shortcut = frames(4, 3, 4, 4, seed=1).requires_grad_()
    layer(x, shortcut).sum().backward()
    assert x.grad is None and layer.weight.grad is None and shortcut.grad is not None


def test_other_formats_and_types_are_taken_too() -> None:
    plain = norm(4, torch.float32)
    rows, shortcut = torch.randn(4, 4, 6, 5), torch.randn(4, 4, 6, 5)
    for dtype in (torch.float32, torch.float16):
        x, other = rows.to(dtype), shortcut.to(dtype)
        expected = torch.relu(copy.deepcopy(plain)(x) + other)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert_near(fused(plain, "joined")(x, other), expected, tolerance)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(plain)(torch.randn(1, 4, 1, 1))
