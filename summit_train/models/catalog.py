"""Names and limits of every network, without torch: the spec's choices come from here."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Arch = Literal["tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1"]
Backbone = Literal["resnet18", "resnet34", "resnet50", "resnet101"]
ShiftPlace = Literal["residual", "in_place"]
ShiftDirection = Literal["both", "past"]
FreezeBN = Literal["none", "all", "all_but_first"]

BACKBONES: tuple[str, ...] = get_args(Backbone)
BOTTLENECK_BACKBONES: tuple[str, ...] = ("resnet50", "resnet101")


class Architecture(NamedTuple):
    """An architecture's limits.

    `minimum_frames` is the product of its strides in time. With fewer frames a stage would be down to one frame while
    strides are still to come: they would halve nothing, and the kernels there would see padding alone on both sides.
    """

    title: str
    minimum_frames: int = 1
    backbones: tuple[str, ...] = BACKBONES
    inflated: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "tsm": Architecture("TSM"),
    "tsn": Architecture("TSN"),
    "i3d_3x3x3": Architecture("I3D 3x3x3", minimum_frames=16, inflated=True),
    "i3d_3x1x1": Architecture("I3D 3x1x1", minimum_frames=8, backbones=BOTTLENECK_BACKBONES, inflated=True),
}


def backbone_problem(arch: str, backbone: str) -> str | None:
    """Return why `arch` cannot be built on `backbone`, and what would be right; None where it can."""
    valid = ARCHITECTURES[arch].backbones
    if backbone in valid:
        return None
    reason = f"{arch} inflates the first 1x1 convolution of bottleneck blocks, and {backbone} has none"
    return f"{reason}; valid: {', '.join(valid)}"


def frames_problem(arch: str, num_frames: int) -> str | None:
    """Return why clips of `num_frames` frames are too short for `arch`; None where they are not."""
    fewest = ARCHITECTURES[arch].minimum_frames
    if num_frames >= fewest:
        return None
    return f"{arch} needs at least {fewest} frames, the product of its strides in time, got {num_frames}"
