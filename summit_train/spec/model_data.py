"""The keys of `model` and `data`: a network, and the clips that it sees."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from summit_train.core.machine import rank_cpus
from summit_train.core.own_parts import OwnPart
from summit_train.spec import catalog
from summit_train.spec.catalog import ARCHITECTURES, RGB, Modality, flow
from summit_train.spec.typed import (
    BUILT_IN,
    CLASSIFYING,
    LAX,
    OWN,
    Count,
    Extent,
    Fraction,
    Named,
    NonNegative,
    OwnSpec,
    PathText,
    ReadWith,
    Scope,
    Seconds,
    Section,
    by_name,
)

ArchName = Annotated[str, Named(tuple(ARCHITECTURES))]
BuiltInAugment = Literal["scale_jitter", "multi_scale_crop", "rand_augment", "whole"]
AUGMENTS: tuple[str, ...] = get_args(BuiltInAugment)
Alpha = Annotated[float, Field(ge=0, le=100)]
Area = Annotated[float, Field(gt=0, le=1)]
Side = Annotated[float, Field(gt=0, le=4096)]
Ratio = Annotated[float, Field(gt=0, le=100)]

_IF_BUILT_IN = ReadWith("arch", BUILT_IN, "use model.options instead")
_IF_OWN = ReadWith("arch", OWN, "options of a built-in one are keys of model")
_IF_VIT = ReadWith("arch", "vit")
_IF_NO_ADAPTER = ReadWith("adapter", "none", "the others learn their positions")


class NetworkSpec(Section):
    """The definition of a network; in a spec, a part of `model`."""

    arch: ArchName
    """tsn is the 2D network, tsm adds the temporal shift, the I3Ds inflate 2D kernels in time, trn relates the frames
    of a 2D ResNet, vit is a transformer; the others are the networks of their papers. Wrong backbones and too few
    frames are refused. package.module:callable or FILE.py:callable is a network of your own; its code runs."""
    options: Annotated[dict[str, Any], _IF_OWN] = Field(default={})
    """A network of your own: keyword arguments of its callable, in addition to num_classes and num_frames."""
    backbone: catalog.Backbone | None = None
    """The 2D network that the architecture is built on. null: its usual one, or none where it is a network of its
    own."""
    width: Annotated[float, Field(gt=0, le=8), _IF_BUILT_IN] = 1.0
    """Factor on every channel count."""
    num_classes: Count
    """Labels are 0 to num_classes - 1."""
    dropout: Annotated[float, Field(ge=0, lt=1), _IF_BUILT_IN, CLASSIFYING] = 0.0
    """Probability of dropping a feature before the classifier; trn: before each frame's linear layer."""
    zero_init_residual: bool = False
    """The last batch normalisation of each residual branch begins at 0 (Goyal et al.)."""
    shift_fraction: Annotated[float, Field(ge=0, le=0.5), _IF_BUILT_IN] = 0.125
    """tsm, adapter shift: fraction of the channels shifted in each direction."""
    shift_place: Annotated[catalog.ShiftPlace, _IF_BUILT_IN] = "residual"
    """tsm: shift the input of the residual branch only, or of the whole block."""
    shift_direction: Annotated[catalog.ShiftDirection, _IF_BUILT_IN] = "both"
    """tsm, adapter shift: exchange features with both neighbouring frames, or read past frames only."""
    non_local: Annotated[catalog.NonLocal, CLASSIFYING] = False
    """Non-local blocks after two blocks of res3 and three of res4. tsm: places and form of Lin et al.'s code; original:
    those of Wang et al.'s. Needs bottleneck blocks, and a crop of 17 or more."""
    pool1: Annotated[catalog.Pool1, ReadWith("arch", "i3d_3x1x1")] = "2x3x3"
    """i3d_3x1x1: the pooling after conv1. Weights of mmaction2 need 1x3x3, those of Wang et al. 2x3x3_unpadded."""
    adapter: Annotated[catalog.Adapter, _IF_VIT] = "none"
    """vit: with none, attention joins all tubelets of a clip. The others treat each frame as an image: shift moves
    channels of tokens between frames, st puts an ST-Adapter before each attention."""
    positions: Annotated[catalog.Positions, _IF_VIT, _IF_NO_ADAPTER] = "index"
    """vit without adapter: positions from the index of the patch (VideoMAE), or from time, row and column, with a third
    of the channels each (grid_uniform: V-JEPA's published files) or half of them for the time (grid)."""
    drop_path: Annotated[float, Field(ge=0, lt=1), _IF_VIT] = 0.0
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


