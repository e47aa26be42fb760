"""The experiment spec: YAML -> frozen, typed Spec, or a message a person can act on.

Every key, its type, its default and its limits are here, those of optimizer, schedule and parallel in optimizer.py.
The plan checks what depends on the number of ranks or of clips.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from summit_train.core.errors import UserError
from summit_train.spec.augment import MixSpec, RandAugmentSpec
from summit_train.spec.catalog import (
    ARCHITECTURES,
    Arch,
    Backbone,
    FreezeBN,
    NonLocal,
    Pool1,
    ShiftDirection,
    ShiftPlace,
    network_problems,
    stream_problem,
)
from summit_train.spec.modality import RGB, Modality, ModalityName, flow
from summit_train.spec.optimizer import (
    OptimizerSpec,
    ParallelSpec,
    ScheduleSpec,
    optimizer_problems,
    parallel_problems,
    schedule_problems,
)
from summit_train.spec.source import Tree, read_tree, to_yaml
from summit_train.spec.typed import Count, Fraction, NonNegative, Seconds, Section, validated


def _expand(path: str) -> str:
    """Expand ~ and $NAME; a variable that is not set would silently name another place."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+|\{\w+\})", expanded)
    if unset:
        raise ValueError(f"the environment variable {unset.group()} is not set")
    if not expanded or "\0" in expanded:
        raise ValueError("the path must not be empty")
    return expanded


def _folder_name(name: str) -> str:
    """The name becomes a folder below run_dir: one path component, whatever other characters it has."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        right = "1 to 200 bytes without '/' and control characters, and not '.' or '..'"
        raise ValueError(f"the name becomes a folder: must be {right}")
    return name


PathText = Annotated[str, AfterValidator(_expand)]
FolderName = Annotated[str, AfterValidator(_folder_name)]
Extent = Annotated[int, Field(ge=1, le=4096)]  # of a clip; non-local blocks relate every two of its pixels


class ModelSpec(Section):
    """The network."""

    arch: Arch
    """tsn is the 2D network, tsm adds the temporal shift, the I3Ds inflate 2D kernels in time, trn relates the frames
    of a 2D ResNet; the others are the networks of their papers. Wrong backbones and too few frames are refused."""
    backbone: Backbone | None = None
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
    """tsm: fraction of the channels shifted in each direction."""
    shift_place: ShiftPlace = "residual"
    """tsm: shift the input of the residual branch only, or of the whole block."""
    shift_direction: ShiftDirection = "both"
    """tsm: exchange features with both neighbouring frames, or read past frames only."""
    non_local: NonLocal = False
    """Non-local blocks after two blocks of res3 and three of res4. tsm: places and form of Lin et al.'s code; original:
    those of Wang et al.'s. Needs bottleneck blocks, and a crop of 17 or more."""
    pool1: Pool1 = "2x3x3"
    """i3d_3x1x1: the pooling after conv1. Weights of mmaction2 need 1x3x3, those of Wang et al. 2x3x3_unpadded."""
    freeze_bn: FreezeBN = "none"
    """Batch normalisations that keep their running statistics, weight and bias, for fine-tuning."""
    pretrained: PathText | None = None
    """Initial weights: a file under torchvision's, the TSM authors' or mmaction2's names, a checkpoint, or a run
    folder. I3D inflates 2D weights; i3d_replace takes a TSM's shifts over; for clips of other channels the first layer
    is averaged over its own. null: random weights."""

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
    modality: ModalityName = "rgb"
    """rgb: pictures; flow: optical flow, as `data flow` makes it of the videos."""
    flow_length: Annotated[int, Field(ge=1, le=64)] = 5
    """flow: consecutive fields that each frame of a clip stacks; it has twice as many channels."""
    num_frames: Extent = 8
    """Frames of a clip (T)."""
    frame_stride: Count = 8
    """dense: distance between two frames of a clip."""
    sampling: Literal["dense", "uniform"] = "dense"
    """dense: a window of num_frames * frame_stride frames; uniform: one frame from each of T segments."""
    augment: Literal["scale_jitter", "multi_scale_crop", "rand_augment"] = "scale_jitter"
    """scale_jitter: random short side, then a random crop; multi_scale_crop: crop of a random size; rand_augment: crop
    of a random area and aspect, then RandAugment."""
    short_side: tuple[Extent, Extent] = (256, 320)
    """scale_jitter: the short side is drawn from [low, high], pixels."""
    crop_scales: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(max_length=100)] | None = None
    """multi_scale_crop: sides of the crops, as parts of the short side; a crop's two sides are at most one step apart.
    null: 1, 0.875, 0.75, 0.66; for flow without the last."""
    rand_augment: RandAugmentSpec | None = None
    """rand_augment: its settings; null: their defaults, those of VideoMAE."""
    crop: Extent = 224
    """Side of the training crop, pixels."""
    flip: bool = True
    """Mirror half of the clips. Use false where labels distinguish left from right."""
    repeats: Count = 1
    """Each clip is read once and augmented this many times for its batch (repeated augmentation): a batch has
    clips_per_gpu / repeats different clips, and an epoch this many times the steps."""
    erase: Fraction = 0.0
    """Probability that a box of a clip, the same one in all frames, becomes noise (random erasing)."""
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
    workers: NonNegative = 4
    """Loader processes of each rank; 0 loads in the training process."""

    @property
    def rand_augment_settings(self) -> RandAugmentSpec:
        """What augment rand_augment does."""
        return self.rand_augment or RandAugmentSpec()

    @property
    def input(self) -> Modality:
        """What a frame of a clip holds."""
        return RGB if self.modality == "rgb" else flow(self.flow_length)


