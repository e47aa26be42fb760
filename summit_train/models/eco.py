"""ECO-lite: a 2D network on frames, then a 3D one on their features (Zolfaghari et al., "ECO", 2018, section 3)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from summit_train.models.resnet import scaled_channels
from summit_train.models.video import Dropout, VideoNetwork
from summit_train.spec import NetworkSpec


class ECOLite(VideoNetwork):
    """BN-Inception on each frame, up to a branch of its block 3c; then a 3D ResNet-18 from its conv3_x on.

    Where the paper is silent the authors' code is meant: shortcuts that change shape are 3x3x3 convolutions, sums are
    normalised on their way into the next block only, every convolution has a bias, and pools round sizes up. Joined,
    the parts of a parameter's name give the layer's name there: `inception.3a.1x1.bn` is inception_3a_1x1_bn,
    `resnet.res4.a_1.bn` is res4a_1_bn, `resnet.res4.a_1.conv` is res4a_1.
    """

    sequences = ("inception", "resnet")
    stem = ("conv1_7x7_s2.conv",)

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        stages = {"conv1_7x7_s2": "conv1", "pool1": "pool1", "conv2_3x3": "conv2", "pool2": "pool2"}
        stages |= {"inception": "inception3"} | {f"resnet.{name}": name for name in ("res3", "res4", "res5")}
        super().__init__(num_frames, stages, in_channels)
        sizes = (32, 64, 96, 128, 192, 256, 512)
        c32, c64, c96, c128, c192, c256, c512 = (scaled_channels(channels, spec.width) for channels in sizes)
        self.conv1_7x7_s2 = _convolution(in_channels, c64, 7, 2)
        self.pool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2_3x3_reduce = _convolution(c64, c64, 1)
        self.conv2_3x3 = _convolution(c64, c192, 3)
        self.pool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        # Ioffe and Szegedy, "Batch normalization", 2015, Figure 5.
        first = Inception(c192, c64, (c64, c64), (c64, c96), c32)
        second = Inception(first.out_channels, c64, (c64, c96), (c64, c96), c64)
        third = _named(
            double_3x3_reduce=_convolution(second.out_channels, c64, 1), double_3x3_1=_convolution(c64, c96, 3)
        )
        self.inception = _named(**{"3a": first, "3b": second, "3c": third})
        self.resnet = _named(res3=Residuals(c96, c128, 1), res4=Residuals(c128, c256, 2), res5=Residuals(c256, c512, 2))
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(c512, spec.num_classes)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        """Return res5 of clips of frames (N*T, C, H, W): volumes (N, F, T / 4, h, w)."""
        x = self.pool1(self.conv1_7x7_s2(x))
        x = self.pool2(self.conv2_3x3(self.conv2_3x3_reduce(x)))
        volume_NCTHW = self.inception(x).unflatten(0, (-1, self.num_frames)).transpose(1, 2)
        return self.resnet(volume_NCTHW)


class Inception(nn.Module):
    """Four branches side by side: 1x1, 3x3, two 3x3, and a 1x1 after an average pool.

    `three` and `double` are the channels of a 3x3 branch: after the 1x1 in front of it, and after each 3x3.
    """

    def __init__(
        self, in_channels: int, one: int, three: tuple[int, int], double: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.out_channels = one + three[1] + double[1] + pooled
        self.add_module("1x1", _convolution(in_channels, one, 1))
        self.add_module("3x3_reduce", _convolution(in_channels, three[0], 1))
        self.add_module("3x3", _convolution(*three, 3))
        self.double_3x3_reduce = _convolution(in_channels, double[0], 1)
        self.double_3x3_1 = _convolution(*double, 3)
        self.double_3x3_2 = _convolution(double[1], double[1], 3)
        self.pool = nn.AvgPool2d(3, 1, padding=1)
        self.pool_proj = _convolution(in_channels, pooled, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [
            self.get_submodule("1x1")(x),
            self.get_submodule("3x3")(self.get_submodule("3x3_reduce")(x)),
            self.double_3x3_2(self.double_3x3_1(self.double_3x3_reduce(x))),
            self.pool_proj(self.pool(x)),
        ]
        return torch.cat(branches, 1)


class Residuals(nn.Module):
    """Two residual blocks, a and b, of two 3x3x3 convolutions each; a stride halves T, H and W.

    Without one, in conv3_x, block a is its second convolution alone.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.a_1: nn.Module = nn.Identity()
        self.a_down: nn.Module | None = None
        if stride > 1:
            self.a_1 = _convolution(in_channels, channels, 3, stride, is_3d=True)
            self.a_down = nn.Conv3d(in_channels, channels, 3, stride, padding=1)
        self.a_2 = nn.Conv3d(in_channels if stride == 1 else channels, channels, 3, padding=1)
        self.a_bn = nn.BatchNorm3d(channels)
        self.b_1 = _convolution(channels, channels, 3, is_3d=True)
        self.b_2 = nn.Conv3d(channels, channels, 3, padding=1)
        self.b_bn = nn.BatchNorm3d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a_2(self.a_1(x))
        if self.a_down is not None:
            a = a + self.a_down(x)
        b = self.b_2(self.b_1(torch.relu(self.a_bn(a)))) + a
        return torch.relu(self.b_bn(b))


def _convolution(
    in_channels: int, channels: int, kernel: int, stride: int = 1, *, is_3d: bool = False
) -> nn.Sequential:
    """Return convolution, normalisation, relu."""
    conv, norm = (nn.Conv3d, nn.BatchNorm3d) if is_3d else (nn.Conv2d, nn.BatchNorm2d)
    layer = conv(in_channels, channels, kernel, stride, kernel // 2)
    return _named(conv=layer, bn=norm(channels), relu=nn.ReLU(inplace=True))


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))
