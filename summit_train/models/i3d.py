"""I3D: a 2D ResNet whose kernels are inflated in time (Carreira and Zisserman, "Quo vadis, action recognition?")."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.models.resnet import STAGES, ResNet
from summit_train.spec.catalog import Pool1


class I3D(ResNet):
    """A ResNet over volumes (N, C, T, H, W), with the parameter names of the 2D network.

    i3d_replace (Lin et al., "TSM", journal version, Table 6): the first 1x1 of every block becomes 3x1x1, where TSM has
    its shifts; T stays.
    i3d_3x3x3 (Hara et al., 2018): every 3x3 becomes 3x3x3; res3 to res5 halve T together with H and W; conv1 is
    7x7x7 / (1, 2, 2), pool1 3x3x3 / 2.
    i3d_3x1x1 (Wang et al., "Non-local neural networks", 2018): the first 1x1 of every block of res2, of blocks 1010..
    of res3 and res4 and 010 of res5 becomes 3x1x1; conv1 is 5x7x7 / 2, pool1 2x3x3 / 2 (public networks have two other
    forms, docs/networks.md), pool2 2x1x1 after res2.
    """

    memory_format = torch.channels_last_3d

    def __init__(self, arch: str, backbone: str, sizes: tuple[int, int, float, float, int], pool1: Pool1) -> None:
        """sizes: number of frames and of classes, width, dropout, and the clip's channels."""
        super().__init__(backbone, *sizes)
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
            self.pool1_form = pool1
            margin = 0 if pool1 == "2x3x3_unpadded" else 1
            self.maxpool = nn.MaxPool3d((1 if pool1 == "1x3x3" else 2, 3, 3), 2, padding=(0, margin, margin))
            self.pool2 = nn.MaxPool3d((2, 1, 1))
            self.stages = {"conv1": "conv1", "maxpool": "pool1", "layer1": "res2", "pool2": "pool2"} | STAGES
        for stage in range(4):
            for number, block in enumerate(self.get_submodule(f"layer{stage + 1}").children()):
                chosen = arch == "i3d_replace" or stage == 0 or number % 2 == (1 if stage == 3 else 0)
                for name, conv in list(block.named_modules()):
                    if isinstance(conv, nn.Conv2d) and arch == "i3d_3x3x3":
                        kernel = 3 if conv.kernel_size == (3, 3) else 1
                        block.set_submodule(name, inflated(conv, kernel, stride=conv.stride[0]))
                    elif isinstance(conv, nn.Conv2d):
                        block.set_submodule(name, inflated(conv, kernel=3 if chosen and name == "conv1" else 1))
        inflate_norms(self)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.pool2(self.layer1(x))
        return self.layer4(self.layer3(self.layer2(x)))


def inflated(conv: nn.Module, kernel: int = 1, stride: int = 1) -> nn.Conv3d:
    """Return a 3D convolution of `kernel` frames, padded by half of them, in place of a 2D one."""
    assert isinstance(conv, nn.Conv2d) and not isinstance(conv.padding, str)
    (height, width), (down, right), (above, left) = conv.kernel_size, conv.stride, conv.padding
    kernels, strides, padding = (kernel, height, width), (stride, down, right), (kernel // 2, above, left)
    return nn.Conv3d(
        conv.in_channels, conv.out_channels, kernels, strides, padding, groups=conv.groups, bias=conv.bias is not None
    )


def inflate_norms(network: nn.Module) -> None:
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(name, nn.BatchNorm3d(module.num_features))
