"""Residual blocks with shifted convolutions and fused normalisations."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.fast.norm import FusedNorm
from summit_train.models.fast.shifted_conv import ShiftedConv2d
from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import ResidualBlock
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

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self.shift_in_place = block.shift_in_place
        self.num_convs = sum(name.startswith("conv") for name in self._modules)
        for number in range(1, self.num_convs + 1):
            norm = block.get_submodule(f"bn{number}")
            assert isinstance(norm, _BatchNorm)
            self.set_submodule(f"bn{number}", FusedNorm(norm, relu=True))
        self.training = block.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the plain block returns."""
        out = self._run("shift", x)
        shortcut = out if self.shift_in_place else x
        if self._modules.get("downsample") is not None:
            shortcut = self._run("downsample", shortcut)
        for number in range(1, self.num_convs):
            out = self._run(f"bn{number}", self._run(f"conv{number}", out))
        out = self._run(f"bn{self.num_convs}", self._run(f"conv{self.num_convs}", out), shortcut)
        return self._run("nl", out)

    def _run(self, name: str, *inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, cast(nn.Module, self._modules[name])(*inputs))
