"""The fused normalisation against PyTorch's operators one after the other, and its kernels against plain loops."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from summit_train.models import build_model
from summit_train.models.native import kernels
from summit_train.models.native.kernels import Stored
from summit_train.models.native.library import Kernels
from summit_train.models.norm import Norm2d, Norm3d
from summit_train.models.rolled import Roll, Stream, layout_of

pytestmark = pytest.mark.skipif(not isinstance(kernels.kernels(), Kernels), reason=f"no kernels: {kernels.kernels()}")
ROLL = Roll(4, 3, 2)


def frames(*shape: int, dtype: torch.dtype = torch.double, seed: int = 0) -> torch.Tensor:
    """Random numbers (N, C, H, W) or (N, C, T, H, W) around 3, channels last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.double, generator=generator) * 2 + 3
    return x.to(dtype).contiguous(memory_format=kernels.channels_last_of(x))


def norm(channels: int, dtype: torch.dtype = torch.double, dims: int = 2) -> Norm2d | Norm3d:
    layer = (Norm2d if dims == 2 else Norm3d)(channels).to(dtype)
    generator = torch.Generator().manual_seed(7)
    nn.init.uniform_(layer.weight, -1.5, 1.5, generator=generator)
    nn.init.uniform_(layer.bias, -0.5, 0.5, generator=generator)
    return layer


