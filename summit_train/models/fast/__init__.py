"""The same networks, executed faster. `accelerate` is the only door; without this folder networks run plain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from summit_train.core.errors import RunFailed
from summit_train.models.fast.blocks import FusedBlock, fused_block, join_shift
from summit_train.models.fast.native.library import Kernels, compile_for_cluster, kernels
from summit_train.models.fast.norm import FusedNorm
from summit_train.models.fast.shifted_conv import CopiedShift, ShiftedConv2d
from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import ResidualBlock, ResNet

__all__ = ["PARTS", "accelerate", "compile_for_cluster", "execution"]

PARTS = ("shift", "norms")  # what can be left out, to measure each alone


def accelerate(model: nn.Module, parts: Collection[str] = PARTS) -> str:
    """Replace the modules of `model` that run faster in another form, in place; return what was replaced.

    Parameters and buffers keep their names and stay the same objects. Shifted convolutions keep no copy of their input.
    On CPUs, where the C++ kernels can be had, normalisations take in the relu and the shortcut's sum that follow them.
    Networks without any of these run plain.
    """
    for block in model.modules():
        if isinstance(block, ResidualBlock | InvertedResidual) and "shift" in parts:
            join_shift(block)
    devices = {parameter.device.type for parameter in model.parameters()}
    where = f"on {', '.join(sorted(devices))}"
    if devices == {"cpu"}:
        where = f"C++ kernels: {execution()}"
        if isinstance(kernels(), Kernels) and "norms" in parts:
            _fuse_norms(model)
    kinds = (FusedNorm, FusedBlock, ShiftedConv2d, CopiedShift)
    counted = Counter(kind for module in model.modules() for kind in kinds if isinstance(module, kind))
    counts = [f"{counted[kind]} {kind.__name__}" for kind in kinds if counted[kind]]
    return f"{where}; replaced: {', '.join(counts) or 'nothing'}"


def execution() -> str:
    """Return what the C++ kernels for CPUs are compiled for on this machine, or why there are none."""
    found = kernels()
    return f"none: {found}" if isinstance(found, RunFailed) else found.target


def _fuse_norms(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, ResidualBlock):
            model.set_submodule(name, fused_block(module))
    if isinstance(model, ResNet) and isinstance(model.bn1, nn.BatchNorm2d | nn.BatchNorm3d):
        model.bn1, model.relu = FusedNorm(model.bn1, relu=True), nn.Identity()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            model.set_submodule(name, FusedNorm(module, relu=False))
