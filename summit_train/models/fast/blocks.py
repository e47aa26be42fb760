"""Residual blocks with shifted convolutions and fused normalisations."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.fast.norm import FusedNorm
from summit_train.models.fast.shifted_conv import CopiedShift, ShiftedConv2d
from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import BasicBlock, ResidualBlock
from summit_train.models.shift import TemporalShift, num_shifted_channels


def join_shift(block: ResidualBlock | InvertedResidual) -> None:
    """Join the shift of a branch with its first convolution; copy once for a shift in place."""
    if isinstance(block.in_place_shift, TemporalShift):
        block.in_place_shift = CopiedShift(block.in_place_shift)
    shift = block.shift
    if isinstance(shift, TemporalShift):
        name = "conv1" if isinstance(block, ResidualBlock) else "conv.0.0"
        conv = block.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        if num_shifted_channels(conv.in_channels, shift.fraction):
            block.set_submodule(name, ShiftedConv2d(conv, shift))
        block.shift = nn.Identity()


class FusedBlock(nn.Module):
    """A residual block in which each normalisation does what follows it: relu, or the shortcut's sum and relu.

    It has the children of the block that it replaces, under their names.
    """

    in_place_shift: nn.Module
    shift: nn.Module
    downsample: nn.Module
    conv1: nn.Module
    conv2: nn.Module
    conv3: nn.Module
    bn1: nn.Module
    bn2: nn.Module
    bn3: nn.Module
    nl: nn.Module

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self._modules.update(block._modules)
        for name, norm in block.named_children():
            if isinstance(norm, _BatchNorm):
                self.set_submodule(name, FusedNorm(norm, relu=True))
        self.training = block.training


class FusedBasicBlock(FusedBlock):
    """Two convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.bn1(self.conv1(self.shift(x)))
        return self.nl(self.bn2(self.conv2(x), shortcut))


class FusedBottleneck(FusedBlock):
    """Three convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.bn1(self.conv1(self.shift(x)))
        x = self.bn2(self.conv2(x))
        return self.nl(self.bn3(self.conv3(x), shortcut))


def fused_block(block: ResidualBlock) -> FusedBlock:
    """Return the fused form of `block`."""
    return FusedBasicBlock(block) if isinstance(block, BasicBlock) else FusedBottleneck(block)
