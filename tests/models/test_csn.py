"""ir-CSN: channels are separate in the 3x3x3s and meet in the 1x1x1s alone."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models import build_model
from tests.closeness import assert_near


def test_kernels_strides_and_groups_are_the_papers() -> None:
    """Tran et al., Table 1 and Figure 2 c."""
    with torch.device("meta"):
        model = build_model("ir_csn", None, 32)
    assert (model.conv1.kernel_size, model.conv1.stride) == ((3, 7, 7), (1, 2, 2))
    assert (model.maxpool.kernel_size, model.maxpool.stride) == ((1, 3, 3), (1, 2, 2))
    stages = [model.get_submodule(name) for name in model.blocks]
    assert [len(stage) for stage in stages] == [3, 8, 36, 3]
    for stage, (blocks, channels) in enumerate(zip(stages, (64, 128, 256, 512), strict=True)):
        for number, block in enumerate(blocks):
            stride = (2, 2, 2) if stage > 0 and number == 0 else (1, 1, 1)
            assert (block.conv2.in_channels, block.conv2.out_channels, block.conv2.groups) == (channels,) * 3
            assert (block.conv2.kernel_size, block.conv2.stride) == ((3, 3, 3), stride)
            assert block.conv1.kernel_size == block.conv3.kernel_size == (1, 1, 1)
            assert block.conv1.groups == block.conv3.groups == 1
            assert isinstance(block.downsample, nn.Sequential) == (number == 0)
            assert number or (block.downsample[0].kernel_size, block.downsample[0].stride) == ((1, 1, 1), stride)
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


def test_names_are_those_of_the_2d_network() -> None:
    with torch.device("meta"):
        flat, separated = build_model("tsn", "resnet152", 1).state_dict(), build_model("ir_csn", None, 8).state_dict()
    assert list(flat) == list(separated)
