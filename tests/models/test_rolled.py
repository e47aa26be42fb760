"""A TSM whose stream is stored rolled against the same network whose blocks shift by a plain loop."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.models.resnet import Block, VideoResNet
from summit_train.models.rolled import Roll, Stream, join
from summit_train.models.shifted_conv import ShiftedConv2d
from tests.models.test_shift import plain
from tests.models.test_shifted_conv import by_loop

FORMATS = [torch.contiguous_format, torch.channels_last]


class ByLoop(nn.Module):
    """A shifted convolution as it is defined: one frame and one channel at a time, then the convolution."""

    def __init__(self, layer: ShiftedConv2d) -> None:
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_loop(self.layer, x, self.weight)


def network(backbone: str = "resnet50", num_frames: int = 4, **options: object) -> VideoResNet:
    generator = torch.Generator().manual_seed(0)
    model = build_model("tsm", backbone, num_frames, 3, width=0.25, generator=generator, **options)  # type: ignore[arg-type]
    for module in model.modules():  # Else every branch is normalised to the same size whatever it is.
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.uniform_(module.bias, -0.5, 0.5, generator=generator)
    return model.train()


def unrolled(model: VideoResNet) -> VideoResNet:
    """The same network with every frame in its place between blocks, each shifting by a plain loop."""
    twin = copy.deepcopy(model)
    twin.unroll()
    for block in (module for module in twin.modules() if isinstance(module, Block)):
        if isinstance(block.conv1, ShiftedConv2d):
            block.conv1 = ByLoop(block.conv1)
    return twin


def clips(num_frames: int, channels_last: bool = True, dtype: torch.dtype = torch.double) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, num_frames, 40, 32, 3, dtype=dtype, generator=generator).permute(0, 1, 4, 2, 3)
    return pixels if channels_last else pixels.contiguous()


def assert_same(model: VideoResNet, twin: VideoResNet, clip: torch.Tensor) -> None:
    """Logits, the gradients of all parameters and of the input, and BN's running statistics."""
    ours, theirs = clip.clone().requires_grad_(), clip.clone().requires_grad_()
    out, expected = model(ours), twin(theirs)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)
    others = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-8, atol=1e-10)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, twin.get_buffer(name), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("direction", ["both", "past"])
@pytest.mark.parametrize(("num_frames", "fraction"), [(1, 0.125), (2, 0.3), (3, 0.5), (5, 0.125)])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_whole_networks_equal_the_plain_loop(backbone: str, num_frames: int, fraction: float, direction: str) -> None:
    model = network(backbone, num_frames, shift_fraction=fraction, shift_direction=direction).double()
    assert_same(model, unrolled(model), clips(num_frames))


@pytest.mark.parametrize("channels_last", [True, False])
def test_where_only_every_second_block_shifts(channels_last: bool) -> None:
    """A residual ResNet-101: the stream is rolled in front of every second block alone."""
    model = network("resnet101").double()
    rolled = [block.after is not None for block in model.modules() if isinstance(block, Block)]
    assert rolled[:8] == [False, True, True, False, True, False, True, False]
    assert_same(model, unrolled(model), clips(4, channels_last))


def test_every_block_but_the_last_hands_on_a_rolled_stream() -> None:
    blocks = [module for module in network().modules() if isinstance(module, Block)]
    assert [block.after is not None for block in blocks] == [True] * 15 + [False]


def test_the_2d_network_and_the_shift_in_place_roll_nothing() -> None:
    for model in (build_model("tsn", "resnet18", 4), network(shift_place="in_place")):
        assert all(block.after is None for block in model.modules() if isinstance(block, Block))


def test_a_pool_in_time_between_two_stages_reads_a_tensor() -> None:
    model = build_model("i3d_3x1x1", "resnet50", 16, 3, width=0.125)
    assert model.pool2 is not None
    hands_on = [block.hands_on for block in model.modules() if isinstance(block, Block)]
    assert hands_on == [True] * 2 + [False] + [True] * 12 + [False]


@pytest.mark.parametrize("roll", [True, False])
def test_what_a_hooked_stage_gives_is_the_plain_networks(roll: bool) -> None:
    model, given = network().double(), []
    twin = unrolled(model)
    if not roll:
        for block in (module for module in model.modules() if isinstance(module, Block)):
            block.after = None
    model.layer2.register_forward_hook(lambda _module, _inputs, output: given.append(output.unrolled()))
    twin.layer2.register_forward_hook(lambda _module, _inputs, output: given.append(output))
    model(clips(4)), twin(clips(4))
    torch.testing.assert_close(given[0], given[1], rtol=1e-9, atol=1e-9)


def test_unrolled_every_convolution_is_called_as_a_module() -> None:
    model = network().double()
    expected = model(clips(4))
    model.unroll()
    called: list[str] = []
    convolutions = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    for name, module in convolutions:
        module.register_forward_hook(lambda _module, _inputs, _output, name=name: called.append(name))
    torch.testing.assert_close(model(clips(4)), expected, rtol=1e-9, atol=1e-9)
    assert sorted(called) == sorted(name for name, _ in convolutions)


def test_evaluation_without_gradients() -> None:
    model = network().double().eval()
    with torch.no_grad():
        torch.testing.assert_close(model(clips(4)), unrolled(model)(clips(4)), rtol=1e-10, atol=1e-10)


def test_two_passes_in_a_row_and_a_kept_graph() -> None:
    """Nothing that was saved is changed, so that the second backward pass of one graph equals the first."""
    model = network().double()
    loss = model(clips(4)).square().sum()
    weights = list(model.parameters())
    once = torch.autograd.grad(loss, weights, retain_graph=True)
    again = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, once, again))


