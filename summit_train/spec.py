"""The experiment spec: YAML -> frozen, typed Spec, or a message a person can act on.

Every key, its type, its default and its limits stand here and nowhere else. What depends on the number of ranks or of
clips is checked by the plan, which knows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from summit_train.models.catalog import Arch, Backbone, ShiftDirection, ShiftPlace, backbone_problem, frames_problem
from summit_train.source import KeyPath, SpecError, Tree, read_tree, to_yaml
from summit_train.typed import Section, validated

__all__ = [
    "CheckpointSpec", "DataSpec", "EvaluateSpec", "ModelSpec", "OptimizerSpec", "ScaleSpec", "ScheduleSpec", "Spec",
    "SpecError", "WatchSpec", "dump_spec", "experiment_keys", "load_spec", "spec_from_tree", "spec_from_values",
]  # fmt: skip

# Keys of the data section that change what is trained on; the others only say where it lies and how fast it comes.
_DATA_IDENTITY = ("num_frames", "frame_stride", "sampling", "augment", "short_side", "crop", "flip")


def _expand(path: str) -> str:
    """Expand ~ and $NAME; a variable that is not set would silently name another place, so it is refused."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+|\{\w+\})", expanded)
    if unset:
        raise ValueError(f"the environment variable {unset.group()} is not set")
    if not expanded or "\0" in expanded:
        raise ValueError("a path is wanted, got an empty one")
    return expanded


def _folder_name(name: str) -> str:
    """The name becomes a folder below run_dir: one path component, whatever other characters it has."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 200:
        raise ValueError("the name becomes a folder: 1 to 200 bytes without '/' are wanted, and not '.' or '..'")
    return name


PathText = Annotated[str, AfterValidator(_expand)]
FolderName = Annotated[str, AfterValidator(_folder_name)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class ModelSpec(Section):
    """What is trained: the architecture and its options."""

    arch: Arch
    backbone: Backbone = "resnet50"
    width: Annotated[float, Field(gt=0, le=8)] = Field(default=1.0, description="Factor on every channel count.")
    num_classes: Count
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shift_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.125, description="TSM: fraction of the channels shifted in each direction."
    )
    shift_place: ShiftPlace = "residual"
    shift_direction: ShiftDirection = "both"
    pretrained: PathText | None = Field(
        default=None, description="ResNet weights under torchvision's names, a checkpoint, or a run folder."
    )


class DataSpec(Section):
    """Where the videos are, which frames of them are taken, and how frames become a crop."""

    train: PathText = Field(description="Manifest (CSV or `path label` list) or folder of class folders.")
    val: PathText
    root: PathText | None = Field(
        default=None, description="Folder that relative paths start at; null: the manifest's own."
    )
    num_frames: Count = Field(default=8, description="Frames a clip has (T).")
    frame_stride: Count = Field(default=8, description="dense: distance between the frames of a clip.")
    sampling: Literal["dense", "uniform"] = "dense"
    augment: Literal["scale_jitter", "multi_scale_crop"] = "scale_jitter"
    short_side: tuple[Count, Count] = Field(
        default=(256, 320), description="Short side in training: drawn from [low, high]."
    )
    crop: Count = Field(default=224, description="Side of the training crop, pixels.")
    flip: bool = Field(
        default=True, description="Mirror half of the clips; false where labels have a left and a right."
    )
    quarantine: PathText | None = Field(
        default=None, description="List of clips that are left out, as `data scan` writes it."
    )
    on_bad_clip: Literal["fail", "skip"] = Field(
        default="fail", description="A clip that cannot be read ends the run, or is replaced, counted and named."
    )
    max_bad_fraction: Fraction = Field(
        default=0.01, description="skip: more bad clips than this part of an epoch, or of the test, end the run."
    )
    clip_seconds: Positive = Field(default=120, description="A clip that is not read within so long is bad.")
    stage: PathText | None = Field(
        default=None, description="Packed sets are copied to this folder of each node; auto: the site's node_local."
    )
    workers: NonNegative = Field(
        default=4, description="Loader processes of each rank; 0 loads in the training process."
    )


class ScaleSpec(Section):
    """The batch: virtual GPUs times clips on each. The number of ranks is no part of the experiment."""

    gpus: Count | None = Field(default=None, description="Virtual GPUs; null: as many as there are ranks.")
    clips_per_gpu: Count = 8


class OptimizerSpec(Section):
    """SGD with momentum; peak LR = base_lr * global_batch / base_batch under linear scaling."""

    name: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    base_lr: Positive = 0.00125
    base_batch: Count = 8
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    clip_norm: Positive | None = Field(
        default=None, description="Global gradient norm is clipped to this; null: it is not."
    )
    compression: Literal["none", "fp16"] = Field(
        default="none", description="Number format of the gradients on the network."
    )


class ScheduleSpec(Section):
    """The length of the run and the shape of the LR."""

    epochs: Count = 100
    warmup_epochs: Annotated[float, Field(ge=0)] = 5
    decay: Literal["cosine", "none"] = "cosine"


class EvaluateSpec(Section):
    """Validation in training (one clip, one crop) and the final one (`clips` x `crops` a video)."""

    every_epochs: NonNegative = Field(default=5, description="0: only at the end.")
    clips: Count = 10
    crops: Literal[1, 3, "full"] = Field(default=1, description="Squares of side short_side, or the full frame.")
    short_side: Count = 256
    last_checkpoints: Count = Field(default=5, description="The final accuracy is the mean and deviation over these.")


class CheckpointSpec(Section):
    """When the run is saved and how many saves stay."""

    every_epochs: Count = 1
    every_minutes: Positive | None = None
    keep: Count = 5


class ExecutionSpec(Section):
    """How a step is computed: memory against time. The numbers agree to rounding."""

    recompute: bool = Field(
        default=False, description="Keep the blocks' inputs only and compute the rest again in the backward pass."
    )
    compile: bool = Field(default=False, description="torch.compile the body of the network; needs a C++ compiler.")


class WatchSpec(Section):
    """When a run that goes wrong is ended."""

    nonfinite_steps: Count = Field(default=2, description="Steps in a row with a loss or gradient that is not finite.")
    stall_seconds: Positive | None = Field(
        default=900, description="A rank that makes no progress for this long ends the run."
    )


class Spec(Section):
    """One experiment."""

    name: FolderName
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: ModelSpec
    data: DataSpec
    scale: ScaleSpec = ScaleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    watch: WatchSpec = WatchSpec()
    execution: ExecutionSpec = ExecutionSpec()
    run_dir: PathText = "runs"

    @property
    def run_path(self) -> Path:
        """The run's own folder: run_dir/name."""
        return Path(self.run_dir) / self.name


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec file with what it extends, apply `section.key=value` overrides, check everything.

    Raises SpecError; its message has one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    return spec_from_tree(read_tree(path, overrides))


