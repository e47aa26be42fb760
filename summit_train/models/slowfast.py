"""SlowFast (Feichtenhofer et al., "SlowFast networks for video recognition", 2019): two pathways, two frame rates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from summit_train.models.i3d import inflate, inflate_norms
from summit_train.models.resnet import STAGES as RESNET_STAGES
from summit_train.models.resnet import Bottleneck, scaled_channels
from summit_train.models.video import Dropout, VideoNetwork
from summit_train.spec import NetworkSpec

ALPHA = 8  # frames of the fast pathway for each frame of the slow one
BETA_INVERSE = 8  # channels of the slow pathway for each channel of the fast one
BASE = 64  # channels of the slow pathway's conv1
BLOCKS = (3, 4, 6, 3)  # ResNet-50, res2 to res5
# Module -> the paper's name for its output, for each pathway (Table 1).
STAGES = {
    f"{pathway}.{name}": f"{pathway} {title}" for name, title in RESNET_STAGES.items() for pathway in ("fast", "slow")
}
# Frames that the kernels of conv1 and of the first 1x1 of each block in res2 to res5 span (Table 1).
SLOW_KERNELS = (1, 1, 1, 3, 3)
FAST_KERNELS = (5, 3, 3, 3, 3)


class Pathway(nn.Module):
    """A 3D ResNet-50 that keeps its frames: the stem and res2 to res5.

    kernels: the frames that conv1 and the first 1x1 of a block in res2 to res5 span. joined: how many channels of the
    other pathway join the inputs of res2 to res5. `outputs`: the channels after pool1 and res2 to res5.
    """

    def __init__(
        self, in_channels: int, base: int, width: float, kernels: Sequence[int], joined: Sequence[int] = (0, 0, 0, 0)
    ) -> None:
        super().__init__()
        channels = scaled_channels(base, width)
        span, *spans = kernels
        self.conv1 = nn.Conv3d(in_channels, channels, (span, 7, 7), (1, 2, 2), padding=(span // 2, 3, 3), bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1))
        self.outputs = [channels]
        stages: list[nn.Module] = []
        for stage, num_blocks in enumerate(BLOCKS):
            blocks: list[nn.Module] = []
            inner = scaled_channels(base * 2**stage, width)
            channels += joined[stage]
            for number in range(num_blocks):
                block = Bottleneck(channels, inner, 2 if stage > 0 and number == 0 else 1)
                inflate(block, ["conv1"], kernel=spans[stage])
                blocks.append(block)
                channels = inner * block.expansion
            stages.append(nn.Sequential(*blocks))
            self.outputs.append(channels)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        inflate_norms(self)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        return self.maxpool(self.relu(self.bn1(self.conv1(x))))


class Lateral(nn.Module):
    """A 5x1x1 convolution of every ALPHA-th frame of the fast pathway to twice its channels, for the slow pathway."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = 2 * channels
        self.conv = nn.Conv3d(channels, self.channels, (5, 1, 1), (ALPHA, 1, 1), padding=(2, 0, 0), bias=False)
        self.bn = nn.BatchNorm3d(self.channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, slow: torch.Tensor, fast: torch.Tensor) -> torch.Tensor:
        return torch.cat((slow, self.relu(self.bn(self.conv(fast)))), dim=1)


class SlowFast(VideoNetwork):
    """SlowFast 4x16, R50: clips of T frames, all of them for the fast pathway, every ALPHA-th for the slow one.

    The slow pathway is a ResNet-50 with kernels in time in res4 and res5; the fast one has kernels in time everywhere
    and 1 / BETA_INVERSE of the channels. After pool1, res2, res3 and res4 a lateral connection joins the fast pathway's
    channels to the slow one's (Table 1; section 3.3, "time-strided convolution"). The classifier sees both averages.

    docs/networks.md lists where public code differs. The slow frames are every 8th, as in the paper; a norm and a relu
    follow each lateral convolution, as in PySlowFast. Names of parameters are those of torchvision's ResNet in `slow`
    and `fast`. `width` multiplies both pathways' channels; the fast one's stay at 8 or more.
    """

    memory_format = torch.channels_last_3d
    sequences = tuple(f"{pathway}.layer{i}" for i in (1, 2, 3, 4) for pathway in ("fast", "slow"))
    stem = ("fast.conv1", "slow.conv1")

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(num_frames, STAGES, in_channels)
        # The fast pathway comes first, since it takes the clip as it is.
        self.fast = Pathway(in_channels, BASE // BETA_INVERSE, spec.width, FAST_KERNELS)
        laterals = [Lateral(channels) for channels in self.fast.outputs[:-1]]
        self.lateral1, self.lateral2, self.lateral3, self.lateral4 = laterals
        self.slow = Pathway(in_channels, BASE, spec.width, SLOW_KERNELS, [lateral.channels for lateral in laterals])
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(self.slow.outputs[-1] + self.fast.outputs[-1], spec.num_classes)

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        fast = self.fast.stem(x)
        slow = self.slow.stem(x[:, :, ::ALPHA])
        for number in (1, 2, 3, 4):
            lateral = self.get_submodule(f"lateral{number}")
            slow = self.slow.get_submodule(f"layer{number}")(lateral(slow, fast))
            fast = self.fast.get_submodule(f"layer{number}")(fast)
        return torch.cat((self.avgpool(slow), self.avgpool(fast)), dim=1).flatten(1)
