"""SlowFast, ECO-lite, ir-CSN and X3D-M by hand; tests/models/test_count.py has their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.models import VideoNetwork, build_model
from summit_train.models.eco import Residuals
from summit_train.models.x3d import SqueezeExcitation
from tests.closeness import assert_near
from tests.models.test_build import GOLDEN
from tests.networks import random_network


def network() -> VideoNetwork:
    """A narrow network in double, in evaluation mode: frames meet in convolutions alone."""
    return random_network("slowfast", None, 16).double().eval()


def frames_that_reach(model: VideoNetwork, name: str, channels: slice = slice(None)) -> list[set[int]]:
    """For each frame of the module's input (N, C, T, H, W), the frames of the clip that change it."""
    seen: list[torch.Tensor] = []
    # A copy, since the relu behind a stem's norm works in place.
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    clip = torch.randn(1, model.num_frames, 3, 16, 16, dtype=torch.double)
    clips = [clip.clone() for _ in range(model.num_frames)]
    with torch.no_grad():
        model(clip)
        for t, other in enumerate(clips):
            other[:, t] += 1.0
            model(other)
    hook.remove()
    plain, *changed = (value[0, channels].movedim(1, 0) for value in seen)
    differs = [[not torch.equal(a, b) for a, b in zip(plain, other, strict=True)] for other in changed]
    return [{t for t, frames in enumerate(differs) if frames[place]} for place in range(len(plain))]


def test_which_frames_each_pathway_sees() -> None:
    """The slow one every 8th; the fast one's conv1 spans 5 frames, pool1 one."""
    model = network()
    assert frames_that_reach(model, "slow.conv1") == [{0}, {8}]
    # conv1 and res2 of the slow pathway have no kernel in time: its own channels come from these frames alone.
    assert frames_that_reach(model, "slow.layer1", slice(8)) == [{0}, {8}]
    expected = [set(range(max(0, t - 2), min(16, t + 3))) for t in range(16)]
    assert frames_that_reach(model, "fast.layer1") == expected


def test_laterals_bring_the_frames_around_each_slow_one() -> None:
    """The lateral spans frames 8 s - 2 .. 8 s + 2 of pool1, each of which spans 5 frames of the clip."""
    model = network()
    joined = frames_that_reach(model, "slow.layer1", slice(8, None))
    assert joined == [set(range(5)), set(range(4, 13))]


def test_a_lateral_by_hand() -> None:
    """out[s] = relu(norm(sum over k of w[k] fast[8 s + k - 2]))."""
    lateral = network().lateral1
    slow = torch.randn(2, 8, 3, 4, 4, dtype=torch.double)
    fast = torch.randn(2, 8, 24, 4, 4, dtype=torch.double)
    weight = lateral.conv.weight[..., 0, 0]
    assert weight.shape == (16, 8, 5)
    joined = lateral(slow, fast)
    assert joined.shape == (2, 24, 3, 4, 4)
    assert torch.equal(joined[:, :8], slow)
    for s in range(3):
        taps = [(k, 8 * s + k - 2) for k in range(5) if 8 * s + k - 2 >= 0]
        total = sum(torch.einsum("oc,nchw->nohw", weight[..., k], fast[:, :, t]) for k, t in taps)
        assert_near(joined[:, 8:, s], torch.relu(lateral.bn(total.unsqueeze(2)).squeeze(2)), 1e-12)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_lateral_feeds_the_slow_pathway(number: int) -> None:
    """Without the others and without the fast half of the classifier, frame 9 still reaches the logits through it."""
    model = network()
    with torch.no_grad():
        model.fc.weight[:, 256:] = 0.0
        for other in {1, 2, 3, 4} - {number}:
            model.get_submodule(f"lateral{other}").bn.weight.zero_()
    clip = torch.randn(1, 16, 3, 32, 32, dtype=torch.double)
    changed = clip.clone()
    changed[:, 9] += 1.0
    assert not torch.allclose(model(clip), model(changed))
    model.get_submodule(f"lateral{number}").bn.weight.data.zero_()
    assert torch.equal(model(clip), model(changed))


