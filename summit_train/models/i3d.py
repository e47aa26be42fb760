"""I3D and ir-CSN: 2D ResNets whose convolutions become 3D."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from summit_train.models.resnet import STAGES, Bottleneck, ResNet
from summit_train.spec import NetworkSpec


class I3D(ResNet):
    """A ResNet over volumes (N, C, T, H, W), with the parameter names of the 2D network.

    Its kernels are inflated in time (Carreira and Zisserman, "Quo vadis, action recognition?").

    i3d_replace (Lin et al., "TSM", journal version, Table 6): the first 1x1 of every block becomes 3x1x1, where TSM has
    its shifts; T stays.
    i3d_3x3x3 (Hara et al., 2018): every 3x3 becomes 3x3x3; res3 to res5 halve T together with H and W; conv1 is
    7x7x7 / (1, 2, 2), pool1 3x3x3 / 2.
    i3d_3x1x1 (Wang et al., "Non-local neural networks", 2018): the first 1x1 of every block of res2, of blocks 1010..
    of res3 and res4 and 010 of res5 becomes 3x1x1; conv1 is 5x7x7 / 2, pool1 2x3x3 / 2 (public networks have two other
    forms, docs/networks.md), pool2 2x1x1 after res2.
    """

    memory_format = torch.channels_last_3d

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(spec, num_frames, in_channels)
        arch = spec.arch
        self.pool2: nn.Module = nn.Identity()
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        if arch == "i3d_replace":
            self.conv1 = inflated(self.conv1)
            self.maxpool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1))
        elif arch == "i3d_3x3x3":
            self.conv1 = inflated(self.conv1, kernel=7)
            self.maxpool = nn.MaxPool3d(3, 2, padding=1)
        else:
            self.conv1 = inflated(self.conv1, kernel=5, stride=2)
            self.pool1_form = spec.pool1
            margin = 0 if spec.pool1 == "2x3x3_unpadded" else 1
            self.maxpool = nn.MaxPool3d((1 if spec.pool1 == "1x3x3" else 2, 3, 3), 2, padding=(0, margin, margin))
            self.pool2 = nn.MaxPool3d((2, 1, 1))
            self.stages = {"conv1": "conv1", "maxpool": "pool1", "layer1": "res2", "pool2": "pool2"} | STAGES
        for stage in range(4):
            for number, block in enumerate(self.get_submodule(f"layer{stage + 1}").children()):
                if arch == "i3d_3x3x3":
                    inflate(block, ["conv2"] if isinstance(block, Bottleneck) else ["conv1", "conv2"], strided=True)
                elif arch == "i3d_replace" or stage == 0 or number % 2 == (1 if stage == 3 else 0):
                    inflate(block, ["conv1"])
                else:
                    inflate(block, [])
        inflate_norms(self)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.pool2(self.layer1(x))
        return self.layer4(self.layer3(self.layer2(x)))


class IrCSN(ResNet):
    """ir-CSN (Tran et al., "Video classification with channel-separated convolutional networks", 2019).

    A 3D ResNet of bottlenecks with a depthwise 3x3x3 as the only convolution over time: "interaction-reduced".

    conv1 is 3x7x7 / (1, 2, 2), pool1 1x3x3 / (1, 2, 2); in each block the 3x3 becomes 3x3x3 with one channel a group,
    so that channels meet in the 1x1x1s alone (Figure 2 c); res3 to res5 halve T together with H and W (Table 1).

    Norms add 1e-3 to the variance, as the authors' code does (VMZ), and not torch's 1e-5. docs/networks.md lists where
    public code differs. Names of parameters are those of torchvision's 2D ResNet, as I3D's are.
    """

    memory_format = torch.channels_last_3d

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(spec, num_frames, in_channels)
        self.conv1 = inflated(self.conv1, kernel=3)
        self.maxpool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1))
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        for name in self.sequences:
            for block in self.get_submodule(name).children():
                assert isinstance(block, Bottleneck)
                channels = block.conv2.out_channels
                stride = block.conv2.stride[0]
                depthwise = nn.Conv3d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
                block.set_submodule("conv2", depthwise)
                inflate(block, [], strided=True)
        inflate_norms(self)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm3d):
                module.eps = 1e-3


def inflated(conv: nn.Module, kernel: int = 1, stride: int = 1) -> nn.Conv3d:
    """Return a 3D convolution of `kernel` frames, padded by half of them, in place of a 2D one."""
    assert isinstance(conv, nn.Conv2d) and not isinstance(conv.padding, str)
    height, width = conv.kernel_size
    down, right = conv.stride
    above, left = conv.padding
    return nn.Conv3d(
        conv.in_channels, conv.out_channels, (kernel, height, width), (stride, down, right), (kernel // 2, above, left),
        groups=conv.groups, bias=conv.bias is not None,
    )  # fmt: skip


def inflate(block: nn.Module, names: Collection[str], kernel: int = 3, *, strided: bool = False) -> None:
    """Make the 2D convolutions of `block` 3D: those of `names` with `kernel` frames, the others with one.

    strided: strides in space become strides in time, too.
    """
    for name, conv in list(block.named_modules()):
        if isinstance(conv, nn.Conv2d):
            block.set_submodule(name, inflated(conv, kernel if name in names else 1, conv.stride[0] if strided else 1))


def inflate_norms(network: nn.Module) -> None:
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(name, nn.BatchNorm3d(module.num_features))
