"""Names and limits of every network, and what a frame holds, without torch: the choices of a spec come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

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
ModalityName = Literal["rgb", "flow"]
Positions = Literal["index", "grid", "grid_uniform"]
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
    `minimum_reason`: another one. `maximum_frames`: beyond it layers, some for each number of frames, take minutes to
    build; None for no limit. A clip has a multiple of `frames_step` frames, for `step_reason`. `non_local`: whether it
    takes non-local blocks, on its backbones that have bottleneck blocks. `frame_by_frame`: whether nothing but the
    shift and non-local blocks joins its frames, so that it can stream, as can a vit whose adapter is the shift.
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
    """True if an arch is not a name of the list, but `package.module:callable` or `FILE.py:callable`."""
    return ":" in arch


def architecture(arch: str) -> Architecture:
    """Return the limits of an architecture, or of a foreign network."""
    return _FOREIGN if is_foreign(arch) else ARCHITECTURES[arch]


def maps_problem(arch: str) -> str | None:
    """Return why `arch` has no class activation maps, and what has; None where a linear layer follows its average."""
    reason = architecture(arch).no_maps
    if reason is None:
        return None
    takers = ", ".join(name for name, known in ARCHITECTURES.items() if known.no_maps is None)
    return f"{arch} has no class activation maps: {reason}; {takers} have them"


# The value of no motion in a picture of flow, v = round(255 (f + bound) / (2 bound)): 127.5, rounded to even.
FLOW_ZERO = 128


@dataclass(frozen=True)
class Modality:
    """The content of one frame of a clip. mean, std: of each channel, in units of the uint8 values 0 .. 255.

    crop_scales: sides of the multi-scale crop, as parts of a frame's shorter side, where the spec has none.
    """

    name: str
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_scales: tuple[float, ...] = ()


# Mean and standard deviation over ImageNet. Scales: Wang et al., "Temporal segment networks", section 3.2.
RGB = Modality(
    "rgb",
    channels=3,
    mean=(0.485 * 255, 0.456 * 255, 0.406 * 255),
    std=(0.229 * 255, 0.224 * 255, 0.225 * 255),
    crop_scales=(1.0, 0.875, 0.75, 0.66),
)


def flow(length: int) -> Modality:
    """Return the modality of frames that stack `length` fields of optical flow: channels x, y, x, y, ...

    The deviation and the scales are those of the TSM authors' code (ops/dataset_config.py, ops/models.py); their mean
    is 127.5. Here it is the value of no motion: still parts are exactly 0, as the padding of convolutions is, and a
    field turned round is exactly the negative one. To their weights that is a shift of 0.009 deviations.
    """
    channels = 2 * length
    return Modality("flow", channels, (float(FLOW_ZERO),) * channels, (0.226 * 255,) * channels, (1.0, 0.875, 0.75))
