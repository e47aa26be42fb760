"""The experiment spec: YAML -> frozen, typed Spec, or a message a person can act on.

Every key, its type, its default and its limits are here, those of model in model.py, of data in data.py, of
optimizer, schedule and parallel in optimizer.py. The plan checks what depends on the number of ranks or of clips.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from summit_train.core.errors import UserError
from summit_train.core.files import read_file
from summit_train.core.own_parts import OwnPart
from summit_train.spec.catalog import is_foreign
from summit_train.spec.data import DataSpec, data_problems
from summit_train.spec.model import ModelSpec, network_problems, size_problems, stream_problem
from summit_train.spec.optimizer import OptimizerSpec, ParallelSpec, ScheduleSpec, solver_problems
from summit_train.spec.source import Tree, read_tree, to_yaml
from summit_train.spec.typed import MOST, Count, Extent, Named, NonNegative, Own, PathText, Seconds, Section, expand
from summit_train.spec.typed import validated as validated


def folder_name(name: str) -> str:
    """The name becomes a folder below run_dir: one path component, whatever other characters it has."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        right = "1 to 200 bytes without '/' and control characters, and not '.' or '..'"
        raise ValueError(f"the name becomes a folder: must be {right}")
    return name


def _read_weights(value: object) -> object:
    """Read a file of class weights, so that a run and its checkpoints hold the numbers themselves."""
    if value is None or value == "balanced":
        return value
    try:
        if isinstance(value, str):
            value = [float(line) for line in read_file(expand(value)).decode().split()]
        if not isinstance(value, list) or not all(type(one) in (int, float) and 0 < one <= MOST for one in value):
            raise ValueError(f"each weight must be a number above 0 and at most {MOST:,}")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"must be balanced, a list, or a file with one number per line: {why}") from error
    return tuple(map(float, value))


ClassWeights = tuple[float, ...]
FolderName = Annotated[str, AfterValidator(folder_name)]


# The measure that decides, by loss.kind; evaluation.measures has how it is computed.
MAIN_MEASURES = {"softmax": "top1", "binary": "map", "detection": "map"}
# Names in the log, eval.json, the index and a sweep's tables, which measures of the user's own cannot have.
RESERVED_NAMES = (
    "top1", "top5", *MAIN_MEASURES.values(), "val_loss", "kind", "time", "time_s", "epoch", "epochs", "planned_epochs",
    "step", "total_steps", "videos", "clips", "seconds", "classes", "num_classes", "path", "bad_videos", "mode",
    "crops", "checkpoints", "name", "state", "run", "runs", "done", "job", "note", "remarks", "machine", "final",
    "ema", "overrides", "goodput", "goodput_in_jobs", "written", "settings", "changes", "curve",
    "fold", "folds", "nodes", "ranks", "node_hours", "virtual_gpus", "accumulation", "global_batch",
    "frames_per_batch", "lr", "peak_lr", "training_top1", "reference_top1",
    "noise_scale", "noise_scale_error", "gradient_square", "gradient_variance", "clips_per_second", "started",
    "measure", "last", "best", "mean", "macro", "low", "high", "evaluation", "x", "top1_by_clips", "top1_macro",
    "top1_interval",
)  # fmt: skip
_STATISTICS = ("_mean", "_std", "_last", "_best")  # endings of a measure's columns

LossKind = Annotated[str, Named(tuple(MAIN_MEASURES))]


class ScaleSpec(Section):
    """The global batch: virtual GPUs times clips per GPU. The number of ranks does not change the experiment."""

    gpus: Count | None = None
    """Virtual GPUs; any number of ranks up to it trains them. null: as many as ranks, which makes the number of ranks
    part of the experiment."""
    clips_per_gpu: Count = 8
    """Clips of one virtual GPU in a step; the batch of batch normalisation."""