class ScaleSpec(Section):
    """The global batch: virtual GPUs times clips per GPU. The number of ranks does not change the experiment."""

    gpus: Count | None = None
    """Virtual GPUs; the number of ranks must divide it. null: as many as ranks, which makes the number of ranks part of
    the experiment."""
    clips_per_gpu: Count = 8
    """Clips of one virtual GPU in a step; the batch of batch normalisation."""


class LossSpec(Section):
    """The training loss: cross-entropy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of each label that is spread evenly over all classes; evaluation has none."""


class EvaluateSpec(Section):
    """Validation: one clip and one crop per video during training, `clips` x `crops` views in the final evaluation.

    In mode stream, both see all frames of a video, and validation during training uses one crop.
    """

    every_epochs: NonNegative = 5
    """Epochs between validations; 0: only the final one."""
    mode: Literal["clips", "stream"] = "clips"
    """clips: the average over `clips` clips of num_frames; stream: a past-only network sees frame by frame, averaged
    over all: each frame_stride-th one of the video, with uniform sampling one clip's."""
    clips: Count = 10
    """Clips per video in the final evaluation; not read in mode stream."""
    crops: Literal[1, 3, "full"] = 1
    """Squares of side short_side per clip, or full: the whole frame."""
    short_side: Extent = 256
    """Short side of the scaled frame, pixels."""
    last_checkpoints: Count = 5
    """The final accuracy is mean and deviation over this many checkpoints; at most checkpoint.keep."""
    precise_bn: NonNegative = 0
    """Before the final evaluation BN's statistics are recomputed, with fixed weights, over the batches of this many
    training steps; 0: the running statistics."""


class CheckpointSpec(Section):
    """When the run is saved, and how many checkpoints are kept."""

    every_epochs: Count = 1
    """Epochs between checkpoints; the last epoch is always saved."""
    every_minutes: Seconds | None = None
    """Also save within an epoch, this often; null: never."""
    keep: Count = 5
    """Checkpoints of whole epochs to keep; the newest checkpoint always stays."""
    background: bool = False
    """Write from a copy in rank 0's memory, alongside the steps that follow. The files of single learners are written
    within the step."""


class ExecutionSpec(Section):
    """How a step is computed. Results agree to rounding."""

    recompute: bool = False
    """Keep only the input of each block and recompute the rest in the backward pass."""
    compile: bool = False
    """Use torch.compile; needs a C++ compiler on the nodes."""


class WatchSpec(Section):
    """When a run that goes wrong is ended."""

    nonfinite_steps: Count = 2
    """This many consecutive steps with a NaN or infinity end the run."""
    stall_seconds: Seconds | None = 900
    """A rank without progress for this long ends the run; null: never."""


class EmaSpec(Section):
    """A moving average of the weights and of BN's running statistics, evaluated alongside the weights at the end."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Weight of the average in each step; its memory is about 1 / (1 - decay) steps. null: no average."""


