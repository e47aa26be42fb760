"""The keys of `optimizer`, `schedule` and `parallel`, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from summit_train.core.own_parts import OwnPart
from summit_train.core.text import counted
from summit_train.spec.catalog import is_foreign
from summit_train.spec.typed import MOST, Count, Named, Positive, Section

# What null means: the values of torch and, for LAMB, of its paper.
_MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}
_EPS = {"rmsprop": 1e-8, "adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8, "lamb": 1e-6}
_WITH_BETAS = ("adam", "adamw", "lamb")
# What solvers keep for each weight, as torch names it: tensors of its shape, besides that of momentum, and counters.
_MOMENTS = {"rmsprop": ("square_avg",), "adagrad": ("sum",), **dict.fromkeys(_WITH_BETAS, ("exp_avg", "exp_avg_sq"))}
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

    names: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Of parameters, or of modules with all their parameters; globs."""
    until_epoch: Count | None = None
    """They are trained after this many epochs; null: never."""


def _parts(value: Any) -> Any:
    """Gather a name, or those in a list, which are frozen for the whole run, in one section in front of the others."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list):
        return value
    names = [one for one in value if isinstance(one, str)]
    return [*([{"names": names}] if names else []), *(one for one in value if not isinstance(one, str))]


class OptimizerSpec(Section):
    """The solver. Peak LR = base_lr * (global_batch / base_batch) under linear scaling."""

    name: Literal["sgd", "rmsprop", "adagrad", "adam", "adamw", "lamb"] = "sgd"
    """SGD, RMSprop, AdaGrad, Adam, AdamW or LAMB. Weight decay is part of the gradient; in adamw and lamb, of the
    update."""
    momentum: Decay | None = None
    """sgd, rmsprop: momentum. null: 0.9 for sgd, 0 for rmsprop."""
    alpha: Decay = 0.99
    """rmsprop: factor of the running average of squared gradients."""
    # Not strict: below a validator of the whole section a YAML list is a list, not a tuple.
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
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
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the LR from each block to the one before it, from the classifier down. 1: the same LR everywhere."""
    lr_factors: dict[str, Rate] = Field(default={})
    """Factors on the LR, by name as in freeze. Factors of the same parameter are multiplied."""
    freeze: Annotated[tuple[FreezeSpec, ...], Field(strict=False), BeforeValidator(_parts), _FREEZE] = ()
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
    options: dict[str, Any] = Field(default={})
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


class ParallelSpec(Section):
    """How virtual GPUs train together: one gradient for all in each step, or learners whose networks are averaged."""

    method: Literal["synchronous", "averaging"] = "synchronous"
    """synchronous: every step averages the gradients. averaging: each virtual GPU is a learner with a network and a
    solver of its own; every `period` their networks are averaged (AAVG). The keys below are read by averaging alone."""
    period: Annotated[Literal["epoch"] | Count, BeforeValidator(_period)] = "epoch"
    """Steps from one average to the next, at the latest the end of the epoch; epoch: once, at the end."""
    optimizer_state: Literal["average", "local"] = "average"
    """The solvers' state: averaged as the weights are, or each learner keeps its own."""
    bn: Literal["merge", "local"] = "merge"
    """BN's running statistics: each learner takes those of all learners' clips together, or keeps its own. Evaluation
    always uses the merged ones."""
    grow_batch: GrowBatchSpec | None = None
    """Grow the batch at the end of an epoch; null: it stays."""


def solver_problems(
    optimizer: OptimizerSpec, schedule: ScheduleSpec, parallel: ParallelSpec
) -> Iterator[tuple[str, str]]:
    """Yield impossible keys: (key, what is wrong and what would be right). The plan checks a scaled warm-up."""
    trust = optimizer.trust_ratio
    if trust is not None and trust.kind == "bounded" and trust.lower > trust.upper:
        bounds = f"lower is {trust.lower:g} and upper {trust.upper:g}"
        yield "optimizer.trust_ratio.lower", f"must be at most upper: {bounds}"
    if trust is not None and trust.kind == "lars" and optimizer.name == "lamb":
        yield "optimizer.trust_ratio", "lamb includes a trust ratio; take lars over another solver, or null"
    for part in optimizer.freeze:
        if part.until_epoch is not None and part.until_epoch >= schedule.epochs:
            right = f"must be below the run's {counted(schedule.epochs, 'epoch')}, got {part.until_epoch}"
            yield "optimizer.freeze", f"until_epoch {right}; null freezes for the whole run"
    if schedule.warmup_scaling == "none" and schedule.warmup_epochs > schedule.epochs:
        right = f"must be at most the run's {counted(schedule.epochs, 'epoch')}, got {schedule.warmup_epochs:g}"
        yield "schedule.warmup_epochs", right
    epochs = [0.0, *schedule.milestones, float(schedule.epochs)]
    is_rising = all(before < after for before, after in pairwise(epochs))
    if schedule.decay == "steps" and not (schedule.milestones and is_rising):
        given = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
        rising = f"steps needs rising epochs between 0 and {schedule.epochs}, such as [30, 60, 80]"
        yield "schedule.milestones", f"{rising}; got [{given}]"
    if parallel.method == "averaging" and optimizer.compression != "none":
        yield "optimizer.compression", "averaging sends weights, which it does not round; must be none"
    for name, field in ParallelSpec.model_fields.items():
        if parallel.method == "synchronous" and name != "method" and getattr(parallel, name) != field.default:
            yield f"parallel.{name}", "method synchronous does not read it; set parallel.method to averaging"


def describe_solver(optimizer: OptimizerSpec) -> str:
    """Return the solver with its constants and its trust ratio: "sgd, momentum 0.9; weight decay 0.0001"."""
    betas = ", ".join(f"{beta:g}" for beta in optimizer.betas)
    constants = {
        "momentum": optimizer.name in _MOMENTUM and optimizer.momentum and f"{optimizer.momentum:g}",
        "alpha": optimizer.name == "rmsprop" and f"{optimizer.alpha:g}",
        "betas": optimizer.name in _WITH_BETAS and betas,
        "eps": optimizer.name in _EPS and f"{optimizer.eps:g}",
    }
    parts = [optimizer.name, *(f"{name} {value}" for name, value in constants.items() if value)]
    words = [", ".join(parts), f"weight decay {optimizer.weight_decay:g}"]
    if optimizer.layer_decay != 1:
        words.append(f"layer decay {optimizer.layer_decay:g}")
    for part in optimizer.freeze:
        until = "" if part.until_epoch is None else f" for {counted(part.until_epoch, 'epoch')}"
        words.append(f"frozen{until}: {', '.join(part.names)}")
    trust = optimizer.trust_ratio
    if trust is not None:
        values = f"{trust.coefficient:g}" if trust.kind == "lars" else f"[{trust.lower:g}, {trust.upper:g}]"
        words.append(f"trust ratio {trust.kind} {values}")
    return "; ".join(words)


def describe_decay(schedule: ScheduleSpec) -> str:
    """Return the decay in words: "polynomial, power 2"."""
    if schedule.decay == "polynomial":
        return f"polynomial, power {schedule.power:g}"
    if schedule.decay == "steps":
        return f"steps, x {schedule.factor:g} after epochs {', '.join(f'{e:g}' for e in schedule.milestones)}"
    return ", ".join([schedule.decay, *(f"{name} {value}" for name, value in schedule.options.items())])