def test_the_classifier_takes_both_averages() -> None:
    model = network()
    ends: dict[str, torch.Tensor] = {}
    for pathway in ("slow", "fast"):
        last = model.get_submodule(f"{pathway}.layer4")
        last.register_forward_hook(lambda _m, _i, out, pathway=pathway: ends.update({pathway: out}))
    clip = torch.randn(2, 16, 3, 32, 32, dtype=torch.double)
    features = model.extract(model.to_input(clip))
    assert features.shape == (2, 256 + 32)
    assert (ends["slow"].shape[2], ends["fast"].shape[2]) == (2, 16)
    expected = torch.cat([ends[pathway].mean((2, 3, 4)) for pathway in ("slow", "fast")], 1)
    assert_near(features, expected, 1e-12)
    assert_near(model(clip), model.fc(features), 1e-12)


@pytest.mark.parametrize("x", [-3.0, 2.0])
@pytest.mark.parametrize("stride", [1, 2])
def test_sums_are_normalised_on_their_way_into_the_next_block_only(x: float, stride: int) -> None:
    """One pixel, kernels with nothing but a centre, norms that do nothing: a = -x, and twice x more with a stride."""
    stage = Residuals(1, 1, stride).double().eval()
    with torch.no_grad():
        for module in stage.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.zero_()[0, 0, 1, 1, 1] = 1.0
                module.bias.zero_()
            elif isinstance(module, nn.BatchNorm3d):
                module.eps = 0.0
        stage.a_2.weight[0, 0, 1, 1, 1] = -1.0
        stage.b_2.bias.fill_(5.0)
        if stride == 2:
            stage.a_down.weight[0, 0, 1, 1, 1] = 2.0
    a = -x if stride == 1 else -max(x, 0.0) + 2 * x
    expected = max(max(a, 0.0) + 5.0 + a, 0.0)
    found = stage(torch.full((1, 1, 1, 1, 1), x, dtype=torch.double))
    assert found.item() == expected


def test_frames_meet_in_the_3d_part_only() -> None:
    model = build_model("eco_lite", None, 4, 5, width=0.125).double().eval()
    clip = torch.randn(2, 4, 3, 32, 32, dtype=torch.double)
    other = clip.clone()
    other[0, 2] += 1.0
    assert torch.equal(model(clip)[1], model(other)[1])
    changed: list[list[bool]] = []

    def note(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        by_frame = output[:4] if output.dim() == 4 else output[0].transpose(0, 1)
        seen.append(by_frame.detach())

    for name in ("inception", "resnet.res3"):
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(note)
        model(clip)
        model(other)
        handle.remove()
        changed.append([not torch.equal(one, two) for one, two in zip(*seen, strict=True)])
    # Three 3x3x3 convolutions in a row reach three frames to each side.
    assert changed == [[False, False, True, False], [True, True, True, True]]


def test_joined_names_are_the_authors() -> None:
    """The golden list has the layers of the authors' ECO.yaml."""
    with torch.device("meta"):
        state = build_model("eco_lite", None, 16).state_dict()
    found = []
    for name, value in state.items():
        *parts, kind = name.removeprefix("resnet.").split(".")
        layer = ("" if name.startswith("resnet.") else "_").join(part for part in parts if part != "conv")
        shape = "x".join(map(str, value.shape))
        found.append(f"{layer}.{kind} {shape}".replace("1bn", "1_bn").rstrip())
    assert found == (GOLDEN / "eco_lite.txt").read_text().splitlines()


def test_convolutions_over_time_are_depthwise_and_norms_have_the_authors_epsilon() -> None:
    """Tran et al., Table 1 and Figure 2 c."""
    with torch.device("meta"):
        model = build_model("ir_csn", None, 32)
    for stage, channels in zip(model.sequences, (64, 128, 256, 512), strict=True):
        for number, block in enumerate(model.get_submodule(stage)):
            stride = (2, 2, 2) if stage != "layer1" and number == 0 else (1, 1, 1)
            assert block.conv2.groups == block.conv2.out_channels == channels
            assert (block.conv2.kernel_size, block.conv2.stride) == ((3, 3, 3), stride)
            assert block.conv1.kernel_size == block.conv3.kernel_size == (1, 1, 1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm3d)]
    assert len(norms) == 1 + 3 * 50 + 4 and {norm.eps for norm in norms} == {1e-3}
    assert not any(isinstance(module, nn.Conv2d | nn.BatchNorm2d) for module in model.modules())


