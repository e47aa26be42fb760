"""The keys of a spec: each with its type, default and text, and with marks: what it decides, and what reads it.

Those of `model` and `data` are in model_data.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from summit_train.core.files import read_file
from summit_train.core.own_parts import OwnPart
from summit_train.spec.catalog import is_foreign
from summit_train.spec.model_data import DataSpec, ModelSpec
from summit_train.spec.typed import (
    BUILT_IN,
    CLASSIFYING,
    LAX,
    MOST,
    OWN,
    Count,
    Extent,
    FolderName,
    Named,
    NonNegative,
    Own,
    PathText,
    Positive,
    ReadWith,
    Scope,
    Seconds,
    Section,
    expand,
)

# The measure that decides, by loss.kind; evaluation.measures has how it is computed.
MAIN_MEASURES = {"softmax": "top1", "binary": "map", "detection": "map"}

# What null means: the values of torch and, for LAMB, of its paper.
_MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}
_EPS = {"rmsprop": 1e-8, "adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8, "lamb": 1e-6}
# The keys that only some solvers read.
SOLVER_KEYS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "alpha", "eps"),
    "adagrad": ("eps",),
    **dict.fromkeys(("adam", "adamw", "lamb"), ("betas", "eps")),
}
# What solvers keep for each weight, as torch names it: tensors of its shape, besides that of momentum, and counters.
_MOMENTS: dict[str, tuple[str, ...]] = {
    "rmsprop": ("square_avg",),
    "adagrad": ("sum",),
    **dict.fromkeys(("adam", "adamw", "lamb"), ("exp_avg", "exp_avg_sq")),
}
COUNTERS = {"adam": ("step",), "adamw": ("step",), "lamb": ("updates",)}
Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=MOST)]
_NAMES = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
_FREEZE = WithJsonSchema({"anyOf": [{"type": "string"}, _NAMES]})


def kept_tensors(solver: str, momentum: float | None) -> list[str]:
    """Return the names of the tensors of a weight's shape that a solver keeps for it."""
    return [*_MOMENTS.get(solver, ()), *(["momentum_buffer"] if solver in _MOMENTUM and momentum else [])]


class TrustRatioSpec(Section):
    """A factor on each layer's LR, from the L2 norms of its weight w and its gradient g."""

    kind: Literal["lars", "bounded"]
    """lars: coefficient * w / (g + weight_decay * w), but 1 for biases, normalisations and what a network leaves
    undecayed; bounded: w / g within [lower, upper] (DATE)."""
    coefficient: Positive = 0.001
    """lars: the factor before the ratio."""
    lower: Positive = 0.1
    """bounded: the least ratio. DATE gives no bounds; these are this project's."""
    upper: Positive = 10.0
    """bounded: the largest ratio."""


class FreezeSpec(Section):
    """Parameters that are not trained, by name."""

    names: Annotated[tuple[str, ...], LAX, Field(min_length=1)]
    """Of parameters, or of modules with all their parameters; globs."""
    until_epoch: Count | None = None
    """They are trained after this many epochs; null: never."""


