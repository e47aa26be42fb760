"""Names and limits of every network, without torch: the spec's choices come from here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

Arch = Literal[
    "tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1", "i3d_replace", "trn", "eco_lite", "slowfast", "x3d_m", "ir_csn", "vit"
]
ConvBackbone = Literal[
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext101_32x4d", "resnext101_32x8d", "mobilenet_v2"
]
ViTBackbone = Literal["vit_s", "vit_b", "vit_l"]
Backbone = Literal[ConvBackbone, ViTBackbone]
ShiftPlace = Literal["residual", "in_place"]
ShiftDirection = Literal["both", "past"]
Pool1 = Literal["2x3x3", "2x3x3_unpadded", "1x3x3"]
FreezeBN = Literal["none", "all", "all_but_first"]
Adapter = Literal["none", "shift", "st"]
Positions = Literal["index", "grid"]
NonLocalForm = Literal["tsm", "original"]
NonLocal = Literal[False, NonLocalForm]

BACKBONES: tuple[str, ...] = get_args(ConvBackbone)
VIT_BACKBONES: tuple[str, ...] = get_args(ViTBackbone)
RESNETS = BACKBONES[:-1]
BOTTLENECK_BACKBONES = RESNETS[2:]


class Architecture(NamedTuple):
    """An architecture's limits.

    `backbones`: the 2D networks that it can be built on; with none the architecture is a network of its own.
    `minimum_frames`: the product of its strides in time. With fewer frames a stage would be down to one frame while
    strides are still to come: they would halve nothing, and the kernels there would see padding alone on both sides.
    `minimum_reason` gives another reason for it. `maximum_frames`: beyond it layers, some for each number of frames,
    take minutes to build; None for no limit. A clip has a multiple of `frames_step` frames, for `step_reason`.
    `non_local`: whether it takes non-local blocks, on its backbones that have bottleneck blocks.
    `frame_by_frame`: whether nothing but the shift and non-local blocks joins its frames, so that it can stream, as can
    a vit whose adapter is the shift.
    `no_maps`: why it has no class activation maps, None where its head is a global average and one linear layer.
    """

    title: str
    backbones: tuple[str, ...]
    minimum_frames: int = 1
    minimum_reason: str = "the product of its strides in time"
    maximum_frames: int | None = None
    frames_step: int = 1
    step_reason: str = ""
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
        "SlowFast", ("resnet50",), minimum_frames=8, frames_step=8, step_reason="its slow pathway sees every 8th",
        no_maps="its two pathways have different numbers of frames",
    ),
    "x3d_m": Architecture("X3D-M", (), no_maps="its classifier follows a layer that is not linear"),
    "ir_csn": Architecture("ir-CSN", ("resnet152",), minimum_frames=8),
    "vit": Architecture(
        "ViT", VIT_BACKBONES, minimum_frames=2, minimum_reason="those of a tubelet", frames_step=2,
        step_reason="a tubelet has two", norm_ends_branch=False,
        no_maps="its classifier follows a normalisation",
    ),
}  # fmt: skip


# The limits of a foreign network: one of the user's own, whose arch names the callable that builds it.
_FOREIGN = Architecture("a network of your own", (), norm_ends_branch=False)


def is_foreign(arch: str) -> bool:
    """Return whether `arch` is `package.module:callable` or `FILE.py:callable`, not a name of the list."""
    return ":" in arch


def architecture(arch: str) -> Architecture:
    """Return the limits of an architecture, or of a foreign network."""
    return _FOREIGN if is_foreign(arch) else ARCHITECTURES[arch]


def network_problems(
    arch: str, backbone: str | None, num_frames: int, non_local: NonLocal, zero_init_residual: bool, pool1: Pool1,
    crop: int | None = None, adapter: Adapter = "none",
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield what `arch` cannot be built of: (key of the spec, what is wrong and what would be right).

    crop: the side of the picture, where it is known; res4 leaves a sixteenth of it, which non-local blocks halve.
    """
    known = architecture(arch)
    least, most = known.minimum_frames, known.maximum_frames
    step = known.frames_step if adapter == "none" else 1  # with an adapter, a vit sees frames, not tubelets
    if num_frames % step:
        yield "data.num_frames", f"{arch} needs a multiple of {step} frames, {known.step_reason}; got {num_frames}"
    elif num_frames < least:
        yield "data.num_frames", f"{arch} needs at least {least} frames, {known.minimum_reason}, got {num_frames}"
    elif most is not None and num_frames > most:
        yield "data.num_frames", f"{arch} takes at most {most} frames, got {num_frames}"
    if backbone not in (known.backbones or (None,)):
        valid = f"{arch} cannot be built on {backbone}; valid: {', '.join(known.backbones)}"
        alone = f"{arch} is a network of its own, without a backbone; leave the key out"
        yield "model.backbone", valid if known.backbones else alone
    elif non_local and not (known.non_local and backbone in BOTTLENECK_BACKBONES):
        takers = ", ".join(name for name, other in ARCHITECTURES.items() if other.non_local)
        network = f"{arch} on {backbone}" if backbone else arch
        right = f"{takers} do, on one of {', '.join(BOTTLENECK_BACKBONES)}"
        yield "model.non_local", f"{network} takes no non-local blocks; {right}"
    elif non_local and crop is not None and crop <= 16:
        yield "model.non_local", f"non-local blocks need a crop of 17 pixels or more, got {crop}"
    if zero_init_residual and not known.norm_ends_branch:
        yield "model.zero_init_residual", f"no residual branch of {arch} ends in a normalisation"
    if pool1 != "2x3x3" and arch != "i3d_3x1x1":
        yield "model.pool1", f"{pool1} is for i3d_3x1x1, and {arch} has no choice; leave the key out"