def results(
    layer: Norm2d | Norm3d, x: torch.Tensor, shortcut: torch.Tensor | None, what: str,
    before: Roll | None = None, after: Roll | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What comes out, all gradients, and the running statistics after it; of a sum both of its readers' gradients."""
    x = x.clone().requires_grad_()
    leaves: list[torch.Tensor] = []
    if what == "joined":
        assert shortcut is not None
        stored = Stored(shortcut, None) if before is None else before.stored(shortcut)
        leaves = [tensor.clone().requires_grad_() for tensor in stored if tensor is not None]
        frames, *ends = [leaf * 1 for leaf in leaves]
        # Something in front of them, as the plain way adds in place.
        stream = layer.joined(x * 1, Stream(frames, frames, *(ends or [None]), before), after)
        outs = [stream.frames, stream.beside, *([] if stream.ends is None else [stream.ends])]
    else:
        outs = [layer.rectified(x * 1) if what == "rectified" else layer(x * 1)]
    torch.autograd.backward([(out * weights(out, number)).sum() for number, out in enumerate(outs)])
    found = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    found |= {f"out {number}": out.detach() for number, out in enumerate(outs)}
    found |= {f"shortcut {number}": leaf.grad for number, leaf in enumerate(leaves)}
    found |= {f"running {name}": buffer for name, buffer in layer.named_buffers()}
    return found


def weights(out: torch.Tensor, number: int) -> torch.Tensor:
    """What the loss multiplies an output with, other for each."""
    return torch.linspace(-1, 1 + number, out.numel(), dtype=out.dtype).view(out.shape)


def assert_fused_is_plain(
    layer: Norm2d | Norm3d, x: torch.Tensor, shortcut: torch.Tensor | None, what: str, *rolls: Roll | None,
    rtol: float = 1e-9, atol: float = 1e-9,
) -> None:  # fmt: skip
    plain = copy.deepcopy(layer)
    plain.fused = False
    assert kernels.available(x) and layer.fused
    ours, theirs = results(layer, x, shortcut, what, *rolls), results(plain, x, shortcut, what, *rolls)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("what", ["normalised", "rectified", "joined"])
@pytest.mark.parametrize("shape", [(4, 5, 3, 2), (8, 64, 9, 7), (2, 3, 40, 41), (3, 130, 1, 1), (2, 6, 3, 5, 4)])
def test_values_gradients_and_statistics_are_pytorchs(shape: tuple[int, ...], what: str, training: bool) -> None:
    x, shortcut = frames(*shape), frames(*shape, seed=1) - 3
    layer = norm(shape[1], dims=len(shape) - 2)
    results(layer, x, shortcut, "normalised")  # so that there are running statistics
    layer.zero_grad()
    assert_fused_is_plain(layer.train(training), x, shortcut if what == "joined" else None, what)


@pytest.mark.parametrize(("before", "after"), list(itertools.product([None, ROLL, Roll(4, 0, 7)], repeat=2)))
def test_rolled_in_time(before: Roll | None, after: Roll | None) -> None:
    x, shortcut = frames(12, 9, 5, 3), frames(12, 9, 5, 3, seed=1)
    assert_fused_is_plain(norm(9), x, shortcut, "joined", before, after)


@settings(deadline=None, max_examples=40)
@given(
    clips=st.integers(1, 3), num_frames=st.integers(1, 5), channels=st.integers(1, 40), side=st.integers(1, 9),
    from_next=st.integers(0, 20), from_previous=st.integers(0, 20), threads=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_and_roll(
    clips: int, num_frames: int, channels: int, side: int, from_next: int, from_previous: int, threads: int
) -> None:
    roll = Roll(num_frames, min(from_next, channels // 2), min(from_previous, channels // 2))
    shape = (clips * num_frames, channels, side + 1, side)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_fused_is_plain(norm(channels), frames(*shape), frames(*shape, seed=1), "joined", roll, roll)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_activations_go_past_the_caches_and_are_the_same(threads: int) -> None:
    """Above 4 MiB results are written past the caches; three threads' shares do not fit into the rows."""
    shape = (8, 96, 33, 35)
    x, shortcut = frames(*shape), frames(*shape, seed=1)
    assert x.numel() * 8 > 1 << 22
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_fused_is_plain(norm(96), x, shortcut, "joined", Roll(4, 16, 8), Roll(4, 16, 8))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("what", ["normalised", "rectified", "joined"])
def test_narrow_types_are_as_near_as_pytorchs(what: str, dtype: torch.dtype, tolerance: float) -> None:
    """Against the same in double. bf16 gradients are sums of thousands of rounded numbers: their norm is compared."""
    x, shortcut = frames(8, 32, 28, 28, dtype=dtype), frames(8, 32, 28, 28, dtype=dtype, seed=1)
    layer = norm(32, torch.float32)
    wide = copy.deepcopy(layer).double()
    other = shortcut if what == "joined" else None
    ours = results(layer, x, other, what, ROLL if other is not None else None, None)
    exact = results(
        wide, x.double(), None if other is None else other.double(), what, ROLL if other is not None else None, None
    )
    assert ours["out 0"].dtype == dtype and ours["weight"].dtype == torch.float32
    for name, value in ours.items():
        far = (value.double() - exact[name].double()).norm() / exact[name].double().norm().clamp_min(1e-9)
        assert far < tolerance, name


def test_a_variance_that_is_small_beside_the_mean_is_exact() -> None:
    x = frames(8, 4, 30, 30, dtype=torch.float32) * 1e-3 + 1000
    layer = norm(4, torch.float32)
    out = layer(x)
    expected = nn.functional.batch_norm(x.double(), None, None, layer.weight.double(), layer.bias.double(), True)
    # A step of fp32 at 1000 is 6e-5, 260 standard deviations of that make 0.02; sums of plain numbers would give 1.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05)


def test_nan_infinity_and_zero() -> None:
    layer = norm(2, torch.float32).eval()
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).repeat(2).view(1, 4, 2, 1).permute(0, 2, 1, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(layer)
    plain.fused = False
    for channel in (0, 1):
        assert torch.equal(layer.rectified(x)[:, channel].isnan(), plain.rectified(x)[:, channel].isnan())
    torch.testing.assert_close(layer.rectified(x), plain.rectified(x), equal_nan=True)


@pytest.mark.parametrize("number", [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-9), 3.4e38, 1e-40, float("nan")])
def test_bf16_is_rounded_as_pytorch_rounds(number: float) -> None:
    """Running statistics 0 and 1 - eps let numbers through: the bias, wide, plus a bf16 zero."""
    layer = Norm2d(1).eval()
    nn.init.constant_(layer.bias, number)
    x = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    expected = torch.tensor(number).to(torch.bfloat16)
    torch.testing.assert_close(layer(x)[0, 0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_frozen_weights_and_input_get_no_gradient() -> None:
    layer, x = norm(3).requires_grad_(False), frames(4, 3, 4, 4)
    shortcut = frames(4, 3, 4, 4, seed=1).requires_grad_()
    layer.joined(x, Stream(shortcut, shortcut)).frames.sum().backward()
    assert x.grad is None and layer.weight.grad is None and shortcut.grad is not None


def test_what_the_kernels_do_not_take_goes_pytorchs_way() -> None:
    layer = norm(4, torch.float32)
    rows = torch.randn(4, 4, 6, 5)
    assert not kernels.available(rows)  # channels first
    assert not kernels.available(frames(2, 4, 3, 3).to("meta"))
    assert not kernels.available(frames(2, 4, 3, 3).to(torch.float16))
    torch.testing.assert_close(layer(rows), nn.functional.batch_norm(rows, None, None, layer.weight, layer.bias, True))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 4, 1, 1))


def test_a_running_mean_of_all_batches() -> None:
    """momentum=None: the mean over all batches."""
    layer, plain = Norm2d(3).double(), nn.BatchNorm2d(3, momentum=None).double()
    layer.momentum = None
    for seed in range(3):
        x = frames(4, 3, 5, 5, seed=seed)
        layer(x), plain(x)
    torch.testing.assert_close(layer.running_var, plain.running_var)
    assert layer.num_batches_tracked == 3


def test_the_same_bits_twice() -> None:
    x, shortcut = frames(8, 32, 20, 20, dtype=torch.float32), frames(8, 32, 20, 20, dtype=torch.float32, seed=1)
    once, again = (results(norm(32, torch.float32), x, shortcut, "joined", ROLL, ROLL) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("arch", ["tsm", "tsn", "i3d_3x3x3"])
def test_whole_networks(arch: str) -> None:
    num_frames = 16
    model = build_model(arch, "resnet18", num_frames, 3, width=0.25).double().train()
    model = model.to(memory_format=model.memory_format)
    plain = copy.deepcopy(model)
    plain.unfuse()
    clip = torch.randn(2, num_frames, 40, 32, 3, dtype=torch.double).permute(0, 1, 4, 2, 3)
    for network in (model, plain):
        network(clip).square().sum().backward()
    torch.testing.assert_close(model(clip), plain(clip), rtol=1e-9, atol=1e-9)
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-7, atol=1e-9)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("readers", [["frames"], ["beside"], ["ends"], ["beside", "ends"]])
def test_with_some_of_the_readers(readers: list[str]) -> None:
    """A gradient that nobody asked for is none, not an activation of zeros."""
    layer, x, shortcut = norm(9), frames(12, 9, 5, 3), frames(12, 9, 5, 3, seed=1) - 3
    plain = copy.deepcopy(layer)
    plain.fused = False
    grads = []
    for either in (layer, plain):
        leaf = x.clone().requires_grad_()
        stream = either.joined(leaf * 1, Stream(shortcut.clone(), shortcut.clone()), ROLL)
        outs = [getattr(stream, reader) for reader in readers]
        torch.autograd.backward([(out * weights(out, number)).sum() for number, out in enumerate(outs)])
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations([None, ROLL, Roll(4, 0, 7)], 2)))
def test_moved_against_a_loop(before: Roll | None, after: Roll | None, stride: int) -> None:
    x = frames(8, 9, 7, 5)
    stored = Stored(x, None) if before is None else before.stored(x)
    ends = stored.ends
    if ends is not None:
        ends = ends[..., ::stride, ::stride].contiguous(memory_format=torch.channels_last)
    moved = kernels.moved(Stored(stored.frames, ends), layout_of(9, before, after), stride=stride)
    for clip, t, channel in itertools.product(range(2), range(4), range(9)):
        place = t + (0 if after is None else after.place_of(channel))
        there = moved.frames[clip * 4 + place, channel] if 0 <= place < 4 else moved.ends[clip, channel]
        assert torch.equal(there, x[clip * 4 + t, channel, ::stride, ::stride])
        if not 0 <= place < 4:
            assert not moved.frames[clip * 4 + place % 4, channel].any()


def test_ends_of_other_pixels_than_the_frames_are_refused() -> None:
    stored = ROLL.stored(frames(8, 9, 7, 5))
    with pytest.raises(ValueError, match=r"ends of \(7, 5\) pixels beside frames of \(4, 3\)"):
        ROLL.restored(*stored, stride=2)


def test_moved_without_ends_they_are_zeros() -> None:
    stored = ROLL.stored(frames(8, 9, 7, 5))
    moved = kernels.moved(Stored(stored.frames, None), layout_of(9, ROLL, None)).frames
    expected = ROLL.restored(stored.frames, torch.zeros_like(stored.ends))
    assert torch.equal(moved, expected) and not moved[0, :3].any()
    assert kernels.moved(stored, layout_of(9, None, ROLL), ends_wanted=False).ends is None
