"""The same networks, executed faster. `accelerate` is the only door; without this folder networks run plain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn

from summit_train.core.errors import RunFailed
from summit_train.models.fast.kernels import Kernels, channels_last, compile_for_cluster, loaded
from summit_train.models.fast.norm import FusedNorm
from summit_train.models.fast.shifted_conv import ShiftedConv2d
from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import BasicBlock, Bottleneck, ResidualBlock, ResNet
from summit_train.models.shift import TemporalShift, num_shifted_channels

__all__ = ["PARTS", "accelerate", "compile_for_cluster", "execution"]

PARTS = ("shift", "norms")  # what can be left out, to measure each alone


class FusedBlock:
    """A residual block in which each normalisation does what follows it: relu, or the shortcut's sum and relu."""


class FusedBasicBlock(FusedBlock, BasicBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.bn1(self.conv1(self.shift(x)))
        return self.nl(self.bn2(self.conv2(x), shortcut))


class FusedBottleneck(FusedBlock, Bottleneck):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_place_shift(x)
        shortcut = self.downsample(x)
        x = self.bn1(self.conv1(self.shift(x)))
        x = self.bn2(self.conv2(x))
        return self.nl(self.bn3(self.conv3(x), shortcut))


def accelerate(model: nn.Module, parts: Collection[str] = PARTS) -> str:
    """Replace the modules of `model` that run faster in another form, in place; return what was replaced.

    Parameters and buffers keep their names and stay the same objects; weights of convolutions become channels-last
    in memory, like their inputs. Shifted convolutions keep no copy of their input. On CPUs, if the C++ kernels are
    available, normalisations take in the relu and the shortcut's sum that follow them.
    Networks without any of these run plain, and so do foreign ones, whose code may rely on the modules it has.
    """
    if not getattr(model, "replaceable", True):
        return "plain: a network of your own"
    for parameter in model.parameters():
        if parameter.dim() in (4, 5):  # otherwise each convolution would copy it, forward and backward
            parameter.data = channels_last(parameter.data)
    if "shift" in parts:
        for block in model.modules():
            if isinstance(block, ResidualBlock | InvertedResidual) and isinstance(block.shift, TemporalShift):
                _join_shift(block, block.shift)
    devices = {parameter.device.type for parameter in model.parameters()}
    where = f"on {', '.join(sorted(devices))}"
    if devices == {"cpu"}:
        found = loaded()
        where = f"C++ kernels: {found.target}" if isinstance(found, Kernels) else "no C++ kernels"
        if isinstance(found, Kernels) and "norms" in parts:
            _fuse_norms(model)
    kinds = (FusedNorm, FusedBlock, ShiftedConv2d)
    counted = Counter(kind for module in model.modules() for kind in kinds if isinstance(module, kind))
    counts = [f"{counted[kind]} {kind.__name__}" for kind in kinds if counted[kind]]
    return f"{where}; replaced: {', '.join(counts) or 'nothing'}"


def execution() -> str:
    """Name the target of this machine's C++ kernels for CPUs, or the reason why they are missing."""
    found = loaded()
    return f"none: {found}" if isinstance(found, RunFailed) else found.target


def _join_shift(block: ResidualBlock | InvertedResidual, shift: TemporalShift) -> None:
    name = "conv1" if isinstance(block, ResidualBlock) else "conv.0.0"
    conv = block.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    if num_shifted_channels(conv.in_channels, shift.fraction):
        block.set_submodule(name, ShiftedConv2d(conv, shift))
    block.shift = nn.Identity()


def _fuse_norms(model: nn.Module) -> None:
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d)]
    if not all(norm.affine and norm.track_running_stats and norm.momentum is not None for norm in norms):
        return  # the kernels know the usual form alone
    if isinstance(model, ResNet) and isinstance(model.bn1, nn.BatchNorm2d | nn.BatchNorm3d):
        model.bn1 = FusedNorm(model.bn1, relu=True)
        model.relu = nn.Identity()
    for name, module in list(model.named_modules()):
        if isinstance(module, ResidualBlock):
            # The same block, shortcut, shift and hooks included, with another forward pass.
            module.__class__ = FusedBasicBlock if isinstance(module, BasicBlock) else FusedBottleneck
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            parent = model.get_submodule(name.rpartition(".")[0])
            # A block's own norms have the relu behind them; those of its shortcut and non-local block do not.
            model.set_submodule(name, FusedNorm(module, relu=isinstance(parent, FusedBlock)))
