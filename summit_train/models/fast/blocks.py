"""Residual blocks with shifted convolutions and fused normalisations."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.fast.norm import FusedNorm
from summit_train.models.fast.shifted_conv import ShiftedConv2d
from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import BasicBlock, ResidualBlock
from summit_train.models.shift import TemporalShift, num_shifted_channels


def join_shift(block: ResidualBlock | InvertedResidual) -> None:
    """Let the first convolution of `block` shift its input, where the block has a shift in front of its branch."""
    shift = block.shift
    if not isinstance(shift, TemporalShift) or block.shift_in_place:
        return
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

    shift: nn.Module
    downsample: nn.Module
    conv1: nn.Module
    conv2: nn.Module
    bn1: nn.Module
    bn2: nn.Module
    nl: nn.Module

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self._modules.update(block._modules)
        if block.downsample is None:
            self.downsample = nn.Identity()
        self.shift_in_place = block.shift_in_place
        for name, norm in block.named_children():
            if isinstance(norm, _BatchNorm):
                self.set_submodule(name, FusedNorm(norm, relu=True))
        self.training = block.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the plain block returns."""
        shifted = self.shift(x)
        shortcut = self.downsample(shifted if self.shift_in_place else x)
        out: torch.Tensor = self.nl(self.branch(shifted, shortcut))
        return out

    def branch(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Return relu(branch of `x` + shortcut)."""
        raise NotImplementedError


class FusedBasicBlock(FusedBlock):
    """Two convolutions."""

    def branch(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Return relu(branch of `x` + shortcut)."""
        out: torch.Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x))), shortcut)
        return out


class FusedBottleneck(FusedBlock):
    """Three convolutions."""

    conv3: nn.Module
    bn3: nn.Module

    def branch(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Return relu(branch of `x` + shortcut)."""
        x = self.bn2(self.conv2(self.bn1(self.conv1(x))))
        out: torch.Tensor = self.bn3(self.conv3(x), shortcut)
        return out


def fused_block(block: ResidualBlock) -> FusedBlock:
    """Return the fused form of `block`."""
    return FusedBasicBlock(block) if isinstance(block, BasicBlock) else FusedBottleneck(block)
