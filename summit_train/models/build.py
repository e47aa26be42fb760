"""Names to networks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import get_args

import torch
from torch import nn

from summit_train.models.csn import IrCSN
from summit_train.models.eco import ECOLite
from summit_train.models.i3d import I3D
from summit_train.models.mobilenet import InvertedResidual, MobileNetV2
from summit_train.models.non_local import add_non_local
from summit_train.models.resnet import ResidualBlock, ResNet
from summit_train.models.slowfast import SlowFast
from summit_train.models.trn import TRN
from summit_train.models.tsm import add_shifts
from summit_train.models.video import VideoNetwork, initialise
from summit_train.models.x3d import X3D, X3DBlock
from summit_train.spec.catalog import (
    ARCHITECTURES,
    NonLocal,
    NonLocalForm,
    Pool1,
    ShiftDirection,
    ShiftPlace,
    backbone_problem,
    frames_problem,
    non_local_problem,
    pool1_problem,
    zero_init_problem,
)


def build_model(
    arch: str,
    backbone: str | None = None,
    num_frames: int = 8,
    num_classes: int = 400,
    *,
    width: float = 1.0,
    dropout: float = 0.0,
    zero_init_residual: bool = False,
    shift_fraction: float = 0.125,
    shift_place: ShiftPlace = "residual",
    shift_direction: ShiftDirection = "both",
    non_local: NonLocal = False,
    pool1: Pool1 = "2x3x3",
    in_channels: int = 3,
    generator: torch.Generator | None = None,
) -> VideoNetwork:
    """Build a video network with fresh weights: float (N, num_frames, in_channels, H, W) -> logits (N, num_classes).

    arch, backbone, shift_place, shift_direction, non_local and pool1 are names of the catalog; "tsn" is the 2D network,
    "tsm" the same with the temporal shift. Without `backbone` it is the architecture's usual one. `width` multiplies
    the channels, rounded to multiples of 8. With `zero_init_residual` every residual block begins as its shortcut
    (Goyal et al., section 5.1). Only "tsm" reads the shift's settings. `non_local` adds non-local blocks, which begin
    as the identity. Weights are drawn from `generator`, or from torch's global one.
    Raises ValueError for a choice that does not exist and for a clip that is too short for the network's strides in
    time.
    """
    _check_choice("arch", arch, ARCHITECTURES)
    backbone = ARCHITECTURES[arch].usual_backbone if backbone is None else backbone
    _check_choice("shift_place", shift_place, get_args(ShiftPlace))
    _check_choice("pool1", pool1, get_args(Pool1))
    if non_local:
        _check_choice("non_local", non_local, get_args(NonLocalForm))
    problems = [backbone_problem(arch, backbone), frames_problem(arch, num_frames)]
    problems += [non_local_problem(arch, backbone)] if non_local else []
    problems += [zero_init_problem(arch)] if zero_init_residual else []
    problems += [pool1_problem(arch, pool1)]
    for problem in problems:
        if problem is not None:
            raise ValueError(problem)
    if min(num_classes, in_channels) < 1 or not (math.isfinite(width) and width > 0):
        given = f"num_classes is {num_classes}, in_channels {in_channels} and width {width}"
        raise ValueError(f"{given}; all are positive")
    model = _built(arch, backbone or "", (num_frames, num_classes, width, dropout, in_channels), pool1)
    if arch == "tsm":
        add_shifts(model, shift_fraction, shift_place, shift_direction)
    if non_local:
        add_non_local(model, non_local, None if isinstance(model, I3D) else num_frames)
    initialise(model, generator)
    if zero_init_residual:
        for module in model.modules():
            if isinstance(module, ResidualBlock | InvertedResidual | X3DBlock):
                nn.init.zeros_(module.last_norm.get_parameter("weight"))
    return model


def _built(arch: str, backbone: str, sizes: tuple[int, int, float, float, int], pool1: Pool1) -> VideoNetwork:
    """Return the network. sizes: number of frames and of classes, width, dropout, and the clip's channels."""
    if arch in ("i3d_3x3x3", "i3d_3x1x1", "i3d_replace"):
        return I3D(arch, backbone, *sizes, pool1)
    if arch == "trn":
        return TRN(backbone, *sizes)
    if arch == "eco_lite":
        return ECOLite(*sizes)
    if arch == "slowfast":
        return SlowFast(*sizes)
    if arch == "x3d_m":
        return X3D(*sizes)
    if arch == "ir_csn":
        return IrCSN(backbone, *sizes)
    if backbone == "mobilenet_v2":
        return MobileNetV2(*sizes)
    return ResNet(backbone, *sizes)


def _check_choice(name: str, value: str, valid: Iterable[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")
