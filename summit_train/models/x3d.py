"""X3D (Feichtenhofer, "X3D: Expanding architectures for efficient video recognition", 2020): X3D-M."""

from __future__ import annotations

import math

import torch
from torch import nn

from summit_train.models.mobilenet import rounded_channels
from summit_train.models.resnet import STAGES, projection, scaled_channels
from summit_train.models.video import Dropout, VideoNetwork
from summit_train.spec import NetworkSpec

# Channels of conv1 and of res2 to res5: X2D's 12, 12, 24, 48, 96 (Table 1) times the width factor of 2.0.
CHANNELS = (24, 24, 48, 96, 192)
# X2D's blocks in res2 to res5 times the depth factor.
BLOCKS = tuple(math.ceil(2.2 * num_blocks) for num_blocks in (1, 2, 5, 3))
BOTTLENECK = 2.25  # inner channels of a block for each of its output channels
FC1 = 2048  # "C5", the features before the classifier


class SqueezeExcitation(nn.Module):
    """x times a gate for each channel: sigmoid of two 1x1x1 convolutions of its average (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = rounded_channels(channels / 16)
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.fc1 = nn.Conv3d(channels, squeezed, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv3d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fc2(self.relu(self.fc1(self.pool(x)))).sigmoid()


class X3DBlock(nn.Module):
    """relu(branch(x) + shortcut): 1x1x1, relu, depthwise 3x3x3, squeeze-excitation in some, swish, 1x1x1."""

    def __init__(self, in_channels: int, channels: int, stride: int, has_se: bool) -> None:
        super().__init__()
        inner = int(BOTTLENECK * channels)
        self.conv1 = nn.Conv3d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(inner)
        self.conv2 = nn.Conv3d(inner, inner, 3, (1, stride, stride), padding=1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm3d(inner)
        self.se = SqueezeExcitation(inner) if has_se else nn.Identity()
        self.swish = nn.SiLU()
        self.conv3 = nn.Conv3d(inner, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(in_channels, channels, stride, is_3d=True)

    def zero_init_last(self) -> None:
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.swish(self.se(self.bn2(self.conv2(branch))))
        branch = self.bn3(self.conv3(branch))
        return self.relu(branch + self.downsample(x))


class X3D(VideoNetwork):
    """X3D-M, on 16 frames of 224 pixels: a narrow 3D ResNet that keeps its frames (Table 3).

    conv1 is 1x3x3 / (1, 2, 2) and then depthwise 5x1x1; without pool1, res2 to res5 halve H and W. A block's
    inner channels are 2.25 times its output's. conv5 and fc1 follow res5, and the average stands between them.
    Blocks 0, 2, 4 ... of a stage have squeeze-excitation, with a 16th of the inner channels.

    Where the paper gives no detail the authors' code (PySlowFast) is meant: squeezed channels are rounded as those of
    MobileNetV2 (8, 8, 16, 32), swish follows the depthwise convolution alone, relu all others, and res2's shortcut has
    a norm. The average is over the whole crop. docs/networks.md lists where public code differs. `width` multiplies the
    channels, on top of the 2.0 of X3D-M. Names of parameters follow torchvision's ResNet.
    """

    memory_format = torch.channels_last_3d
    sequences = ("layer1", "layer2", "layer3", "layer4")
    stem = ("conv1_xy",)

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        titles = {name: title for name, title in STAGES.items() if name != "maxpool"} | {"conv5": "conv5"}
        super().__init__(num_frames, titles, in_channels)
        channels, *stage_channels = (scaled_channels(base, spec.width) for base in CHANNELS)
        self.conv1_xy = nn.Conv3d(in_channels, channels, (1, 3, 3), (1, 2, 2), padding=(0, 1, 1), bias=False)
        self.conv1 = nn.Conv3d(channels, channels, (5, 1, 1), padding=(2, 0, 0), groups=channels, bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.relu = nn.ReLU(inplace=True)
        stages: list[nn.Module] = []
        for out_channels, num_blocks in zip(stage_channels, BLOCKS, strict=True):
            blocks = []
            for number in range(num_blocks):
                blocks.append(X3DBlock(channels, out_channels, 2 if number == 0 else 1, has_se=number % 2 == 0))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        inner = int(BOTTLENECK * channels)
        features = scaled_channels(FC1, spec.width)
        self.conv5 = nn.Conv3d(channels, inner, 1, bias=False)
        self.bn5 = nn.BatchNorm3d(inner)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc1 = nn.Conv3d(inner, features, 1, bias=False)
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(features, spec.num_classes)

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(self.conv1_xy(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(self.relu(self.bn5(self.conv5(x))))
        return self.relu(self.fc1(x)).flatten(1)
