"""ir-CSN and X3D-M: channels are separate in the 3x3x3s; tests/models/test_count.py has their sizes."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models import build_model
from summit_train.models.x3d import SqueezeExcitation
from tests.closeness import assert_near


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