def spec_from_values(values: dict[str, Any], place: str) -> Spec:
    """The spec of plain values, such as those saved in a checkpoint; `place` names their source in an error."""
    return spec_from_tree(Tree(values, {(): place}))


def experiment_keys(spec: Spec) -> dict[str, str | int | float | None]:
    """What makes a spec another experiment, as flat `section.key: value`: not where data are, nor how fast it goes."""
    values = spec.model_dump(mode="json")
    same = {f"model.{key}": value for key, value in values["model"].items() if key != "pretrained"}
    same |= {f"data.{key}": str(values["data"][key]) for key in _DATA_IDENTITY}
    for section in ("optimizer", "schedule", "scale"):
        same |= {f"{section}.{key}": value for key, value in values[section].items()}
    return same | {"seed": spec.seed, "precision": spec.precision}


def dump_spec(spec: Spec) -> str:
    """The resolved spec as YAML; `load_spec` of it gives an equal spec."""
    return to_yaml(spec.model_dump(mode="json"))


def spec_from_tree(tree: Tree) -> Spec:
    """The spec of values that know their places. Raises SpecError as load_spec does."""
    spec = validated(Spec, tree)
    conflicts = [f"{tree.place(path)}: {'.'.join(path)}: {message}" for path, message in _conflicts(spec)]
    if conflicts:
        raise SpecError("\n".join(conflicts))
    return spec


def _conflicts(spec: Spec) -> Iterator[tuple[KeyPath, str]]:
    """Keys that are right one by one and impossible together."""
    data, schedule, model = spec.data, spec.schedule, spec.model
    low, high = data.short_side
    if low > high:
        yield ("data", "short_side"), f"[low, high] is wanted, got [{low}, {high}]"
    if data.augment == "scale_jitter" and data.crop > low:
        yield ("data", "crop"), f"a crop of {data.crop} does not fit a short side of {low} (data.short_side)"
    if schedule.warmup_epochs > schedule.epochs:
        yield (
            ("schedule", "warmup_epochs"),
            f"a warm-up of {schedule.warmup_epochs:g} epochs is longer than the run ({schedule.epochs} epochs)",
        )
    too_short, unknown = frames_problem(model.arch, data.num_frames), backbone_problem(model.arch, model.backbone)
    if too_short is not None:
        yield ("data", "num_frames"), too_short
    if unknown is not None:
        yield ("model", "backbone"), unknown
    if spec.evaluate.last_checkpoints > spec.checkpoint.keep:
        yield (
            ("evaluate", "last_checkpoints"),
            f"{spec.evaluate.last_checkpoints} checkpoints are wanted, but checkpoint.keep is {spec.checkpoint.keep}",
        )