def _gather_names(value: Any) -> Any:
    """Gather a name, or those in a list, which are frozen for the whole run, in one section in front of the others."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list):
        return value
    names = [item for item in value if isinstance(item, str)]
    sections = [item for item in value if not isinstance(item, str)]
    return [{"names": names}, *sections] if names else sections


_IF_BLOCKS_ARE_KNOWN = ReadWith("model.arch", BUILT_IN, "the blocks of others are not known")


class OptimizerSpec(Section):
    """The solver. Peak LR = base_lr * (global_batch / base_batch) under linear scaling."""

    name: Literal["sgd", "rmsprop", "adagrad", "adam", "adamw", "lamb"] = "sgd"
    """SGD, RMSprop, AdaGrad, Adam, AdamW or LAMB. Weight decay is part of the gradient; in adamw and lamb, of the
    update."""
    momentum: Decay | None = None
    """sgd, rmsprop: momentum. null: 0.9 for sgd, 0 for rmsprop."""
    alpha: Decay = 0.99
    """rmsprop: factor of the running average of squared gradients."""
    betas: Annotated[tuple[Decay, Decay], LAX] = (0.9, 0.999)
    """adam, adamw, lamb: factors of the running averages of gradients and of their squares."""
    eps: Positive | None = None
    """rmsprop, adagrad, adam, adamw, lamb: added to the denominator. null: 1e-8 for rmsprop, adam and adamw, 1e-10 for
    adagrad, 1e-6 for lamb."""
    weight_decay: Annotated[float, Field(ge=0, le=MOST)] = 1e-4
    """Weight decay; not applied to biases and normalisations unless decay_norms is true."""
    decay_norms: bool = False
    """Also apply weight decay to biases and normalisations."""
    base_lr: Annotated[float, Field(gt=0)] = 0.00125
    """LR at a global batch of base_batch clips."""
    base_batch: Count = 8
    """Global batch that base_lr is given for, clips."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """Peak LR = base_lr * f, with f the ratio of the batches, its root, or 1."""
    head_lr_factor: Rate = 1.0
    """Factor on the classifier's LR, for fine-tuning."""
    first_lr_factor: Rate = 1.0
    """Factor on the LR of the first convolution, for flow from weights of rgb."""
    layer_decay: Annotated[float, Field(gt=0, le=1), _IF_BLOCKS_ARE_KNOWN] = 1.0
    """Factor on the LR from each block to the one before it, from the classifier down. 1: the same LR everywhere."""
    lr_factors: dict[str, Rate] = Field(default={})
    """Factors on the LR, by name as in freeze. Factors of the same parameter are multiplied."""
    freeze: Annotated[tuple[FreezeSpec, ...], LAX, BeforeValidator(_gather_names), _FREEZE] = ()
    """Names of parameters or modules to freeze; * matches any characters. {names: [layer1], until_epoch: 5} freezes
    them for 5 epochs. A frozen normalisation keeps its statistics."""
    clip_norm: Positive | None = None
    """Clip the global norm of the gradient to this; null: no clipping."""
    trust_ratio: TrustRatioSpec | None = None
    """Factor on each layer's LR; null: none."""
    compression: Literal["none", "fp16"] = "none"
    """Number format of the gradients on the network; none: that of the parameters."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = str(values.get("name", "sgd"))
        usual = {"momentum": _MOMENTUM.get(name), "eps": _EPS.get(name)}
        return {**values, **{key: value for key, value in usual.items() if values.get(key) is None}}

    @property
    def states(self) -> int:
        """How many tensors of a weight's shape the solver keeps for it."""
        return len(kept_tensors(self.name, self.momentum))


class EarlyStopSpec(Section):
    """When a run ends before its last epoch."""

    measure: str
    """top1 (map with loss.kind binary), one of evaluate.measures, or val_loss."""
    epochs: Count
    """End the run at the first validation this many epochs, or more, after the best one and after the last until_epoch
    of optimizer.freeze. Validated epochs get checkpoints, which count in the final accuracy."""


_IF_OWN_DECAY = ReadWith("decay", OWN, "options of a built-in one are keys of schedule")


class ScheduleSpec(Section):
    """The length of the run and the course of the LR."""

    epochs: Count = 100
    """Length of the run."""
    early_stop: EarlyStopSpec | None = None
    """End the run when validations no longer improve; null: never."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MOST)] = 5
    """The LR rises to its peak over this many epochs, step by step."""
    warmup: Literal["linear", "squared"] = "linear"
    """The LR of the warm-up: the peak times the part of it that is done, or times that part squared."""
    warmup_scaling: Literal["none", "linear"] = "none"
    """linear: warmup_epochs are those at base_batch clips and grow with the global batch, so the number of steps stays
    (LEGW)."""
    decay: Annotated[str, Named(("cosine", "linear", "polynomial", "steps", "none"))] = "cosine"
    """After the warm-up: cosine to 0, linear to 1e-6 (DATE), polynomial to 0 (LARS), steps, or constant. Or your
    own, named like a network (model.arch); its code runs."""
    options: Annotated[dict[str, Any], _IF_OWN_DECAY] = Field(default={})
    """Keyword arguments of your own decay."""
    power: Positive = 2.0
    """polynomial: the LR is the peak times the part of the decay that is left, to this power."""
    milestones: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(max_length=1000)] = ()
    """steps: epochs after which the LR falls."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """steps: the LR falls to this part of its value."""

    def open_decay(self) -> list[OwnPart]:
        """Open the decay if it is the user's own. Raises UserError for one without a file."""
        return [OwnPart.open("schedule.decay", self.decay, self.options)] if is_foreign(self.decay) else []


def _period(value: Any) -> Any:
    if value == "epoch" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST):
        return value
    raise ValueError(f"must be epoch or a number of steps from 1 to {MOST:,}")


class GrowBatchSpec(Section):
    """A batch that grows while the accuracy of the averaged network does not (Cong et al., Algorithm 1)."""

    factor: Annotated[int, Field(ge=2, le=MOST)] = 2
    """A learner's batch grows to this many times its size."""
    margin: Positive = 1.0
    """It grows where the accuracy is below the best so far times this."""
    max: Count | None = None
    """The largest batch of a learner, clips; null: the largest multiple of scale.clips_per_gpu that its share of an
    epoch holds."""
    every: Count = 1
    """Validations from one decision to the next."""


