"""ir-CSN (Tran et al., "Video classification with channel-separated convolutional networks", 2019)."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models.i3d import inflate_norms, inflated
from summit_train.models.resnet import Bottleneck, ResNet


class IrCSN(ResNet):
    """A 3D ResNet of bottlenecks with a depthwise 3x3x3 as the only convolution over time: "interaction-reduced".

    conv1 is 3x7x7 / (1, 2, 2), pool1 1x3x3 / (1, 2, 2); in each block the 3x3 becomes 3x3x3 with one channel a group,
    so that channels meet in the 1x1x1s alone (Figure 2 c); res3 to res5 halve T together with H and W (Table 1).

    Norms add 1e-3 to the variance, as the authors' code does (VMZ), and not torch's 1e-5. docs/networks.md lists where
    public code differs. Names of parameters are those of torchvision's 2D ResNet, as I3D's are.
    """

    memory_format = torch.channels_last_3d

    def __init__(
        self, backbone: str, num_frames: int, num_classes: int, width: float, dropout: float, in_channels: int
    ) -> None:
        super().__init__(backbone, num_frames, num_classes, width, dropout, in_channels)
        self.conv1 = inflated(self.conv1, kernel=3)
        self.maxpool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1))
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        for name in self.sequences:
            for block in self.get_submodule(name).children():
                assert isinstance(block, Bottleneck)
                channels, stride = block.conv2.out_channels, block.conv2.stride[0]
                depthwise = nn.Conv3d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
                block.set_submodule("conv1", inflated(block.conv1))
                block.set_submodule("conv2", depthwise)
                block.set_submodule("conv3", inflated(block.conv3))
                if isinstance(block.downsample, nn.Sequential):
                    block.downsample[0] = inflated(block.downsample[0], stride=stride)
        inflate_norms(self)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm3d):
                module.eps = 1e-3