class DetectorSpec(Section):
    """R-FCN on the trunk of `model` (Dai et al. 2016), with the settings of FGFA's code; see docs/detection.md."""

    channels: Count = 1024
    """Channels of the 3x3 convolution after the trunk, multiplied by model.width. Half are for the proposals, half for
    the detections."""
    freeze_stem: bool = False
    """Freeze conv1 and res2, of mobilenet_v2 what comes before a stride of 8. Needs model.pretrained."""
    anchor_sides: Annotated[tuple[Side, ...], LAX, Field(min_length=1, max_length=20)] = (128.0, 256.0, 512.0)
    """Sides of the square anchors, in pixels of the scaled frame."""
    anchor_ratios: Annotated[tuple[Ratio, ...], LAX, Field(min_length=1, max_length=20)] = (0.5, 1.0, 2.0)
    """Height divided by width of the anchors. Each anchor has the area of its square."""
    grid: Annotated[int, Field(ge=1, le=14)] = 7
    """Position-sensitive pooling uses grid x grid cells."""
    proposals: Count = 300
    """Proposals per frame, after non-maximum suppression."""
    hard_examples: Count = 128
    """Proposals per frame that are trained on: those with the highest loss."""
    nms: Fraction = 0.3
    """Non-maximum suppression: of two detections of one class that overlap by more than this IoU, only the one with the
    higher score is kept."""
    max_boxes: Count = 300
    """Most detections per frame; those with the highest scores are kept."""
    min_score: Fraction = 0.001
    """Detections with a lower score are dropped."""


class ModelSpec(NetworkSpec):
    """The network."""

    freeze_trunk: Annotated[bool, _IF_BUILT_IN] = False
    """Train only the classifier, adapters and non-local blocks. Needs model.pretrained."""
    freeze_bn: catalog.FreezeBN = "none"
    """Batch normalisations that keep their running statistics, weight and bias, for fine-tuning."""
    detector: DetectorSpec | None = None
    """Keys of task detection, else null."""
    # RUN: a checkpoint has the weights that these have become.
    pretrained: Annotated[PathText | None, Scope.RUN] = None
    """Initial weights: a run folder, a checkpoint, or a file with the names of torchvision, the TSM authors or
    mmaction2; for vit, of VideoMAE, V-JEPA, timm or transformers. I3D inflates 2D weights; i3d_replace converts a TSM's
    shifts; for clips with other channels the first layer is averaged over its own. null: random weights."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # options cannot be hashed


class AugmentSpec(OwnSpec):
    """An augmentation: a built-in one's name, or one of your own with its options."""

    kind: Annotated[str, Named(AUGMENTS)]