def vit_problems(
    arch: str, adapter: Adapter, drop_path: float, positions: Positions, shift_place: ShiftPlace,
    sides: tuple[int | None, int | None] = (None, None),
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield what is wrong with the keys that only vit has, as network_problems does; others must leave them out.

    sides: of the squares in pixels, in training and in the evaluation; None in the evaluation for whole frames, and in
    training where they are not known.
    """
    given = {"adapter": adapter != "none", "drop_path": drop_path != 0, "positions": positions != "index"}
    if arch != "vit":
        for key in (key for key, is_given in given.items() if is_given):
            yield f"model.{key}", f"only vit has this key; leave it out with {arch}"
        return
    if adapter != "none" and given["positions"]:
        yield "model.positions", f"must be index with adapter {adapter}, which learns its positions; leave the key out"
    if adapter == "shift" and shift_place != "residual":
        yield "model.shift_place", f"must be residual for vit, got {shift_place}"
    for key, side in zip(("data.crop", "evaluate.short_side"), sides, strict=True):
        if side is not None and side % 16:
            yield key, f"must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got {side}"
    crop, tested = sides
    if crop is not None and adapter == "none" and positions == "index" and tested != crop:
        # The number of a patch in a grid of another width is that of another place.
        key, found = ("evaluate.crops", "full") if tested is None else ("evaluate.short_side", tested)
        right = "must be 1 or 3" if tested is None else f"must be data.crop, {crop},"
        yield key, f"{right} for a vit that numbers the patches of its grid (model.positions index), got {found}"


def maps_problem(arch: str) -> str | None:
    """Return why `arch` has no class activation maps, and what has; None where a linear layer follows its average."""
    reason = architecture(arch).no_maps
    if reason is None:
        return None
    takers = ", ".join(name for name, known in ARCHITECTURES.items() if known.no_maps is None)
    return f"{arch} has no class activation maps: {reason}; {takers} have them"


def stream_problem(
    arch: str, shift_direction: ShiftDirection, non_local: NonLocal, adapter: Adapter = "none"
) -> str | None:
    """Return why a network cannot see a video frame by frame, and what can; None where it can."""
    shifts = arch == "tsm" or adapter == "shift"
    if not (architecture(arch).frame_by_frame or shifts):
        return f"{arch} cannot stream: it sees whole clips; a tsm with model.shift_direction past can, and a tsn"
    if non_local:
        return "non-local blocks attend to all frames of a clip, so the network cannot stream; it can without them"
    if shifts and shift_direction != "past":
        return f"this {arch} cannot stream: its shift needs the next frame; train one with model.shift_direction past"
    return None