def test_recomputed_blocks_give_the_same_bits() -> None:
    kept, recomputed = network().double(), network(recompute=True).double()
    for model in (kept, recomputed):
        model(clips(4)).square().sum().backward()
    assert all(map(torch.equal, (p.grad for p in kept.parameters()), (p.grad for p in recomputed.parameters())))


def test_with_frozen_weights_the_input_still_has_its_gradient() -> None:
    model = network().double().requires_grad_(False)
    ours, theirs = clips(4).requires_grad_(), clips(4).requires_grad_()
    model(ours).square().sum().backward()
    unrolled(model)(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("frozen", ["layer1", "layer3"])
def test_with_frozen_first_stages_the_others_still_have_theirs(frozen: str) -> None:
    model = network().double()
    for name, parameter in model.named_parameters():
        if name.split(".")[0] <= frozen:  # bn1, conv1, fc, layer1 ..
            parameter.requires_grad_(False)
    twin = unrolled(model)
    for either in (model, twin):
        either(clips(4)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)


def test_bf16_differs_from_fp32_no_more_than_the_plain_loop_does() -> None:
    model = network().float()
    # Not the small clips: oneDNN's bf16 convolution of 128 channels of 3 x 2 pixels reads memory that nobody wrote.
    twin, clip = unrolled(model), torch.randn(2, 4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    exact = twin(clip)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(clip), twin(clip)
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, True), (True, False)])
def test_a_junction_by_hand(before: bool, after: bool, memory_format: torch.memory_format) -> None:
    """Of one clip of 3 frames and 3 channels, one each way: frame and channel in the value."""
    roll = Roll(3, 1, 1)
    values = torch.arange(1.0, 10).view(3, 3, 1, 1).to(memory_format=memory_format)
    rolled = torch.tensor([[4.0, 0, 3], [7, 2, 6], [0, 5, 9]]).view(3, 3, 1, 1)
    ends = torch.tensor([[1.0, 8]]).view(1, 2, 1, 1)
    shortcut = (rolled.clone(), ends.clone()) if before else (values.clone(), None)
    out, out_ends = join(values.clone(), *shortcut, roll if before else None, roll if after else None)
    assert torch.equal(out, 2 * (rolled if after else values))
    assert torch.equal(out_ends, 2 * ends) if after else out_ends is None
    assert torch.equal(Stream(rolled, rolled, ends, roll).unrolled(), values)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.double, torch.float16])  # Kernels know the first alone.
@pytest.mark.parametrize(("from_next", "from_previous"), [(2, 2), (0, 3), (4, 1), (1, 0)])
def test_stored_it_is_a_shift_that_loses_nothing(
    from_next: int, from_previous: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    x = torch.randn(10, 9, 4, 3, dtype=dtype).to(memory_format=memory_format)
    roll, before = Roll(5, from_next, from_previous), x.clone()
    frames, ends = roll.stored(x)
    assert torch.equal(frames, roll.shifted(x))
    for clip, channel in itertools.product(range(2), range(9)):
        here, stored = x[clip * 5 : clip * 5 + 5, channel], frames[clip * 5 : clip * 5 + 5, channel]
        zero = torch.zeros_like(here[:1])
        if channel < from_next:
            assert torch.equal(stored, torch.cat([here[1:], zero]))
            assert torch.equal(ends[clip, channel], here[0])
        elif channel < from_next + from_previous:
            assert torch.equal(stored, torch.cat([zero, here[:-1]]))
            assert torch.equal(ends[clip, channel], here[-1])
        else:
            assert torch.equal(stored, here)
    assert torch.equal(roll.restored(frames, ends), x)
    assert torch.equal(roll.restored(frames, ends[..., ::2, ::2], stride=2), x[..., ::2, ::2])
    assert torch.equal(x, before)


def test_as_many_channels_each_way_it_is_the_papers_shift() -> None:
    x = torch.randn(10, 9, 4, 3)
    assert torch.equal(Roll(5, 2, 2).shifted(x), plain(x, 5, 2, "both"))
    assert torch.equal(Roll(5, 0, 2).shifted(x), plain(x, 5, 2, "past"))


def test_the_gradient_of_what_fell_out_is_that_of_its_values() -> None:
    """relu lets some of the ends through: their zeros' signs tell which."""
    roll, x = Roll(3, 2, 1), torch.randn(6, 4, 5, 3, dtype=torch.double)
    branch = x.clone().requires_grad_()
    frames, ends = join(branch * 1, torch.zeros_like(x), None, None, roll)
    assert torch.equal(frames[5, 0].signbit(), ends[1, 0] <= 0) and (frames[5, 0] == 0).all()
    ends.sum().backward()
    expected = torch.zeros_like(x)
    expected[[0, 3], :2], expected[[2, 5], 2:3] = 1, 1
    assert torch.equal(branch.grad, expected * (x > 0))


@pytest.mark.slow
def test_compiled_the_network_is_the_same() -> None:
    model = network("resnet18", 2).float()
    twin, clip = unrolled(model), clips(2, dtype=torch.float32)
    compiled = torch.compile(copy.deepcopy(model).body)
    frames = clip.flatten(0, 1)
    torch.testing.assert_close(compiled(frames), twin.body(frames), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    model = network().double()
    expected = model(clips(4))
    twin = copy.deepcopy(model).cuda()
    assert_same(twin, unrolled(twin), clips(4).cuda())
    torch.testing.assert_close(twin(clips(4).cuda()).cpu(), expected, rtol=1e-9, atol=1e-9)