class RandAugmentSpec(Section):
    """Settings of augment: rand_augment, random operations on the crop, the same for all frames of a clip."""

    magnitude: Annotated[float, Field(ge=0, le=10)] = 7.0
    """Mean strength of an operation, 0 to 10."""
    std: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Standard deviation of the strength."""
    layers: Annotated[int, Field(ge=0, le=100)] = 4
    """Number of operations drawn in sequence; each is applied with probability 1/2. 0: only the crop."""
    crop_area: tuple[Area, Area] = (0.08, 1.0)
    """The crop's share of the frame's area is drawn from [low, high], its aspect ratio from 3/4 to 4/3."""


class MixSpec(Section):
    """Mixes each clip, and its label, with the clip at its place in the reversed batch of its virtual GPU."""

    mixup: Alpha = 0.0
    """Mixup: blend the two clips; the share is drawn from Beta(mixup, mixup). 0: never."""
    cutmix: Alpha = 0.0
    """CutMix: replace a box, the same in all frames; its area is drawn from Beta(cutmix, cutmix). 0: never."""
    probability: Fraction = 1.0
    """Fraction of the batches of a virtual GPU that are mixed."""
    switch: Fraction = 0.5
    """If mixup and cutmix are both above 0: fraction of the mixed batches that get CutMix."""


_Augments = Annotated[tuple[Annotated[AugmentSpec, by_name(AugmentSpec)], ...], LAX, Tag("tuple[list]")]
# The tags begin with "tuple[", as pydantic's own words in the place of a mistake that messages leave out.
Augment = Annotated[
    Annotated[BuiltInAugment, Tag("tuple[word]")] | _Augments,
    Discriminator(lambda given: "tuple[list]" if isinstance(given, list | tuple) else "tuple[word]"),
    BeforeValidator(lambda given: given[0] if given in [[name] for name in AUGMENTS] else given),
]


class DataSpec(Section):
    """The videos, the frames taken from them, and the crop."""

    removed: ClassVar = {
        "quarantine": "was removed; write the list without bad clips by `summit-train data scan LIST --out CLEAN.csv` "
        "and use that, then delete this key or set it to null"
    }

    train: Annotated[PathText, Scope.PLACE | Scope.PRECISE_BN]
    """Training set: a manifest (CSV, or lines `path label`), a folder of class folders, or the folder of a packed
    set."""
    val: Annotated[PathText, Scope.PLACE | Scope.SCORES]
    """Validation set, in the same forms."""
    root: Annotated[PathText | None, Scope.PLACE] = None
    """Folder that relative video paths start at; null: each manifest's own folder. A folder that lacks the first clip
    is refused if the manifest's own folder has it."""
    region: Annotated[Literal["columns"] | None, CLASSIFYING] = None
    """columns: use only the region given by the manifest's columns left, top, width and height, in pixels of the
    upright frame; null: the whole frame."""
    modality: Annotated[catalog.ModalityName, CLASSIFYING] = "rgb"
    """rgb: frames; flow: optical flow, as `data flow` makes it of the videos."""
    flow_length: Annotated[int, Field(ge=1, le=64)] = 5
    """flow: consecutive fields that each frame of a clip stacks; it has twice as many channels."""
    num_frames: Extent = 8
    """Frames of a clip (T)."""
    frame_stride: Count = 8
    """dense: distance between two frames of a clip."""
    sampling: Annotated[Literal["dense", "uniform"], CLASSIFYING] = "dense"
    """dense: a window of num_frames * frame_stride frames; uniform: one frame from each of T segments."""
    augment: Augment = "scale_jitter"
    """scale_jitter: random short side, then a random crop; multi_scale_crop: crop of a random size; rand_augment: crop
    of a random area and aspect, then RandAugment; whole: the whole frame with a random short side. In a list,
    augmentations of your own may follow, named like a network (model.arch) or {kind, options}; their code runs."""
    short_side: tuple[Extent, Extent] = (256, 320)
    """scale_jitter, whole: the short side is drawn from [low, high], pixels."""
    long_side: Extent | None = None
    """Whole frames: the long side of a scaled one is at most this, in training and evaluation; null: no limit.
    Counts and costs of augment whole are for frames this wide and as high as the largest short_side; null: squares."""
    crop_scales: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(max_length=100)] | None = None
    """multi_scale_crop: sides of the crops, as parts of the short side; a crop's two sides are at most one step apart.
    null: 1, 0.875, 0.75, 0.66; for flow without the last."""
    rand_augment: Annotated[RandAugmentSpec | None, ReadWith("augment", "rand_augment")] = None
    """rand_augment: its settings; null: the defaults, VideoMAE's."""
    crop: Extent = 224
    """Side of the training crop, pixels; not read by whole."""
    flip: bool = True
    """Mirror half of the clips. Use false where labels distinguish left from right."""
    span_frames: Count | None = None
    """Lists with annotated frames: divide each training video into spans of this many frames or a few more, each a clip
    of its epoch; null: one clip of each video."""
    balance: Literal["none", "classes"] = "none"
    """Clips of an epoch. none: each clip once; classes: the same total number, with an equal share from each class."""
    repeats: Annotated[Count, CLASSIFYING] = 1
    """Each clip is read once and augmented this many times for its batch (repeated augmentation): a batch has
    clips_per_gpu / repeats different clips, and an epoch this many times the steps."""
    erase: Annotated[Fraction, CLASSIFYING] = 0.0
    """Random erasing: probability that a box of a clip, the same in all frames, is replaced by noise."""
    mix: Annotated[MixSpec | None, CLASSIFYING] = None
    """Mixup and CutMix; null: neither."""
    on_bad_clip: Annotated[Literal["fail", "skip"], Scope.SCORES] = "fail"
    """A clip that cannot be read ends the run (fail), or another clip replaces it (skip). Replacements are counted and
    named; an unreadable validation video counts as wrong."""
    max_bad_fraction: Annotated[Fraction, Scope.SCORES] = 0.01
    """skip: the run ends if more than this fraction of an epoch or of a test is bad."""
    clip_seconds: Annotated[Seconds, Scope.RUN] = 120
    """A clip is bad if reading it takes longer, seconds."""
    stage: Annotated[PathText | None, Scope.PLACE] = None
    """Folder on each node to copy packed sets to; auto: a job copies them to the site's node_local."""
    workers: Annotated[NonNegative | None, Scope.RUN] = None
    """Loader processes of each rank; 0 loads in the training process; null: as many as the rank has cores, at most
    4."""

    @property
    def built_in_augment(self) -> str:
        """The built-in augmentation, which the list begins with: what of a frame a clip shows."""
        return self.augment if isinstance(self.augment, str) else next((augment.kind for augment in self.augment), "")

    def open_augment(self) -> list[OwnPart]:
        """Open the augmentations of the user's own, in their order. Raises UserError for one without a file."""
        own = () if isinstance(self.augment, str) else self.augment[1:]
        return [OwnPart.open("data.augment", augment.kind, augment.options) for augment in own]

    @property
    def rand_augment_settings(self) -> RandAugmentSpec:
        return self.rand_augment or RandAugmentSpec()

    def num_workers(self, local_ranks: int = 1) -> int:
        """Return the loader processes of a rank that is one of `local_ranks` on its node."""
        return min(4, rank_cpus(local_ranks)) if self.workers is None else self.workers

    def on_node(self, local_ranks: int) -> DataSpec:
        return self.model_copy(update={"workers": self.num_workers(local_ranks)})

    @property
    def input(self) -> Modality:
        """Return the content of a clip's frames."""
        return RGB if self.modality == "rgb" else flow(self.flow_length)

    @property
    def clip_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of a uint8 training clip, (T, H, W, C): what counts, memory and costs are of.

        Of whole frames it is the largest landscape that long_side allows, without it a square: wider frames cost more.
        """
        height = width = self.crop
        if self.built_in_augment == "whole":
            width = self.long_side or self.short_side[1]
            height = min(self.short_side[1], width)
        return (self.num_frames, height, width, self.input.channels)
