"""Names to networks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import nn

from summit_train.models.csn import IrCSN
from summit_train.models.eco import ECOLite
from summit_train.models.foreign import build_foreign
from summit_train.models.i3d import I3D
from summit_train.models.mobilenet import InvertedResidual, MobileNetV2
from summit_train.models.non_local import add_non_local
from summit_train.models.resnet import ResidualBlock, ResNet
from summit_train.models.shift import add_shifts
from summit_train.models.slowfast import SlowFast
from summit_train.models.trn import TRN
from summit_train.models.video import VideoNetwork, initialise
from summit_train.models.vit import FrameViT, VideoViT
from summit_train.models.x3d import X3D, X3DBlock
from summit_train.spec import catalog


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
    shift_place: catalog.ShiftPlace = "residual",
    shift_direction: catalog.ShiftDirection = "both",
    non_local: catalog.NonLocal = False,
    pool1: catalog.Pool1 = "2x3x3",
    adapter: catalog.Adapter = "none",
    positions: catalog.Positions = "index",
    drop_path: float = 0.0,
    in_channels: int = 3,
    generator: torch.Generator | None = None,
    options: Mapping[str, Any] | None = None,
) -> VideoNetwork:
    """Build a video network with fresh weights: float (N, num_frames, in_channels, H, W) -> logits (N, num_classes).

    spec/catalog.py lists the names; "tsn" is the 2D network, "tsm" the same with the temporal shift. That, and the
    adapter "shift" of a vit, read the shift's settings. Without `backbone` it is the architecture's usual one. `width`
    multiplies the channels, rounded to multiples of 8. With `zero_init_residual` every residual block begins as its
    shortcut (Goyal et al., section 5.1); non-local blocks always begin as the identity. Weights are drawn from
    `generator`, or torch's global one. Only FILE.py:callable reads `options`. Raises ValueError for wrong arguments.
    """
    if catalog.is_foreign(arch):
        return build_foreign(arch, num_frames, num_classes, in_channels, options or {}, generator)
    _check_choices(
        ("arch", arch, catalog.Arch), ("shift_place", shift_place, catalog.ShiftPlace), ("pool1", pool1, catalog.Pool1),
        ("shift_direction", shift_direction, catalog.ShiftDirection), ("non_local", non_local, catalog.NonLocal),
        ("adapter", adapter, catalog.Adapter), ("positions", positions, catalog.Positions),
    )  # fmt: skip
    backbone = backbone or catalog.ARCHITECTURES[arch].usual_backbone
    numbers = (num_classes, in_channels, width, dropout, drop_path, shift_fraction)
    usual = (arch, backbone, num_frames, non_local, zero_init_residual, pool1, None, adapter)
    problems = [text for _, text in catalog.network_problems(*usual)]
    problems += [text for _, text in catalog.vit_problems(arch, adapter, drop_path, positions, shift_place)]
    for problem in (*_number_problems(numbers, shift_direction), *problems):
        raise ValueError(problem)
    sizes = (num_frames, num_classes, width, dropout, in_channels)
    if arch == "vit" and adapter == "none":
        model: VideoNetwork = VideoViT(backbone or "", sizes, drop_path, positions)
    elif arch == "vit":
        model = FrameViT(backbone or "", sizes, drop_path, adapter, (shift_fraction, shift_direction))
    else:
        model = _of_arch(arch, backbone or "", sizes, pool1)
    if arch == "tsm":
        add_shifts(model, shift_fraction, shift_place, shift_direction)
    if non_local:
        add_non_local(model, non_local, None if isinstance(model, I3D) else num_frames)
    initialise(model, generator)
    if zero_init_residual:
        for module in model.modules():
            if isinstance(module, ResidualBlock | InvertedResidual | X3DBlock):
                nn.init.zeros_(module.get_parameter(f"{module.last_norm}.weight"))
    return model


def _check_choices(*choices: tuple[str, object, Any]) -> None:
    """Raise ValueError for the first value that is not one of its kind. choices: name, value, Literal."""
    for name, value, kind in choices:
        if value not in (valid := get_args(kind)):
            raise ValueError(f"{name} must be one of {', '.join(map(str, valid))}, got {value!r}")


def _number_problems(
    numbers: tuple[int, int, float, float, float, float], shift_direction: catalog.ShiftDirection
) -> Iterator[str]:
    num_classes, in_channels, width, dropout, drop_path, shift_fraction = numbers
    most = 0.5 if shift_direction == "both" else 1.0
    limits = (
        (0 <= shift_fraction <= most, f"shift_fraction must be 0 to {most} ({shift_direction}), got {shift_fraction}"),
        (num_classes >= 1, f"num_classes must be 1 or more, got {num_classes}"),
        (in_channels >= 1, f"in_channels must be 1 or more, got {in_channels}"),
        (0 < width < math.inf, f"width must be a positive number, got {width}"),
        (0 <= dropout < 1, f"dropout must be 0 or more and below 1, got {dropout}"),
        (0 <= drop_path < 1, f"drop_path must be 0 or more and below 1, got {drop_path}"),
    )
    yield from (problem for is_kept, problem in limits if not is_kept)


def _of_arch(arch: str, backbone: str, sizes: tuple[int, int, float, float, int], pool1: catalog.Pool1) -> VideoNetwork:
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
    return MobileNetV2(*sizes) if backbone == "mobilenet_v2" else ResNet(backbone, *sizes)
