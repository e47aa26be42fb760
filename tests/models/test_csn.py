"""ir-CSN: channels are separate in the 3x3x3s and meet in the 1x1x1s alone."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models import build_model
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
