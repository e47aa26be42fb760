"""The keys of `data`: the videos, the frames taken from them, and how training varies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from summit_train.core.machine import rank_cpus
from summit_train.core.own_parts import OwnPart
from summit_train.spec.augment import AUGMENTS, AugmentSpec, BuiltInAugment, MixSpec, RandAugmentSpec
from summit_train.spec.modality import RGB, Modality, ModalityName, flow
from summit_train.spec.typed import Count, Extent, Fraction, NonNegative, PathText, Seconds, Section, by_name

# The tags do not appear in messages. Not strict: below a validator pydantic refuses a list as a tuple.
_Own = Annotated[AugmentSpec, by_name(AugmentSpec)]
_Augments = Annotated[tuple[_Own, ...], Field(strict=False), Tag("tuple[list]")]
Augment = Annotated[
    Annotated[BuiltInAugment, Tag("tuple[word]")] | _Augments,
    Discriminator(lambda given: "tuple[list]" if isinstance(given, list | tuple) else "tuple[word]"),
    BeforeValidator(lambda given: given[0] if given in [[name] for name in AUGMENTS] else given),
]


class DataSpec(Section):
    """The videos, the frames taken from them, and the crop."""

    train: PathText
    """Training set: a manifest (CSV, or lines `path label`), a folder of class folders, or the folder of a packed
    set."""
    val: PathText
    """Validation set, in the same forms."""
    root: PathText | None = None
    """Folder that relative video paths start at; null: each manifest's own folder. A folder that lacks the first clip
    is refused if the manifest's own folder has it."""
    region: Literal["columns"] | None = None
    """columns: use only the region given by the manifest's columns left, top, width and height, in pixels of the
    upright frame; null: the whole frame."""
    modality: ModalityName = "rgb"
    """rgb: frames; flow: optical flow, as `data flow` makes it of the videos."""
    flow_length: Annotated[int, Field(ge=1, le=64)] = 5
    """flow: consecutive fields that each frame of a clip stacks; it has twice as many channels."""
    num_frames: Extent = 8
    """Frames of a clip (T)."""
    frame_stride: Count = 8
    """dense: distance between two frames of a clip."""
    sampling: Literal["dense", "uniform"] = "dense"
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
    rand_augment: RandAugmentSpec | None = None
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
    repeats: Count = 1
    """Each clip is read once and augmented this many times for its batch (repeated augmentation): a batch has
    clips_per_gpu / repeats different clips, and an epoch this many times the steps."""
    erase: Fraction = 0.0
    """Random erasing: probability that a box of a clip, the same in all frames, is replaced by noise."""
    mix: MixSpec | None = None
    """Mixup and CutMix; null: neither."""
    quarantine: PathText | None = None
    """List of clips to leave out, as `data scan` writes it."""
    on_bad_clip: Literal["fail", "skip"] = "fail"
    """A clip that cannot be read ends the run (fail), or another clip replaces it (skip). Replacements are counted and
    named; an unreadable validation video counts as wrong."""
    max_bad_fraction: Fraction = 0.01
    """skip: the run ends if more than this fraction of an epoch or of a test is bad."""
    clip_seconds: Seconds = 120
    """A clip is bad if reading it takes longer, seconds."""
    stage: PathText | None = None
    """Folder on each node to copy packed sets to; auto: a job copies them to the site's node_local."""
    workers: NonNegative | None = None
    """Loader processes of each rank; 0 loads in the training process; null: as many as the rank has cores, at most
    4."""

    @property
    def built_in_augment(self) -> str:
        """The built-in augmentation, which the list begins with: what of a frame a clip shows."""
        return self.augment if isinstance(self.augment, str) else next((one.kind for one in self.augment), "")

    def open_augment(self) -> list[OwnPart]:
        """Open the augmentations of the user's own, in their order. Raises UserError for one without a file."""
        own = () if isinstance(self.augment, str) else self.augment[1:]
        return [OwnPart.open("data.augment", one.kind, one.options) for one in own]

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
        """Return what a frame of a clip holds."""
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


def data_problems(data: DataSpec, clips_per_gpu: int) -> Iterator[tuple[str, str]]:
    """Yield the keys of data that are impossible together: (key, what is wrong)."""
    if not isinstance(data.augment, str):
        kinds = [one.kind for one in data.augment]
        if [kind in AUGMENTS for kind in kinds] != [True, *[False] * (len(kinds) - 1)] or data.augment[0].options:
            right = f"one of {', '.join(AUGMENTS)}, then augmentations of your own"
            yield "data.augment", f"must be {right}, got {', '.join(kinds) or 'none'}"
            return
    low, high = data.short_side
    if low > high:
        yield "data.short_side", f"must be [low, high], got [{low}, {high}]"
    if data.built_in_augment == "scale_jitter" and data.crop > low:
        yield "data.crop", f"a crop of {data.crop} does not fit a short side of {low} (data.short_side)"
    if data.crop_scales == ():
        yield "data.crop_scales", "must be null or have at least one scale, got []"
    least, most = data.rand_augment_settings.crop_area
    if least > most:
        yield "data.rand_augment.crop_area", f"must be [low, high], got [{least:g}, {most:g}]"
    if data.built_in_augment == "rand_augment" and data.modality == "flow":
        yield "data.augment", "rand_augment changes colours, and flow has none; use multi_scale_crop or scale_jitter"
    if data.built_in_augment != "rand_augment" and data.rand_augment is not None:
        yield "data.rand_augment", f"augment {data.built_in_augment} does not read it; set data.augment to rand_augment"
    if clips_per_gpu % data.repeats:
        yield "data.repeats", f"must divide scale.clips_per_gpu, {clips_per_gpu}, got {data.repeats}"
    if data.mix is not None and not (data.mix.mixup or data.mix.cutmix):
        yield "data.mix", "must have mixup or cutmix above 0; try {mixup: 0.8, cutmix: 1.0}, or null"
    if data.mix is not None and clips_per_gpu // data.repeats < 2:
        clips = f"scale.clips_per_gpu {clips_per_gpu} with data.repeats {data.repeats}"
        yield "data.mix", f"must be null: clips are mixed within a virtual GPU, and {clips} has only one"