class NoiseScaleSpec(Section):
    """The gradient noise scale (McCandlish et al.): how large a batch the data can use. It changes no result."""

    every_steps: NonNegative = 10
    """Steps between two measurements; 0: never. Needs two virtual GPUs or more."""


class Spec(Section):
    """One experiment."""

    name: FolderName
    """Name of the run; its folder is run_dir/name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides everything random."""
    model: ModelSpec
    data: DataSpec
    scale: ScaleSpec = ScaleSpec()
    parallel: ParallelSpec = ParallelSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    loss: LossSpec = LossSpec()
    ema: EmaSpec = EmaSpec()
    precision: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    """fp16 uses loss scaling; fp64 computes everything in double."""
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    watch: WatchSpec = WatchSpec()
    noise_scale: NoiseScaleSpec = NoiseScaleSpec()
    execution: ExecutionSpec = ExecutionSpec()
    run_dir: PathText = "runs"
    """Folder of the runs."""

    @property
    def run_path(self) -> Path:
        """The run's own folder, run_dir/name."""
        return Path(self.run_dir) / self.name

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight and of its gradient: fp16 and bf16 are types of the activations only."""
        return 8 if self.precision == "fp64" else 4


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec file with what it extends, apply `section.key=value` overrides, check everything.

    Raises UserError; its message has one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    return spec_from_tree(read_tree(path, overrides))


def spec_from_values(values: dict[str, Any], place: str) -> Spec:
    """Return the spec of plain values, such as those saved in a checkpoint; `place` names their source in an error."""
    return spec_from_tree(Tree(values, {(): place}))


def dump_spec(spec: Spec) -> str:
    """Return the resolved spec as YAML; `load_spec` of it gives an equal spec."""
    return to_yaml(spec.model_dump(mode="json"))


def spec_from_tree(tree: Tree) -> Spec:
    """Return the spec of values that know their places. Raises UserError as load_spec does."""
    spec = validated(Spec, tree)
    conflicts = [f"{tree.place(tuple(key.split('.')))}: {key}: {message}" for key, message in _conflicts(spec)]
    if conflicts:
        raise UserError("\n".join(conflicts))
    return spec


def _conflicts(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the keys that are right one by one and impossible together: (key, what is wrong)."""
    data, model = spec.data, spec.model
    low, high = data.short_side
    if low > high:
        yield "data.short_side", f"must be [low, high], got [{low}, {high}]"
    if data.augment == "scale_jitter" and data.crop > low:
        yield "data.crop", f"a crop of {data.crop} does not fit a short side of {low} (data.short_side)"
    if data.crop_scales == ():
        yield "data.crop_scales", "must be null or have at least one scale, got []"
    yield from _augment_problems(data, spec.scale.clips_per_gpu)
    yield from optimizer_problems(spec.optimizer)
    yield from schedule_problems(spec.schedule)
    yield from parallel_problems(spec.parallel, spec.optimizer.compression)
    grow = spec.parallel.grow_batch
    if spec.parallel.method == "averaging" and spec.ema.decay is not None:
        yield "ema.decay", "it averages the weights of one network, and each learner has its own; must be null"
    if grow is not None and not spec.evaluate.every_epochs:
        yield "parallel.grow_batch", "validations decide it; set evaluate.every_epochs to 1 or more"
    if grow is not None and grow.max is not None and grow.max < (clips := spec.scale.clips_per_gpu):
        yield "parallel.grow_batch.max", f"{grow.max} clips are fewer than scale.clips_per_gpu, {clips}"
    if grow is not None and grow.max is not None and grow.max % data.repeats:
        yield "parallel.grow_batch.max", f"must be a multiple of data.repeats, {data.repeats}, got {grow.max}"
    yield from network_problems(
        model.arch, model.backbone, data.num_frames, model.non_local, model.zero_init_residual, model.pool1, data.crop
    )
    streams = stream_problem(model.arch, model.shift_direction, model.non_local)
    if spec.evaluate.mode == "stream" and streams is not None:
        yield "evaluate.mode", streams
    if (last := spec.evaluate.last_checkpoints) > (kept := spec.checkpoint.keep):
        yield "evaluate.last_checkpoints", f"must be at most checkpoint.keep, {kept}, got {last}"


