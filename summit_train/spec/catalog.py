"""Names and limits of every network, without torch: the spec's choices come from here."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Arch = Literal["tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1", "i3d_replace", "trn", "eco_lite", "slowfast", "x3d_m", "ir_csn"]
Backbone = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext101_32x4d",
    "resnext101_32x8d",
    "mobilenet_v2",
]
ShiftPlace = Literal["residual", "in_place"]
ShiftDirection = Literal["both", "past"]
Pool1 = Literal["2x3x3", "2x3x3_unpadded", "1x3x3"]
FreezeBN = Literal["none", "all", "all_but_first"]
NonLocalForm = Literal["tsm", "original"]
NonLocal = Literal[False, NonLocalForm]

BACKBONES: tuple[str, ...] = get_args(Backbone)
RESNETS = BACKBONES[:-1]
BOTTLENECK_BACKBONES = RESNETS[2:]


class Architecture(NamedTuple):
    """An architecture's limits.

    `backbones` are the 2D networks that it can be built on; with none the architecture is a network of its own.
    `minimum_frames` is the product of its strides in time. With fewer frames a stage would be down to one frame while
    strides are still to come: they would halve nothing, and the kernels there would see padding alone on both sides.
    `minimum_reason` gives another reason for it. `maximum_frames`: beyond it layers, some for each number of frames,
    take minutes to build; None for no limit. A clip has a multiple of `frames_step` frames.
    `non_local`: whether it takes non-local blocks, on its backbones that have bottleneck blocks.
    `frame_by_frame`: whether nothing but the shift and non-local blocks joins its frames, so that it can stream.
    `no_maps`: why it has no class activation maps, None where its head is a global average and one linear layer.
    """

    title: str
    backbones: tuple[str, ...]
    minimum_frames: int = 1
    minimum_reason: str = "the product of its strides in time"
    maximum_frames: int | None = None
    frames_step: int = 1
    norm_ends_branch: bool = True  # each residual branch ends in a normalisation
    non_local: bool = False
    frame_by_frame: bool = False
    no_maps: str | None = None

    @property
    def usual_backbone(self) -> str | None:
        """Return the backbone that is meant where none is named."""
        return "resnet50" if "resnet50" in self.backbones else next(iter(self.backbones), None)


ARCHITECTURES: dict[str, Architecture] = {
    "tsm": Architecture("TSM", BACKBONES, non_local=True, frame_by_frame=True),
    "tsn": Architecture("TSN", BACKBONES, non_local=True, frame_by_frame=True),
    "i3d_3x3x3": Architecture("I3D 3x3x3", RESNETS, minimum_frames=16, non_local=True),
    "i3d_3x1x1": Architecture("I3D 3x1x1", BOTTLENECK_BACKBONES, minimum_frames=8, non_local=True),
    "i3d_replace": Architecture("I3D replace", BOTTLENECK_BACKBONES, non_local=True),
    "trn": Architecture(
        "TRN", RESNETS, minimum_frames=2, minimum_reason="those of its smallest relation", maximum_frames=128,
        no_maps="it relates frames by layers that are not linear",
    ),
    "eco_lite": Architecture("ECO-lite", (), minimum_frames=4, norm_ends_branch=False),
    "slowfast": Architecture(
        "SlowFast", ("resnet50",), minimum_frames=8, frames_step=8,
        no_maps="its two pathways have different numbers of frames",
    ),
    "x3d_m": Architecture("X3D-M", (), no_maps="its classifier follows a layer that is not linear"),
    "ir_csn": Architecture("ir-CSN", ("resnet152",), minimum_frames=8),
}  # fmt: skip


def backbone_problem(arch: str, backbone: str | None) -> str | None:
    """Return why `arch` cannot be built on `backbone`, and what would be right; None where it can."""
    valid = ARCHITECTURES[arch].backbones
    if backbone in valid or (backbone is None and not valid):
        return None
    if not valid:
        return f"{arch} is a network of its own, without a backbone; leave the key out"
    return f"{arch} cannot be built on {backbone}; valid: {', '.join(valid)}"


def zero_init_problem(arch: str) -> str | None:
    """Return why the residual branches of `arch` cannot begin at 0; None where they can."""
    return None if ARCHITECTURES[arch].norm_ends_branch else f"no residual branch of {arch} ends in a normalisation"


def pool1_problem(arch: str, pool1: Pool1) -> str | None:
    """Return why `arch` cannot have this form of pool1; None where it can."""
    if arch == "i3d_3x1x1" or pool1 == "2x3x3":
        return None
    return f"{pool1} is for i3d_3x1x1, and {arch} has no choice; leave the key out"


def frames_problem(arch: str, num_frames: int) -> str | None:
    """Return why clips of `num_frames` frames do not suit `arch`; None where they do."""
    known = ARCHITECTURES[arch]
    if num_frames % known.frames_step:
        every = known.frames_step
        return f"{arch} needs a multiple of {every} frames, its slow pathway sees every {every}th; got {num_frames}"
    if num_frames < known.minimum_frames:
        return f"{arch} needs at least {known.minimum_frames} frames, {known.minimum_reason}, got {num_frames}"
    if known.maximum_frames is not None and num_frames > known.maximum_frames:
        return f"{arch} takes at most {known.maximum_frames} frames, got {num_frames}"
    return None


def non_local_problem(arch: str, backbone: str | None, crop: int | None = None) -> str | None:
    """Return why `arch` on `backbone` cannot have non-local blocks, and what can; None where it can.

    crop: the side of the picture, where it is known; res4 leaves a sixteenth of it, which the blocks halve.
    """
    if ARCHITECTURES[arch].non_local and backbone in BOTTLENECK_BACKBONES:
        return None if crop is None or crop > 16 else f"non-local blocks need a crop of 17 pixels or more, got {crop}"
    takers = [name for name, known in ARCHITECTURES.items() if known.non_local]
    network = f"{arch} on {backbone}" if backbone else arch
    return f"{network} takes no non-local blocks; {', '.join(takers)} do, on one of {', '.join(BOTTLENECK_BACKBONES)}"


def maps_problem(arch: str) -> str | None:
    """Return why `arch` has no class activation maps, and what has; None where a linear layer follows its average."""
    reason = ARCHITECTURES[arch].no_maps
    if reason is None:
        return None
    takers = ", ".join(name for name, known in ARCHITECTURES.items() if known.no_maps is None)
    return f"{arch} has no class activation maps: {reason}; {takers} have them"


def stream_problem(arch: str, shift_direction: ShiftDirection, non_local: NonLocal) -> str | None:
    """Return why a network cannot see a video frame by frame, and what can; None where it can."""
    if not ARCHITECTURES[arch].frame_by_frame:
        return f"{arch} cannot stream: it sees whole clips; a tsm with model.shift_direction past can, and a tsn"
    if non_local:
        return "non-local blocks attend to all frames of a clip, so the network cannot stream; it can without them"
    if arch == "tsm" and shift_direction != "past":
        return "this tsm cannot stream: its shift needs the next frame; train one with model.shift_direction past"
    return None
