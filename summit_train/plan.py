"""Every number of a run before the run: (spec, ranks, number of clips) -> Plan."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from summit_train.errors import UserError
from summit_train.modality import RGB
from summit_train.models.count import Count
from summit_train.network import count_network
from summit_train.optim.keys import OptimizerSpec, ScheduleSpec
from summit_train.optim.schedule import Schedule, peak_learning_rate
from summit_train.spec import Spec

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


class PlanError(UserError):
    """The spec does not fit the number of ranks or of clips."""


@dataclass(frozen=True)
class Plan:
    """The numbers of one run. Bytes are bytes; LR as the optimizer gets it; multiply-adds of one clip's forward pass.

    memory_bytes_per_rank is an estimate: weights, their average, gradients and the solver's state, plus what the
    backward pass needs of the clips of one virtual GPU.
    """

    ranks: int
    virtual_gpus: int
    accumulation: int
    clips_per_gpu: int
    global_batch: int
    frames_per_batch: int
    clips: int
    epochs: int
    steps_per_epoch: int
    schedule: Schedule
    dropped_clips_per_epoch: int
    parameters: int
    gradient_bytes: int
    multiply_adds: int
    input_bytes_per_step_and_rank: int
    memory_bytes_per_rank: int
    checkpoint_bytes: int

    @property
    def total_steps(self) -> int:
        """The updates of the whole run."""
        return self.schedule.total_steps

    @property
    def warmup_steps(self) -> int:
        """The updates of the warm-up."""
        return int(self.schedule.warmup_steps)

    @property
    def peak_lr(self) -> float:
        """The LR at the end of the warm-up."""
        return self.schedule.peak_lr

    def learning_rate(self, step: int) -> float:
        """The LR of update number `step`, counted from 0."""
        return self.schedule.learning_rate(step)

    def values(self) -> dict[str, Any]:
        """The plan as one JSON object, with the keys of the schedule among the others."""
        values = asdict(self)
        schedule: dict[str, Any] = values.pop("schedule")
        return values | schedule | {"milestones": list(self.schedule.milestones)}


def make_plan(spec: Spec, ranks: int, num_clips: int) -> Plan:
    """Work out the plan of `spec` on `ranks` ranks with `num_clips` training clips.

    Raises PlanError where the ranks do not divide the virtual GPUs, the clips do not fill one global batch, or the
    warm-up takes the whole run.
    """
    virtual_gpus = spec.scale.gpus if spec.scale.gpus is not None else ranks
    _check_ranks(virtual_gpus, ranks)
    global_batch = virtual_gpus * spec.scale.clips_per_gpu
    steps_per_epoch = num_clips // global_batch
    if num_clips < global_batch:
        raise PlanError(
            f"data.train has {num_clips} clips, less than one global batch of {global_batch} "
            f"(scale.gpus {virtual_gpus} x scale.clips_per_gpu {spec.scale.clips_per_gpu})"
        )
    network = count_network(spec)
    accumulation = virtual_gpus // ranks
    return Plan(
        ranks=ranks,
        virtual_gpus=virtual_gpus,
        accumulation=accumulation,
        clips_per_gpu=spec.scale.clips_per_gpu,
        global_batch=global_batch,
        frames_per_batch=global_batch * spec.data.num_frames,
        clips=num_clips,
        epochs=spec.schedule.epochs,
        steps_per_epoch=steps_per_epoch,
        schedule=plan_schedule(spec.optimizer, spec.schedule, global_batch, num_clips),
        dropped_clips_per_epoch=num_clips - steps_per_epoch * global_batch,
        parameters=network.parameters,
        gradient_bytes=network.parameters * spec.weight_bytes,
        multiply_adds=network.multiply_adds,
        input_bytes_per_step_and_rank=accumulation * spec.scale.clips_per_gpu * _clip_bytes(spec),
        memory_bytes_per_rank=_memory(spec, network),
        checkpoint_bytes=(1 + spec.optimizer.states + _averages(spec)) * network.parameters * spec.weight_bytes,
    )


def plan_schedule(optimizer: OptimizerSpec, course: ScheduleSpec, global_batch: int, num_clips: int) -> Schedule:
    """Return the course of the LR: from here on durations are steps.

    LEGW scales the epochs of the warm-up by global_batch / base_batch, so its steps are those of the baseline,
    warmup_epochs * num_clips / base_batch, whatever the batch. Raises PlanError where the warm-up takes the whole run.
    """
    steps_per_epoch = num_clips // global_batch
    total_steps = steps_per_epoch * course.epochs
    is_scaled = course.warmup_scaling == "linear"
    warmup_steps_per_epoch = num_clips / optimizer.base_batch if is_scaled else float(steps_per_epoch)
    warmup_steps = round(course.warmup_epochs * warmup_steps_per_epoch)
    if warmup_steps >= total_steps:
        fits = _round_down((total_steps - 1) / warmup_steps_per_epoch)
        factor = f" x {global_batch:,} / {optimizer.base_batch:,} (schedule.warmup_scaling)" if is_scaled else ""
        raise PlanError(
            f"schedule.warmup_epochs: a warm-up of {course.warmup_epochs:g}{factor} epochs = {warmup_steps:,} steps "
            f"leaves nothing of the run, {course.epochs:,} epochs = {total_steps:,} steps; at most {fits:g} fits"
        )
    return Schedule(
        peak_lr=peak_learning_rate(optimizer.base_lr, optimizer.base_batch, global_batch, optimizer.lr_scaling),
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup=course.warmup,
        decay=course.decay,
        power=course.power,
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in course.milestones),
        factor=course.factor,
    )


def _round_down(value: float) -> float:
    """Return a number that is not above `value`, of three digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.floor(value / unit) * unit


def _check_ranks(virtual_gpus: int, ranks: int) -> None:
    if virtual_gpus % ranks == 0:
        return
    divisors = [n for n in range(1, virtual_gpus + 1) if virtual_gpus % n == 0]
    below = max(n for n in divisors if n < ranks) if ranks > 1 else 1
    above = [n for n in divisors if n > ranks]
    near = f"{below} or {above[0]}" if above else f"{below}"
    raise PlanError(
        f"scale.gpus is {virtual_gpus}, which {ranks} ranks do not divide: every rank plays as many virtual GPUs as "
        f"the next; start {near} ranks, or change scale.gpus"
    )


def _clip_bytes(spec: Spec) -> int:
    """Return the bytes of a clip on its way to the device, uint8."""
    return math.prod(RGB.clip_shape(spec.data.num_frames, spec.data.crop))


def _averages(spec: Spec) -> int:
    """Return the number of averages of the weights that a run holds."""
    return int(spec.ema.decay is not None)


def _memory(spec: Spec, network: Count) -> int:
    weights = (2 + spec.optimizer.states + _averages(spec)) * network.parameters * spec.weight_bytes
    return weights + spec.scale.clips_per_gpu * network.activation_bytes(
        _BYTES[spec.precision], spec.execution.recompute
    )


def sample_learning_rates(plan: Plan, points: int = 9) -> list[tuple[int, float]]:
    """(step, LR) of evenly spaced steps from the first to the last, with the end of the warm-up among them."""
    last = plan.total_steps - 1
    steps = {round(last * i / (points - 1)) for i in range(points)} | {max(0, plan.warmup_steps - 1)}
    return [(step, plan.learning_rate(step)) for step in sorted(steps)]
