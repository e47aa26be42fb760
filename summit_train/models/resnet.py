"""ResNet-18 to 152 (He et al., 2016) and ResNeXt-101 (Xie et al., 2017), with torchvision's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from summit_train.models.video import Dropout, VideoNetwork
from summit_train.spec import NetworkSpec


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut), with places for what other networks add.

    `shift`: TSM's temporal shift in front of the branch (Figure 3, residual). `in_place_shift`: the shift in front of
    branch and shortcut (Figure 3, in-place). `nl`: a non-local block, which follows the residual one. As in timm,
    `zero_init_last()` sets the weight of the branch's last normalisation to 0: the block begins as its shortcut.
    """

    expansion: int  # output channels for each of `channels`
    takes_shift = True

    def __init__(self) -> None:
        super().__init__()
        self.in_place_shift: nn.Module = nn.Identity()
        self.shift: nn.Module = nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.nl: nn.Module = nn.Identity()


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = projection(in_channels, channels, stride)

    def zero_init_last(self) -> None:
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.shift(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.nl(self.relu(x + shortcut))


class Bottleneck(ResidualBlock):
    """1x1, 3x3 and 1x1 convolutions, the stride in the 3x3 as torchvision and its weights have it.

    ResNeXt: the 3x3 has `groups` groups of group_width / 64 * `channels` channels.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int = 1, group_width: int = 64) -> None:
        super().__init__()
        inner = max(1, channels * group_width // 64) * groups
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = projection(in_channels, out_channels, stride)

    def zero_init_last(self) -> None:
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.shift(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.nl(self.relu(x + shortcut))


def projection(in_channels: int, out_channels: int, stride: int, *, is_3d: bool = False) -> nn.Module:
    """Return the 1x1 convolution of a shortcut that changes shape, the identity where it does not; T stays."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if is_3d:
        conv = nn.Conv3d(in_channels, out_channels, 1, (1, stride, stride), bias=False)
        return nn.Sequential(conv, nn.BatchNorm3d(out_channels))
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


def scaled_channels(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded to the nearest multiple of 8, at least 8."""
    return max(8, int(channels * width / 8 + 0.5) * 8)


# The block, and how many of them in layer1 .. layer4 (He et al., Table 1; Xie et al., Table 1).
VARIANTS: dict[str, tuple[Callable[[int, int, int], ResidualBlock], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
    "resnext101_32x4d": (partial(Bottleneck, groups=32, group_width=4), (3, 4, 23, 3)),
    "resnext101_32x8d": (partial(Bottleneck, groups=32, group_width=8), (3, 4, 23, 3)),
}
# Module -> the paper's name for its output ("Training Kinetics in 15 Minutes", Table 2).
STAGES = {"conv1": "conv1", "maxpool": "pool1", **{f"layer{i}": f"res{i + 1}" for i in (1, 2, 3, 4)}}


class ResNet(VideoNetwork):
    """The stem, four stages of residual blocks, and the classifier."""

    sequences = ("layer1", "layer2", "layer3", "layer4")

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(num_frames, STAGES, in_channels)
        assert spec.backbone is not None
        block, depths = VARIANTS[spec.backbone]
        channels = scaled_channels(64, spec.width)
        self.conv1: nn.Module = nn.Conv2d(in_channels, channels, 7, 2, padding=3, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(channels)
        self.relu: nn.Module = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, padding=1)
        stages: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            inner = scaled_channels(64 * 2**stage, spec.width)
            blocks = []
            for number in range(depth):
                blocks.append(block(channels, inner, 2 if stage > 0 and number == 0 else 1))
                channels = inner * blocks[-1].expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool: nn.Module = nn.AdaptiveAvgPool2d(1)
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(channels, spec.num_classes)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))
