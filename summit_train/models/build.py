"""Names to networks, and specs to networks with frozen parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import ValidationError

from summit_train.core.errors import UserError
from summit_train.models.by_name import freeze_by_name, frozen_until, lr_factors
from summit_train.models.eco import ECOLite
from summit_train.models.foreign import build_foreign
from summit_train.models.i3d import I3D, IrCSN
from summit_train.models.mobilenet import MobileNetV2
from summit_train.models.non_local import add_non_local
from summit_train.models.resnet import ResNet
from summit_train.models.shift import add_shifts
from summit_train.models.slowfast import SlowFast
from summit_train.models.trn import TRN
from summit_train.models.video import VideoNetwork, freeze_norms, freeze_trunk, initialise
from summit_train.models.vit import FrameViT, VideoViT
from summit_train.models.x3d import X3D
from summit_train.spec import ModelSpec, NetworkSpec, Spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.checks import network_problems, unread

# Each is called with the spec, and the frames and channels of a clip.
NETWORKS: dict[str, Callable[[NetworkSpec, int, int], VideoNetwork]] = {
    "tsm": ResNet,
    "tsn": ResNet,
    "i3d_3x3x3": I3D,
    "i3d_3x1x1": I3D,
    "i3d_replace": I3D,
    "trn": TRN,
    "eco_lite": ECOLite,
    "slowfast": SlowFast,
    "x3d_m": X3D,
    "ir_csn": IrCSN,
    "vit": FrameViT,
}


def build_model(
    arch: str,
    backbone: str | None = None,
    num_frames: int = 8,
    num_classes: int = 400,
    *,
    in_channels: int = 3,
    generator: torch.Generator | None = None,
    **options: Any,
) -> VideoNetwork:
    """Build a video network with fresh weights: float (N, num_frames, in_channels, H, W) -> logits (N, num_classes).

    options: keys of a spec's `model` that define the network, width to drop_path in docs/reference.md. Weights are
    drawn from `generator`, or torch's global one. Raises ValueError for wrong arguments.
    """
    values = {"arch": arch, "backbone": backbone, "num_classes": num_classes, **options}
    try:
        network = NetworkSpec.model_validate(values)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}, got {each['input']!r}" for each in error.errors())
        raise ValueError("; ".join(wrong)) from None
    if in_channels < 1:
        raise ValueError(f"in_channels must be 1 or more, got {in_channels}")
    for key, problem in (*unread(network, "model."), *network_problems(network, num_frames)):
        raise ValueError(f"{key}: {problem}")
    return network_of(network, num_frames, in_channels, generator)


def network_of(
    spec: NetworkSpec, num_frames: int, in_channels: int, generator: torch.Generator | None = None
) -> VideoNetwork:
    """Build the network of a spec that was checked, as build_model does.

    With `zero_init_residual` every residual block begins as its shortcut (Goyal et al., section 5.1); non-local blocks
    always begin as the identity.
    """
    if is_foreign(spec.arch):
        return build_foreign(spec, num_frames, in_channels, generator)
    network = NETWORKS[spec.arch]
    if spec.backbone == "mobilenet_v2":
        network = MobileNetV2
    elif spec.arch == "vit" and spec.adapter == "none":
        network = VideoViT
    model = network(spec, num_frames, in_channels)
    if spec.arch == "tsm":
        add_shifts(model, spec.shift_fraction, spec.shift_place, spec.shift_direction)
    if spec.non_local:
        add_non_local(model, spec.non_local, None if isinstance(model, I3D) else num_frames)
    initialise(model, generator)
    if spec.zero_init_residual:
        for module in model.modules():
            if (zero_init_last := getattr(module, "zero_init_last", None)) is not None:
                zero_init_last()
    return model


def plain_network(
    model: ModelSpec, num_frames: int, in_channels: int, generator: torch.Generator | None = None
) -> VideoNetwork:
    """Build the network of `model` with the head of its task; freeze its trunk or normalisations."""
    network = network_of(model, num_frames, in_channels, generator)
    if model.detector is not None:
        from summit_train.tasks.detection.rfcn import build_rfcn

        network = build_rfcn(network, model, model.detector, generator)
    freeze_norms(network, model.freeze_bn)
    if model.freeze_trunk:
        freeze_trunk(network)
    return network


def build_network(spec: Spec, generator: torch.Generator | None = None) -> VideoNetwork:
    """Build the spec's plain network, with its frozen parts, its weights drawn from `generator`."""
    network = plain_network(spec.model, spec.data.num_frames, spec.data.input.channels, generator)
    for key, names in (("head_lr_factor", [network.head]), ("first_lr_factor", network.stem)):
        if getattr(spec.optimizer, key) != 1 and not any(names):
            attribute = "head" if names else "stem"
            raise UserError(f"optimizer.{key}: must be 1, because {spec.model.arch} has no attribute {attribute}")
    lr_factors(network, spec.optimizer)  # refuses names that the network does not have
    network.frozen_until = frozen_until(network, spec.optimizer)
    freeze_by_name(network, 0)
    return network
