"""The keys of `model`: what a network is, what of it learns, and where its weights begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from summit_train.spec import catalog
from summit_train.spec.catalog import ARCHITECTURES, BOTTLENECK_BACKBONES, architecture
from summit_train.spec.detector import DetectorSpec
from summit_train.spec.typed import Count, Named, PathText, Section

ArchName = Annotated[str, Named(tuple(ARCHITECTURES))]


class NetworkSpec(Section):
    """What a network is; in a spec, a part of `model`."""

    arch: ArchName
    """tsn is the 2D network, tsm adds the temporal shift, the I3Ds inflate 2D kernels in time, trn relates the frames
    of a 2D ResNet, vit is a transformer; the others are the networks of their papers. Wrong backbones and too few
    frames are refused. package.module:callable or FILE.py:callable is a network of your own; its code runs."""
    options: dict[str, Any] = Field(default={})
    """A network of your own: keyword arguments of its callable, in addition to num_classes and num_frames."""
    backbone: catalog.Backbone | None = None
    """The 2D network that the architecture is built on. null: its usual one, or none where it is a network of its
    own."""
    width: Annotated[float, Field(gt=0, le=8)] = 1.0
    """Factor on every channel count."""
    num_classes: Count
    """Labels are 0 to num_classes - 1."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping a feature before the classifier; trn: before each frame's linear layer."""
    zero_init_residual: bool = False
    """The last batch normalisation of each residual branch begins at 0 (Goyal et al.)."""
    shift_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.125
    """tsm, adapter shift: fraction of the channels shifted in each direction."""
    shift_place: catalog.ShiftPlace = "residual"
    """tsm: shift the input of the residual branch only, or of the whole block."""
    shift_direction: catalog.ShiftDirection = "both"
    """tsm, adapter shift: exchange features with both neighbouring frames, or read past frames only."""
    non_local: catalog.NonLocal = False
    """Non-local blocks after two blocks of res3 and three of res4. tsm: places and form of Lin et al.'s code; original:
    those of Wang et al.'s. Needs bottleneck blocks, and a crop of 17 or more."""
    pool1: catalog.Pool1 = "2x3x3"
    """i3d_3x1x1: the pooling after conv1. Weights of mmaction2 need 1x3x3, those of Wang et al. 2x3x3_unpadded."""
    adapter: catalog.Adapter = "none"
    """vit: with none, attention joins all tubelets of a clip. The others treat each frame as an image: shift moves
    channels of tokens between frames, st puts an ST-Adapter before each attention."""
    positions: catalog.Positions = "index"
    """vit without adapter: positions from the index of the patch (VideoMAE), or from time, row and column, with a third
    of the channels each (grid_uniform: V-JEPA's published files) or half of them for the time (grid)."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """vit: probability of skipping the last block's branches for a clip; it grows linearly from 0 in the first
    block."""

    @model_validator(mode="before")
    @classmethod
    def _name_backbone(cls, values: Any) -> Any:
        known = ARCHITECTURES.get(str(values.get("arch"))) if isinstance(values, dict) else None
        if known is None or values.get("backbone") is not None:
            return values
        return {**values, "backbone": known.usual_backbone}

    @property
    def title(self) -> str:
        """Architecture and backbone: "tsm resnet50"."""
        return " ".join(name for name in (self.arch, self.backbone) if name)


class ModelSpec(NetworkSpec):
    """The network."""

    freeze_trunk: bool = False
    """Train only the classifier, adapters and non-local blocks. Needs model.pretrained."""
    freeze_bn: catalog.FreezeBN = "none"
    """Batch normalisations that keep their running statistics, weight and bias, for fine-tuning."""
    detector: DetectorSpec | None = None
    """Keys of task detection, else null."""
    pretrained: PathText | None = None
    """Initial weights: a run folder, a checkpoint, or a file with the names of torchvision, the TSM authors or
    mmaction2; for vit, of VideoMAE, V-JEPA, timm or transformers. I3D inflates 2D weights; i3d_replace converts a TSM's
    shifts; for clips with other channels the first layer is averaged over its own. null: random weights."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # options cannot be hashed