def test_a_channel_of_a_3x3x3_sees_itself_alone() -> None:
    model = build_model("ir_csn", None, 8, 5, width=0.125, generator=torch.Generator().manual_seed(0))
    conv = model.layer1[0].conv2
    x = torch.randn(1, 8, 4, 5, 5)
    changed = x.clone()
    changed[:, 3, 1, 2, 2] += 1.0
    difference = (conv(changed) - conv(x)).detach()
    assert [channel for channel in range(8) if difference[0, channel].any()] == [3]
    # The kernel, turned around, in frames 0 to 2 and the pixels about (2, 2).
    expected = torch.zeros(4, 5, 5)
    expected[:3, 1:4, 1:4] = conv.weight[3, 0].flip(0, 1, 2).detach()
    # Of the convolutions' results the difference is taken: both are rounded.
    assert_near(difference[0, 3], expected, 1e-6, beside=conv(x))


def test_every_second_block_has_squeeze_excitation() -> None:
    with torch.device("meta"):
        model = build_model("x3d_m", None, 16)
    for name, squeezed in zip(model.sequences, (8, 8, 16, 32), strict=True):
        for number, block in enumerate(model.get_submodule(name)):
            assert isinstance(block.se, SqueezeExcitation) == (number % 2 == 0)
            assert number % 2 or block.se.fc1.out_channels == squeezed


def test_a_block_by_hand() -> None:
    """1x1x1, norm, relu; depthwise, norm, gate, swish; 1x1x1, norm; the sum, relu. A norm at evaluation scales."""
    model = build_model("x3d_m", None, 3, 5, width=0.34, generator=torch.Generator().manual_seed(0))
    block = model.double().eval().layer1[0]
    x = torch.randn(2, 8, 3, 6, 6, dtype=torch.double)
    scale = (1 + 1e-5) ** -0.5
    branch = torch.relu(torch.einsum("oc,ncthw->nothw", block.conv1.weight[..., 0, 0, 0], x) * scale)
    branch = block.conv2(branch) * scale
    gate = branch.mean((2, 3, 4))
    gate = torch.relu(gate @ block.se.fc1.weight.flatten(1).T + block.se.fc1.bias)
    gate = torch.sigmoid(gate @ block.se.fc2.weight.flatten(1).T + block.se.fc2.bias)
    branch = branch * gate[..., None, None, None]
    branch = branch * torch.sigmoid(branch)
    branch = torch.einsum("oc,ncthw->nothw", block.conv3.weight[..., 0, 0, 0], branch) * scale
    shortcut = torch.einsum("oc,ncthw->nothw", block.downsample[0].weight[..., 0, 0, 0], x[..., ::2, ::2]) * scale
    assert_near(block(x), torch.relu(branch + shortcut), 1e-12)


def test_the_average_stands_between_conv5_and_fc1() -> None:
    model = build_model("x3d_m", None, 2, 5, width=0.34).double().eval()
    seen: list[torch.Tensor] = []
    model.layer4.register_forward_hook(lambda _m, _i, out: seen.append(out))
    features = model.extract(torch.randn(2, 3, 2, 64, 64, dtype=torch.double))
    pooled = torch.relu(model.bn5(model.conv5(seen[0]))).mean((2, 3, 4))
    assert_near(features, torch.relu(pooled @ model.fc1.weight.flatten(1).T), 1e-12)