_IF_AVERAGING = ReadWith("method", "averaging")


class ParallelSpec(Section):
    """How virtual GPUs train together: one gradient for all in each step, or learners whose networks are averaged."""

    method: Literal["synchronous", "averaging"] = "synchronous"
    """synchronous: every step averages the gradients. averaging: each virtual GPU is a learner with a network and a
    solver of its own; every `period` their networks are averaged (AAVG). The keys below are read by averaging alone."""
    period: Annotated[Literal["epoch"] | Count, BeforeValidator(_period), _IF_AVERAGING] = "epoch"
    """Steps from one average to the next, at the latest the end of the epoch; epoch: once, at the end."""
    optimizer_state: Annotated[Literal["average", "local"], _IF_AVERAGING] = "average"
    """The solvers' state: averaged as the weights are, or each learner keeps its own."""
    bn: Annotated[Literal["merge", "local"], _IF_AVERAGING] = "merge"
    """BN's running statistics: each learner takes those of all learners' clips together, or keeps its own. Evaluation
    always uses the merged ones."""
    grow_batch: Annotated[GrowBatchSpec | None, _IF_AVERAGING] = None
    """Grow the batch at the end of an epoch; null: it stays."""


class ScaleSpec(Section):
    """The global batch: virtual GPUs times clips per GPU. The number of ranks does not change the experiment."""

    gpus: Count | None = None
    """Virtual GPUs; any number of ranks up to it trains them. null: as many as ranks, which makes the number of ranks
    part of the experiment."""
    clips_per_gpu: Count = 8
    """Clips of one virtual GPU in a step; the batch of batch normalisation."""


def _read_weights(value: object) -> object:
    """Read a file of class weights, so that a run and its checkpoints hold the numbers themselves."""
    if value is None or value == "balanced":
        return value
    try:
        if isinstance(value, str):
            value = [float(line) for line in read_file(expand(value)).decode().split()]
        if not isinstance(value, list) or not all(type(item) in (int, float) and 0 < item <= MOST for item in value):
            raise ValueError(f"each weight must be a number above 0 and at most {MOST:,}")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"must be balanced, a list, or a file with one number per line: {why}") from error
    return tuple(map(float, value))


_IF_BUILT_IN_LOSS = ReadWith("kind", BUILT_IN, "use loss.options instead")
_IF_OWN_LOSS = ReadWith("kind", OWN, "options of a built-in one are keys of loss")
ClassWeights = Annotated[Literal["balanced"] | tuple[float, ...] | None, BeforeValidator(_read_weights)]


class LossSpec(Section):
    """The training loss."""

    kind: Annotated[str, Named(tuple(MAIN_MEASURES)), Scope.EXPERIMENT] = "softmax"
    """softmax: cross-entropy, for clips of one class. binary: binary cross-entropy, the mean over all classes, for
    clips of several classes or none; validation measures mean average precision. Other tasks imply their own.
    Or a loss of your own, named like a network (model.arch); its code runs."""
    options: Annotated[dict[str, Any], _IF_OWN_LOSS] = Field(default={})
    """Keyword arguments of a loss of your own."""
    like: Annotated[Literal["softmax", "binary"], Scope.EXPERIMENT, ReadWith("kind", OWN)] = "softmax"
    """The built-in kind whose labels, measures and probabilities a loss of your own uses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1), _IF_BUILT_IN_LOSS, CLASSIFYING] = 0.0
    """Share of each label that is spread evenly over all classes, with binary over yes and no; evaluation has none."""
    class_weights: Annotated[ClassWeights, _IF_BUILT_IN_LOSS, CLASSIFYING] = None
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

    # Where validations decide what a run does, experiment_keys has it.
    every_epochs: Annotated[NonNegative, Scope.RUN] = 5
    """Epochs between validations; 0: only the final one."""
    mode: Annotated[Literal["clips", "stream"], Scope.SCORES] = "clips"
    """clips: the average over `clips` clips of num_frames; stream: a past-only network sees frame by frame, averaged
    over all: each frame_stride-th one of the video, with uniform sampling one clip's."""
    clips: Annotated[Count, Scope.SCORES] = 10
    """Clips per video in the final evaluation; not read in mode stream."""
    crops: Annotated[Literal[1, 3, "full"], Scope.SCORES] = 1
    """Squares of side short_side per clip, or full: the whole frame."""
    short_side: Annotated[Extent, Scope.SCORES] = 256
    """Short side of the scaled frame, pixels."""
    measures: Annotated[tuple[Own, ...], Scope.SCORES] = ()
    """Measures of your own, named like a network or {kind, options}; their code runs."""
    last_checkpoints: Annotated[Count, Scope.SCORES] = 5
    """The final accuracy is mean and standard deviation (n - 1) over this many checkpoints; at most checkpoint.keep."""
    precise_bn: Annotated[NonNegative, Scope.SCORES, CLASSIFYING] = 0
    """Before the final evaluation BN's statistics are recomputed, with fixed weights, over the batches of this many
    training steps; 0: the running statistics."""

    @property
    def own_names(self) -> tuple[str, ...]:
        return tuple(measure.kind.rpartition(":")[2] for measure in self.measures)