def network_problems(network: NetworkSpec, num_frames: int, crop: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield what cannot be built: (key of the spec, what is wrong and what would be right).

    crop: the side of the picture, where it is known; res4 leaves a sixteenth of it, which non-local blocks halve.
    """
    arch, backbone, known = network.arch, network.backbone, architecture(network.arch)
    least, most = known.minimum_frames, known.maximum_frames
    step = known.frames_step if network.adapter == "none" else 1  # with an adapter, a vit sees frames, not tubelets
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
    elif network.non_local and not (known.non_local and backbone in BOTTLENECK_BACKBONES):
        takers = ", ".join(name for name, other in ARCHITECTURES.items() if other.non_local)
        right = f"{takers} do, on one of {', '.join(BOTTLENECK_BACKBONES)}"
        yield "model.non_local", f"{f'{arch} on {backbone}' if backbone else arch} takes no non-local blocks; {right}"
    elif network.non_local and crop is not None and crop <= 16:
        yield "model.non_local", f"non-local blocks need a crop of 17 pixels or more, got {crop}"
    if network.zero_init_residual and not known.norm_ends_branch:
        yield "model.zero_init_residual", f"no residual branch of {arch} ends in a normalisation"
    if network.pool1 != "2x3x3" and arch != "i3d_3x1x1":
        yield "model.pool1", f"{network.pool1} is for i3d_3x1x1, and {arch} has no choice; leave the key out"
    adapter, has_positions = network.adapter, network.positions != "index"
    if arch != "vit":
        given = {"adapter": adapter != "none", "drop_path": network.drop_path != 0, "positions": has_positions}
        for key in (key for key, is_given in given.items() if is_given):
            yield f"model.{key}", f"only vit has this key; leave it out with {arch}"
    elif adapter != "none" and has_positions:
        yield "model.positions", f"must be index with adapter {adapter}, which learns its positions; leave the key out"
    if arch == "vit" and adapter == "shift" and network.shift_place != "residual":
        yield "model.shift_place", f"must be residual for vit, got {network.shift_place}"


def size_problems(network: NetworkSpec, crop: int, tested: int | None) -> Iterator[tuple[str, str]]:
    """Yield the sizes of pictures that a vit cannot take, as network_problems does.

    crop, tested: sides of the squares in training and in the evaluation, in pixels; None there for whole frames.
    """
    if network.arch != "vit":
        return
    for key, side in (("data.crop", crop), ("evaluate.short_side", tested)):
        if side is not None and side % 16:
            yield key, f"must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got {side}"
    if network.adapter == "none" and network.positions == "index" and tested != crop:
        # The number of a patch in a grid of another width is that of another place.
        key, found = ("evaluate.crops", "full") if tested is None else ("evaluate.short_side", tested)
        right = "must be 1 or 3" if tested is None else f"must be data.crop, {crop},"
        yield key, f"{right} for a vit that numbers the patches of its grid (model.positions index), got {found}"


def stream_problem(network: NetworkSpec) -> str | None:
    """Return why a network cannot see a video frame by frame, and what can; None where it can."""
    arch, shifts = network.arch, network.arch == "tsm" or network.adapter == "shift"
    if not (architecture(arch).frame_by_frame or shifts):
        past = "a tsm, or a vit with model.adapter shift, with model.shift_direction past"
        return f"{arch} cannot stream: it sees whole clips; a tsn can, and {past}"
    if network.non_local:
        return "non-local blocks attend to all frames of a clip, so the network cannot stream; it can without them"
    if shifts and network.shift_direction != "past":
        return f"this {arch} cannot stream: its shift needs the next frame; train one with model.shift_direction past"
    return None