class LossSpec(Section):
    """The training loss."""

    kind: LossKind = "softmax"
    """softmax: cross-entropy, for clips of one class. binary: binary cross-entropy, the mean over all classes, for
    clips of several classes or none; validation measures mean average precision. Other tasks imply their own.
    Or a loss of your own, named like a network (model.arch); its code runs."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a loss of your own."""
    like: Literal["softmax", "binary"] = "softmax"
    """The built-in kind whose labels, measures and probabilities a loss of your own uses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label that is spread evenly over all classes, with binary over yes and no; evaluation has none."""
    class_weights: Annotated[Literal["balanced"] | ClassWeights | None, BeforeValidator(_read_weights)] = None
    """Factor on the loss of each class's clips: a list of numbers in the order of the classes, or a file with one
    number per line, read together with the spec. balanced: N / (M n), for N labels of all training clips, n labels of
    the class and M classes with any label."""

    @property
    def base(self) -> str:
        """The built-in kind that decides labels, measures and probabilities."""
        return self.like if is_foreign(self.kind) else self.kind


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
    measures: tuple[Own, ...] = ()
    """Measures of your own, named like a network or {kind, options}; their code runs."""
    last_checkpoints: Count = 5
    """The final accuracy is mean and standard deviation (n - 1) over this many checkpoints; at most checkpoint.keep."""
    precise_bn: NonNegative = 0
    """Before the final evaluation BN's statistics are recomputed, with fixed weights, over the batches of this many
    training steps; 0: the running statistics."""

    @property
    def own_names(self) -> tuple[str, ...]:
        return tuple(one.kind.rpartition(":")[2] for one in self.measures)


class CheckpointSpec(Section):
    """When the run is saved, and how many checkpoints are kept."""

    every_epochs: Count = 1
    """Epochs between checkpoints; the last epoch is always saved."""
    every_minutes: Seconds | None = None
    """Also save within an epoch, this often; null: never."""
    keep: Count = 5
    """Checkpoints of whole epochs to keep; the newest checkpoint always stays."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best validation by this measure: top1, map, or one of evaluate.measures. Each
    validation then gets a checkpoint; only those of every_epochs count in the final accuracy."""
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
    task: Literal["classification", "detection"] = "classification"
    """classification: the class of a clip; detection: the boxes and classes of the objects in each frame."""
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


