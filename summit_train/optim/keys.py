"""The keys of the recipe: what `optimizer` and `schedule` of a spec may say, and what they refuse together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from summit_train.typed import Count, Positive, Section


class OptimizerSpec(Section):
    """The solver. Peak LR = base_lr * (global_batch / base_batch) under linear scaling."""

    name: Literal["sgd"] = "sgd"
    """SGD with momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Weight decay; not applied to biases and batch normalisation."""
    base_lr: Positive = 0.00125
    """LR at a global batch of base_batch clips."""
    base_batch: Count = 8
    """Global batch that base_lr is given for, clips."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """Peak LR = base_lr * f, with f the ratio of the batches, its root, or 1."""
    head_lr_factor: Positive = 1.0
    """The classifier's LR is this times the others', for fine-tuning."""
    clip_norm: Positive | None = None
    """Clip the global norm of the gradient to this; null: no clipping."""
    compression: Literal["none", "fp16"] = "none"
    """Number format of the gradients on the network; none: that of the parameters."""


class ScheduleSpec(Section):
    """The length of the run and the course of the LR."""

    epochs: Count = 100
    """Length of the run."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5
    """The LR rises to its peak over this many epochs, step by step."""
    warmup: Literal["linear", "squared"] = "linear"
    """The LR of the warm-up: the peak times the part of it that is done, or times that part squared."""
    warmup_scaling: Literal["none", "linear"] = "none"
    """linear: warmup_epochs are those at base_batch clips and grow with the global batch, so the number of steps stays
    (LEGW)."""
    decay: Literal["cosine", "linear", "polynomial", "steps", "none"] = "cosine"
    """After the warm-up: cosine to 0, linear to 1e-6 (DATE), polynomial to 0 (LARS), steps, or constant."""
    power: Positive = 2.0
    """polynomial: the LR is the peak times the part of the decay that is left, to this power."""
    milestones: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """steps: epochs after which the LR falls."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """steps: the LR falls to this part of its value."""


def schedule_problems(schedule: ScheduleSpec) -> Iterator[tuple[str, str]]:
    """Keys of a schedule that are impossible together: (key, what is wrong and what would be right).

    A warm-up that the batch scales is checked by the plan, which knows the batch.
    """
    if schedule.warmup_scaling == "none" and schedule.warmup_epochs > schedule.epochs:
        longer = f"a warm-up of {schedule.warmup_epochs:g} epochs is longer than the run ({schedule.epochs} epochs)"
        yield "schedule.warmup_epochs", longer
    if schedule.decay != "steps":
        return
    epochs = [0.0, *schedule.milestones, float(schedule.epochs)]
    if not schedule.milestones or not all(before < after for before, after in pairwise(epochs)):
        given = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
        rising = f"steps needs rising epochs between 0 and {schedule.epochs}, such as [30, 60, 80]"
        yield "schedule.milestones", f"{rising}; got [{given}]"


def describe_decay(schedule: ScheduleSpec) -> str:
    """Return the decay in words: "polynomial, power 2"."""
    if schedule.decay == "polynomial":
        return f"polynomial, power {schedule.power:g}"
    if schedule.decay == "steps":
        return f"steps, x {schedule.factor:g} after epochs {', '.join(f'{e:g}' for e in schedule.milestones)}"
    return schedule.decay