def _augment_problems(data: DataSpec, clips_per_gpu: int) -> Iterator[tuple[str, str]]:
    low, high = data.rand_augment_settings.crop_area
    if low > high:
        yield "data.rand_augment.crop_area", f"must be [low, high], got [{low:g}, {high:g}]"
    if data.augment == "rand_augment" and data.modality == "flow":
        yield "data.augment", "RandAugment changes colours, and flow has none; take multi_scale_crop or scale_jitter"
    if data.augment != "rand_augment" and data.rand_augment is not None:
        yield "data.rand_augment", f"augment {data.augment} does not read it; set data.augment to rand_augment"
    if clips_per_gpu % data.repeats:
        yield "data.repeats", f"must divide scale.clips_per_gpu, {clips_per_gpu}, got {data.repeats}"
    if data.mix is not None and not (data.mix.mixup or data.mix.cutmix):
        yield "data.mix", "mixes nothing: set mixup or cutmix, such as {mixup: 0.8, cutmix: 1.0}, or null"
    if data.mix is not None and clips_per_gpu // data.repeats < 2:
        clips = f"scale.clips_per_gpu {clips_per_gpu} with data.repeats {data.repeats}"
        yield "data.mix", f"a clip is mixed with another one of its virtual GPU, and {clips} has no other; must be null"


# When two specs are the same: for a checkpoint, for the ranks of one run, and for the scores of a checkpoint.

# Keys of `data` that change what is trained on; the others only tell where the clips are and how fast they are read.
_TRAINED_DATA = (
    "modality", "flow_length", "num_frames", "frame_stride", "sampling", "augment", "short_side", "crop_scales", "crop",
    "flip", "rand_augment", "repeats", "erase", "mix",
)  # fmt: skip
_RECIPE = ("optimizer", "schedule", "loss", "ema", "scale", "parallel")
# Each node may read its own copy of the data; the contents of the lists are compared by their fingerprints.
_PLACES = {"data.train", "data.val", "data.root", "data.quarantine", "data.stage"}
# Keys of `data`, `evaluate` and `model` that change no score: where the data are, how fast they come, and when.
_NOT_IN_SCORES = {
    "data.root", "data.stage", "data.workers", "data.clip_seconds", "evaluate.every_epochs", "model.pretrained",
}  # fmt: skip


def flat_keys(spec: Spec) -> dict[str, Any]:
    """Return all values of a spec, as in JSON, as flat `section.key: value`."""
    values = spec.model_dump(mode="json")
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in values.items() if name not in sections} | flat


def rank_keys(spec: Spec) -> dict[str, Any]:
    """Return the keys that must be equal on all ranks of a run."""
    return {key: value for key, value in flat_keys(spec).items() if key not in _PLACES}


def changes_scores(spec: Spec, key: str) -> bool:
    """Return whether another value of a key, `section.key`, can change the scores of a checkpoint."""
    if key in _NOT_IN_SCORES:
        return False
    if key.startswith(("data.train", "seed", "scale.")):  # what precise BN trains on
        return spec.evaluate.precise_bn > 0
    return key.startswith(("data.", "evaluate.", "model.", "precision"))


def experiment_keys(spec: Spec) -> dict[str, Any]:
    """Return what makes a spec another experiment, as flat `section.key: value`: no places of data, no speed."""
    values = spec.model_dump(mode="json")
    same = {f"model.{key}": value for key, value in values["model"].items() if key != "pretrained"}
    same |= {f"data.{key}": str(values["data"][key]) for key in _TRAINED_DATA}
    same |= {f"{section}.{key}": value for section in _RECIPE for key, value in values[section].items()}
    if spec.parallel.grow_batch is not None:  # validations decide the batch
        same["evaluate.every_epochs"] = spec.evaluate.every_epochs
    return same | {"seed": spec.seed, "precision": spec.precision}


def smallest_spec() -> Spec:
    """Return a spec in which every key that has a default has it."""
    return Spec(name="any", model=ModelSpec(arch="tsm", num_classes=1), data=DataSpec(train="any", val="any"))


def experiment_defaults() -> dict[str, Any]:
    """Return the values of `experiment_keys` that have defaults: those of a checkpoint that is older than the key."""
    spec = smallest_spec()
    always = ("model.arch", "model.num_classes", "scale.gpus", "scale.clips_per_gpu", "seed", "precision")
    return {key: value for key, value in experiment_keys(spec).items() if key not in always}
