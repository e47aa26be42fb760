"""MobileNetV2 on frames (Sandler et al., 2018), with torchvision's parameter names."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models.video import Dropout, VideoNetwork
from summit_train.spec import NetworkSpec

# Expansion t, channels c, blocks n, stride s of the first (Sandler et al., Table 2).
BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1x1 to `expansion` times the channels, depthwise 3x3, linear 1x1; with a shortcut where the shape stays.

    TSM puts its temporal shift in `shift`, in front of the branch, or `in_place_shift`, in front of the shortcut too.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.has_shortcut = stride == 1 and in_channels == channels
        self.takes_shift = self.has_shortcut and expansion > 1
        self.in_place_shift: nn.Module = nn.Identity()
        self.shift: nn.Module = nn.Identity()
        expand = [_convolution(in_channels, inner, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *expand,
            _convolution(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def zero_init_last(self) -> None:
        nn.init.zeros_(self.conv[-1].get_parameter("weight"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        branch = self.conv(self.shift(x))
        return x + branch if self.has_shortcut else branch


class MobileNetV2(VideoNetwork):
    """The stem, 17 inverted residuals, a 1x1 convolution, and the classifier."""

    sequences = ("features",)
    stem = ("features.0.0",)
    head = "classifier"

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        stages = {"features.0": "conv1"}
        super().__init__(num_frames, stages, in_channels)
        channels = rounded_channels(32 * spec.width)
        layers: list[nn.Module] = [_convolution(in_channels, channels, 3, 2)]
        for number, (expansion, base, num_blocks, stride) in enumerate(BLOCKS, 1):
            for index in range(num_blocks):
                out_channels = rounded_channels(base * spec.width)
                layers.append(InvertedResidual(channels, out_channels, stride if index == 0 else 1, expansion))
                channels = out_channels
            stages[f"features.{len(layers) - 1}"] = f"bottleneck{number}"
        last = rounded_channels(1280 * max(1.0, spec.width))
        stages[f"features.{len(layers)}"] = "conv2"
        self.features = nn.Sequential(*layers, _convolution(channels, last, 1))
        self.classifier = nn.Sequential(Dropout(spec.dropout), nn.Linear(last, spec.num_classes))

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        return self.feature_maps(x).mean((2, 3))

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features)


def _convolution(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return convolution, normalisation, ReLU6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(inplace=True),
    )


def rounded_channels(channels: float) -> int:
    """Return `channels` rounded to the nearest multiple of 8, but not below 90 % of it, as torchvision does.

    The TSM authors' code rounds up: at widths other than 1 its networks differ from these.
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8