def run_spec(path: str, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec in a file, or that of a run folder, wherever the folder is now. Raises UserError."""
    if not Path(path).is_dir():
        return load_spec(path, overrides)
    file, run = Path(path) / "spec.yaml", Path(os.path.abspath(path))
    if not file.is_file():
        raise UserError(f"{path}: must be a spec or a run folder; no spec.yaml found in it")
    spec = load_spec(file, overrides)
    if spec.run_path.exists() and spec.run_path.samefile(run):
        return spec
    return spec.model_copy(update={"run_dir": str(run.parent), "name": run.name})


def spec_from_values(values: dict[str, Any], place: str) -> Spec:
    """Return the spec of plain values, such as those saved in a checkpoint; `place` names their source in an error."""
    return spec_from_tree(Tree(values, {(): place}))


def dump_spec(spec: Spec) -> str:
    """Return the resolved spec as YAML; `load_spec` of it gives an equal spec."""
    return to_yaml(spec.model_dump(mode="json"))


def spec_from_tree(tree: Tree) -> Spec:
    """Return the spec of values that know their places. Raises UserError as load_spec does."""
    spec = validated(Spec, replace(tree, values=_with_detector(tree.values)))
    conflicts = [f"{tree.place(tuple(key.split('.')))}: {key}: {message}" for key, message in _conflicts(spec)]
    if conflicts:
        raise UserError(*conflicts)
    return spec


def _with_detector(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the keys that task detection implies, where they are not given."""
    model, loss = values.get("model"), values.get("loss", {})
    if values.get("task") != "detection" or not isinstance(model, dict) or not isinstance(loss, dict):
        return values
    if model.get("detector") is None:
        model = {**model, "detector": {}}
    return {**values, "model": model, "loss": {"kind": "detection", **loss}}


def own_parts(spec: Spec, *sections: str) -> list[OwnPart]:
    """Open the parts of the user's own that these sections name. Raises UserError for one without a file."""
    parts = list[OwnPart]()
    if "loss" in sections and is_foreign(spec.loss.kind):
        parts.append(OwnPart.open("loss.kind", spec.loss.kind, spec.loss.options))
    if "schedule" in sections:
        parts += spec.schedule.open_decay()
    if "data" in sections:
        parts += spec.data.open_augment()
    if "evaluate" in sections:
        parts += [OwnPart.open("evaluate.measures", one.kind, one.options) for one in spec.evaluate.measures]
    return parts


def _conflicts(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the keys that are right one by one and impossible together: (key, what is wrong)."""
    data, model = spec.data, spec.model
    weights = spec.loss.class_weights
    if isinstance(weights, tuple) and len(weights) != model.num_classes:
        wrong = f"must be one number for each of the {model.num_classes} classes, got {len(weights)}"
        yield "loss.class_weights", wrong
    yield from data_problems(data, spec.scale.clips_per_gpu)
    yield from _task_problems(spec)
    yield from solver_problems(spec.optimizer, spec.schedule, spec.parallel)
    grow = spec.parallel.grow_batch
    if spec.parallel.method == "averaging" and spec.ema.decay is not None:
        yield "ema.decay", "it averages the weights of one network, and each learner has its own; must be null"
    stop, best, measured = spec.schedule.early_stop, spec.checkpoint.keep_best, MAIN_MEASURES[spec.loss.base]
    deciding = {"parallel.grow_batch": grow, "checkpoint.keep_best": best, "schedule.early_stop": stop}
    for key in (key for key, value in deciding.items() if value is not None and not spec.evaluate.every_epochs):
        yield key, "needs validations during training; set evaluate.every_epochs to 1 or more"
    own = spec.evaluate.own_names
    if best is not None and best not in (measured, *own):
        choices = ", ".join([measured, *own])
        yield "checkpoint.keep_best", f"must be {choices} or null with loss.kind {spec.loss.base}, got {best}"
    for name in own:
        if own.count(name) > 1 or name in RESERVED_NAMES or name.endswith(_STATISTICS):
            yield "evaluate.measures", f"must have names that nothing else has, got {name}; try another name"
            break
    if own and spec.task == "detection":
        yield "evaluate.measures", f"must be [] with task {spec.task}: they take a score for each class"
    known = [measured, *own, *([] if spec.task == "detection" else ["val_loss"])]
    if stop is not None and stop.measure not in known:
        right = f"must be {' or '.join(known)} with loss.kind {spec.loss.base}, got {stop.measure}"
        yield "schedule.early_stop.measure", right
    if grow is not None and grow.max is not None and grow.max < (clips := spec.scale.clips_per_gpu):
        yield "parallel.grow_batch.max", f"must be at least scale.clips_per_gpu, {clips}, got {grow.max}"
    if grow is not None and grow.max is not None and grow.max % data.repeats:
        yield "parallel.grow_batch.max", f"must be a multiple of data.repeats, {data.repeats}, got {grow.max}"
    yield from network_problems(model, data.num_frames, data.crop)
    yield from size_problems(model, data.crop, None if spec.evaluate.crops == "full" else spec.evaluate.short_side)
    yield from _foreign_problems(spec)
    if model.drop_path and spec.execution.compile:
        yield "execution.compile", "must be false, got true: torch.compile cannot use the generator of drop_path"
    if model.freeze_bn != "none" and model.pretrained is None and not is_foreign(model.arch):
        yield "model.freeze_bn", f"{model.freeze_bn} needs trained weights; set model.pretrained, or none"
    if model.freeze_trunk and model.pretrained is None:
        yield "model.freeze_trunk", "needs trained weights; set model.pretrained, or false"
    streams = stream_problem(model)
    if spec.evaluate.mode == "stream" and streams is not None:
        yield "evaluate.mode", streams
    if (last := spec.evaluate.last_checkpoints) > (kept := spec.checkpoint.keep):
        yield "evaluate.last_checkpoints", f"must be at most checkpoint.keep, {kept}, got {last}"


def _task_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the keys that do not fit the task."""
    if spec.task == "detection":
        yield from _detection_problems(spec)
        return
    if spec.loss.base == "detection":
        yield "loss.kind", "must be softmax or binary with task classification, got detection"
    if spec.model.detector is not None:
        yield "model.detector", "must be null with task classification"
    if spec.data.built_in_augment == "whole":
        yield "data.augment", "must not be whole with task classification, whose networks see crops"


def _detection_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    model, data = spec.model, spec.data
    if spec.loss.base != "detection":
        yield "loss.kind", f"must be detection with task detection, got {spec.loss.kind}"
    if model.detector is not None and model.detector.freeze_stem and model.pretrained is None:
        yield "model.detector.freeze_stem", "needs trained weights; set model.pretrained, or false"
    if model.arch not in ("tsn", "tsm"):
        yield "model.arch", f"must be tsn or tsm with task detection, got {model.arch}"
    if model.arch == "tsm" and model.shift_direction != "past":
        yield "model.shift_direction", "must be past with task detection: each frame is seen without later ones"
    needed: tuple[tuple[str, object, object], ...] = (
        ("data.modality", data.modality, "rgb"), ("data.region", data.region, None), ("data.mix", data.mix, None),
        ("data.erase", data.erase, 0.0), ("data.repeats", data.repeats, 1), ("data.sampling", data.sampling, "dense"),
        ("evaluate.mode", spec.evaluate.mode, "stream"), ("evaluate.crops", spec.evaluate.crops, "full"),
        ("evaluate.precise_bn", spec.evaluate.precise_bn, 0), ("loss.class_weights", spec.loss.class_weights, None),
        ("loss.label_smoothing", spec.loss.label_smoothing, 0.0), ("model.dropout", model.dropout, 0.0),
        ("model.non_local", model.non_local, False),
    )  # fmt: skip
    if data.built_in_augment == "rand_augment":
        yield "data.augment", "rand_augment rotates and shears frames, and boxes stay upright; use whole"
    if not isinstance(data.augment, str):
        yield "data.augment", "must have no augmentation of your own with task detection: boxes would not follow it"
    for key, value, right in needed:
        if value != right:
            yield key, f"must be {'null' if right is None else right} with task detection, got {value}"


def _foreign_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield keys that are not read: built-in ones by a part of the user's own, `options` by one built in."""
    model, loss = spec.model, spec.loss
    for section, name in (("model", model.arch), ("loss", loss.kind), ("schedule", spec.schedule.decay)):
        if not is_foreign(name) and getattr(spec, section).options:
            yield f"{section}.options", f"must be empty: {name} is built in, and its options are keys of {section}"
    if not is_foreign(loss.kind) and loss.like != "softmax":
        yield "loss.like", f"must be softmax: {loss.kind} is built in"
    for key, usual in (("label_smoothing", "0.0"), ("class_weights", "null")):
        if is_foreign(loss.kind) and getattr(loss, key):
            yield f"loss.{key}", f"must be {usual}: only built-in losses read it; use loss.options instead"
    if not is_foreign(model.arch):
        return
    for key in ("width", "dropout", "shift_fraction", "shift_place", "shift_direction", "freeze_trunk"):
        if getattr(model, key) != (default := ModelSpec.model_fields[key].default):
            yield f"model.{key}", f"must be {default}: only built-in networks read it; use model.options instead"
    if spec.optimizer.layer_decay != 1:
        yield "optimizer.layer_decay", f"the blocks of {model.arch} are not known, so it must be 1"
    if spec.execution.recompute:
        right = "use torch.utils.checkpoint in the network"
        yield "execution.recompute", f"must be false: the blocks of {model.arch} are not known; {right}"