class CheckpointSpec(Section):
    """When the run is saved, and how many checkpoints are kept."""

    every_epochs: Annotated[Count, Scope.RUN] = 1
    """Epochs between checkpoints; the last epoch is always saved."""
    every_minutes: Annotated[Seconds | None, Scope.RUN] = None
    """Also save within an epoch, this often; null: never."""
    keep: Annotated[Count, Scope.RUN] = 5
    """Checkpoints of whole epochs to keep; the newest checkpoint always stays."""
    keep_best: Annotated[str | None, Scope.RUN] = None
    """Also keep the checkpoint with the best validation by this measure: top1, map, or one of evaluate.measures. Each
    validation then gets a checkpoint; only those of every_epochs count in the final accuracy."""
    background: Annotated[bool, Scope.RUN] = False
    """Write from a copy in rank 0's memory, alongside the steps that follow. The files of single learners are written
    within the step."""


_IF_RECOMPUTABLE = ReadWith("model.arch", BUILT_IN, "use torch.utils.checkpoint in the network")


class ExecutionSpec(Section):
    """How a step is computed. Results agree to rounding."""

    recompute: Annotated[bool, Scope.RUN, _IF_RECOMPUTABLE] = False
    """Keep only the input of each block and recompute the rest in the backward pass."""
    compile: Annotated[bool, Scope.RUN] = False
    """Use torch.compile; needs a C++ compiler on the nodes."""


class WatchSpec(Section):
    """When a run that goes wrong is ended."""

    nonfinite_steps: Annotated[Count, Scope.RUN] = 2
    """This many consecutive steps with a NaN or infinity end the run."""
    stall_seconds: Annotated[Seconds | None, Scope.RUN] = 900
    """A rank without progress for this long ends the run; null: never."""


class EmaSpec(Section):
    """A moving average of the weights and of BN's running statistics, evaluated alongside the weights at the end."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Weight of the average in each step; its memory is about 1 / (1 - decay) steps. null: no average."""


class NoiseScaleSpec(Section):
    """The gradient noise scale (McCandlish et al.): how large a batch the data can use. It changes no result."""

    every_steps: Annotated[NonNegative, Scope.RUN] = 10
    """Steps between two measurements; 0: never. Needs two virtual GPUs or more."""


class Spec(Section):
    """One experiment."""

    name: Annotated[FolderName, Scope.RUN]
    """Name of the run; its folder is run_dir/name."""
    # RUN: the keys that it implies are compared.
    task: Annotated[Literal["classification", "detection"], Scope.RUN] = "classification"
    """classification: the class of a clip; detection: the boxes and classes of the objects in each frame."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Scope.TRAINING | Scope.PRECISE_BN] = 0
    """Decides everything random."""
    model: ModelSpec
    data: DataSpec
    scale: Annotated[ScaleSpec, Scope.TRAINING | Scope.PRECISE_BN] = ScaleSpec()
    parallel: Annotated[ParallelSpec, Scope.TRAINING] = ParallelSpec()
    optimizer: Annotated[OptimizerSpec, Scope.TRAINING] = OptimizerSpec()
    schedule: Annotated[ScheduleSpec, Scope.TRAINING] = ScheduleSpec()
    loss: Annotated[LossSpec, Scope.TRAINING] = LossSpec()
    ema: Annotated[EmaSpec, Scope.TRAINING] = EmaSpec()
    precision: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    """fp16 uses loss scaling; fp64 computes everything in double."""
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    watch: WatchSpec = WatchSpec()
    noise_scale: NoiseScaleSpec = NoiseScaleSpec()
    execution: ExecutionSpec = ExecutionSpec()
    run_dir: Annotated[PathText, Scope.RUN] = "runs"
    """Folder of the runs."""

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir) / self.name

    @property
    def multi_label_classes(self) -> int | None:
        """The number of classes where a clip may have several of them or none; None where each has one."""
        return self.model.num_classes if self.loss.base == "binary" else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight and of its gradient: fp16 and bf16 are types of the activations only."""
        return 8 if self.precision == "fp64" else 4
