"""Every number of a run before the run: (spec, ranks, number of clips) -> Plan."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from summit_train.core.count import Count
from summit_train.core.errors import UserError
from summit_train.core.text import binary_size, counted, share
from summit_train.core.workers import READ_AHEAD
from summit_train.counts import count_network
from summit_train.data.batches.order import Order, virtual_gpus_of
from summit_train.optim.schedule import Schedule, peak_learning_rate
from summit_train.spec import Spec
from summit_train.spec.keys import SOLVER_KEYS, OptimizerSpec, ScheduleSpec

_MOST_VIEWS = 16  # of a test at once; more make it no faster
_LARGEST_LR = 1e30  # fits float32 even times a factor of the head's LR
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_COUNTS = ("parameters", "trained_parameters", "multiply_adds")  # of the network
# Properties of Plan.
_BY_COUNTS = ("gradient_bytes", "averaging_bytes", "memory_bytes_per_rank", "checkpoint_bytes", "clip_bytes_per_rank")


@dataclass(frozen=True)
class BatchSize:
    """One size of the batch, in clips, and the steps that an epoch has with it."""

    clips_per_gpu: int
    global_batch: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Plan:
    """The numbers of one run. Bytes are bytes; LR as the optimizer gets it.

    accumulation: the largest share of a rank. ladder: the batches that the run may have, the first one first. All other
    numbers are those of the first batch. clips: of the list; a batch counts each of a clip's data.repeats views.
    """

    spec: Spec = field(repr=False, compare=False)
    ranks: int
    virtual_gpus: int
    accumulation: int
    clips_per_gpu: int
    global_batch: int
    frames_per_batch: int
    clips: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    peak_lr: float
    schedule: Schedule
    ladder: tuple[BatchSize, ...]
    dropped_clips_per_epoch: int
    input_bytes_per_step_and_rank: int

    @cached_property
    def network(self) -> Count:
        """Count the network. Torch imports its compiler for the first count: one rank needs that, not all."""
        return count_network(self.spec)

    def virtual_gpus_of(self, rank: int) -> range:
        return virtual_gpus_of(rank, self.ranks, self.virtual_gpus)

    @property
    def load_balance(self) -> float:
        """The mean share of the virtual GPUs over the largest: the part of its time that a rank is not held up."""
        return self.virtual_gpus / self.ranks / self.accumulation

    @property
    def gradient_bytes(self) -> int:
        """The bytes that a rank contributes to the allreduce of a step."""
        return self.network.trained_parameters * self.spec.weight_bytes

    @property
    def averaging_bytes(self) -> int:
        """The bytes that a rank contributes to an average of the learners, without BN's statistics; 0 otherwise."""
        averages = self.spec.parallel.method == "averaging"
        return averaged_elements(self.spec, self.network) * self.spec.weight_bytes if averages else 0

    @property
    def memory_bytes_per_rank(self) -> int:
        """An estimate: weights, their average, gradients and the solver's state, and the activations.

        The activations are those that the backward pass needs for the clips of one virtual GPU, or those of the final
        evaluation's views if they are larger.
        """
        spec = self.spec
        network = self.network
        states = self.spec.optimizer.states
        copies = 2 + states + (spec.ema.decay is not None)
        if spec.parallel.method == "averaging":
            # One learner's gradients at a time, the average, and the buffer of the solver's state on its way.
            copies = self.accumulation * (1 + states) + 2 + max(1, states)
        bytes_each = _BYTES[spec.precision]
        training = self.ladder[-1].clips_per_gpu * network.activation_bytes(bytes_each, spec.execution.recompute)
        training += 2 * network.parameters * (bytes_each == 2)  # autocast's copies of the weights
        # A forward pass keeps the tensors of one block at a time. Twice what training keeps of the largest block, as
        # operations allocate outputs while inputs are alive (a ResNet-50 on a CPU: 1.8 times). A whole frame is 16:9.
        side = spec.evaluate.short_side
        pixels = side * (side * 16 // 9 if spec.evaluate.crops == "full" else side)
        views = views_at_once(spec, pixels)
        elements = 2 * network.largest_block_elements * views * pixels // math.prod(spec.data.clip_shape[1:3])
        return _elements(spec, network, copies) * spec.weight_bytes + max(training, elements * bytes_each)

    @property
    def clip_bytes_per_rank(self) -> int:
        """The bytes of the clips in a rank's host memory: of the micro-batch at work, and of those read ahead."""
        batches = 1 + READ_AHEAD * self.spec.data.num_workers()
        return batches * self.ladder[-1].clips_per_gpu * math.prod(self.spec.data.clip_shape)

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.spec, self.network, self.virtual_gpus)

    def first_step(self, epoch: int, batch: BatchSize) -> int:
        """Return the number of an epoch's first step, counted from 0.

        With a grown batch an epoch has fewer steps. They take the last step numbers of the epoch, so that every epoch
        ends at the same number.
        """
        return (epoch + 1) * self.steps_per_epoch - batch.steps_per_epoch

    def learning_rate(self, step: int, batch: BatchSize | None = None) -> float:
        """The LR of update number `step`, counted from 0. A grown batch reads the schedule by the epoch's progress."""
        if batch is None or batch == self.ladder[0]:
            return self.schedule.learning_rate(step)
        epoch = step // self.steps_per_epoch
        progress = (step - self.first_step(epoch, batch)) / batch.steps_per_epoch
        return self.schedule.learning_rate((epoch + progress) * self.steps_per_epoch)

    def order(self, batch: BatchSize | None = None) -> Order:
        """The order of the training clips with this batch; None: the first one."""
        batch = batch or self.ladder[0]
        counts = (self.virtual_gpus, batch.clips_per_gpu // self.spec.data.repeats, batch.steps_per_epoch)
        return Order(self.clips, self.spec.seed, *counts, step_numbers_per_epoch=self.steps_per_epoch)

    def values(self) -> dict[str, Any]:
        names = [own.name for own in fields(self) if own.name not in ("spec", "schedule")]
        values: dict[str, Any] = {name: getattr(self, name) for name in (*names, *_BY_COUNTS)}
        values |= {name: getattr(self.network, name) for name in _COUNTS} | {"load_balance": self.load_balance}
        values["ladder"] = [asdict(size) for size in self.ladder]
        return values | asdict(self.schedule) | {"milestones": list(self.schedule.milestones)}


def make_plan(spec: Spec, ranks: int, num_clips: int) -> Plan:
    """Work out the plan of `spec` on `ranks` ranks with `num_clips` training clips.

    Raises UserError where there are more ranks than virtual GPUs, the clips do not fill one global batch, the
    warm-up takes the whole run, or the batch is to grow beyond a learner's share of an epoch.
    """
    virtual_gpus = spec.scale.gpus if spec.scale.gpus is not None else ranks
    if ranks > virtual_gpus:
        fewer = " or fewer" if virtual_gpus > 1 else ""
        right = f"start {counted(virtual_gpus, 'rank')}{fewer}, or raise it"
        raise UserError(f"scale.gpus must be at least the {ranks:,} ranks, got {virtual_gpus:,}; {right}")
    global_batch = virtual_gpus * spec.scale.clips_per_gpu
    views = num_clips * spec.data.repeats  # of an epoch
    steps_per_epoch = views // global_batch
    if views < global_batch:
        repeated = f" x data.repeats {spec.data.repeats}" if spec.data.repeats > 1 else ""
        batch = f"{global_batch} (scale.gpus {virtual_gpus} x scale.clips_per_gpu {spec.scale.clips_per_gpu})"
        raise UserError(f"data.train has {counted(num_clips, 'clip')}{repeated}, less than one global batch of {batch}")
    accumulation = -(-virtual_gpus // ranks)
    schedule = plan_schedule(spec.optimizer, spec.schedule, global_batch, views)
    schedule.check()
    clip_bytes = math.prod(spec.data.clip_shape)  # uint8
    return Plan(
        spec=spec,
        ranks=ranks,
        virtual_gpus=virtual_gpus,
        accumulation=accumulation,
        clips_per_gpu=spec.scale.clips_per_gpu,
        global_batch=global_batch,
        frames_per_batch=global_batch * spec.data.num_frames,
        clips=num_clips,
        epochs=spec.schedule.epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=schedule.total_steps,
        warmup_steps=int(schedule.warmup_steps),
        peak_lr=schedule.peak_lr,
        schedule=schedule,
        ladder=_ladder(spec, virtual_gpus, views),
        dropped_clips_per_epoch=num_clips - steps_per_epoch * global_batch // spec.data.repeats,
        input_bytes_per_step_and_rank=accumulation * spec.scale.clips_per_gpu * clip_bytes,
    )


def validates(spec: Spec, epoch: int) -> bool:
    every = spec.evaluate.every_epochs  # 0: never
    return every > 0 and (epoch % every == 0 or epoch == spec.schedule.epochs)


def is_due(spec: Spec, epoch: int) -> bool:
    """True if a checkpoint, which may count in the final accuracy, is always written at the end of an epoch.

    Those that requests to stop and validations leave at the ends of other epochs would change it. Any validation may be
    the last where the run may stop early.
    """
    is_last = epoch == spec.schedule.epochs or (spec.schedule.early_stop is not None and validates(spec, epoch))
    return epoch % spec.checkpoint.every_epochs == 0 or is_last


def evaluations(spec: Spec) -> tuple[int, int, int]:
    """Return the views of a video in all validations, the networks of the final evaluation, and its views by each one.

    The average of a checkpoint's weights is a network of its own. A stream counts as evaluate.clips views.
    """
    evaluate = spec.evaluate
    epochs = range(1, spec.schedule.epochs + 1)
    validations = sum(validates(spec, epoch) for epoch in epochs)
    saved = sum(is_due(spec, epoch) for epoch in epochs)
    networks = min(evaluate.last_checkpoints, saved) * (1 if spec.ema.decay is None else 2)
    views = evaluate.clips * (evaluate.crops if isinstance(evaluate.crops, int) else 1)
    return validations * (evaluate.clips if evaluate.mode == "stream" else 1), networks, views


def _ladder(spec: Spec, learners: int, num_clips: int) -> tuple[BatchSize, ...]:
    """Return the batches from the first to the largest, each `factor` times the one before.

    The largest is grow_batch.max or the largest multiple of the first that a learner's share of an epoch holds: 576 of
    596 clips from 32 on in Cong et al., section III B. Raises UserError where max is more than the share.
    """
    grow = spec.parallel.grow_batch
    size = spec.scale.clips_per_gpu
    clips_each = num_clips // learners
    sizes = [size]
    if grow is not None:
        largest = grow.max or clips_each // size * size
        if largest > clips_each:
            has = f"{learners:,} learners have {clips_each:,} of the {num_clips:,} clips each"
            raise UserError(f"parallel.grow_batch.max: {largest:,} clips do not fit a learner's epoch: {has}")
        while sizes[-1] < largest:
            sizes.append(min(sizes[-1] * grow.factor, largest))
    return tuple(BatchSize(size, learners * size, num_clips // (learners * size)) for size in sizes)


def averages_per_epoch(spec: Spec, steps_per_epoch: int) -> int:
    period = spec.parallel.period
    return 1 if period == "epoch" else math.ceil(steps_per_epoch / period)


def averaged_elements(spec: Spec, network: Count) -> int:
    """Return the elements of an average of the learners: weights, and the solver's state where it is averaged."""
    states = spec.optimizer.states if spec.parallel.optimizer_state == "average" else 0
    return (1 + states) * network.trained_parameters


def checkpoint_bytes(spec: Spec, network: Count, virtual_gpus: int) -> int:
    parallel = spec.parallel
    states = 1 + spec.optimizer.states  # tensors of each weight's shape
    learners = virtual_gpus if "local" in (parallel.optimizer_state, parallel.bn) else 0
    return _elements(spec, network, states + (spec.ema.decay is not None) + learners * states) * spec.weight_bytes


def _elements(spec: Spec, network: Count, copies: int) -> int:
    """Return the elements of `copies` tensors for each weight; only weights and their average have frozen ones too."""
    whole = 1 + (spec.ema.decay is not None)
    return whole * network.parameters + (copies - whole) * network.trained_parameters


def plan_schedule(optimizer: OptimizerSpec, course: ScheduleSpec, global_batch: int, num_clips: int) -> Schedule:
    """Return the course of the LR: from here on durations are steps.

    LEGW scales the epochs of the warm-up by global_batch / base_batch, so its steps are those of the baseline,
    warmup_epochs * num_clips / base_batch, whatever the batch. Raises UserError where the warm-up takes the whole run,
    or the LR is beyond float32.
    """
    steps_per_epoch = num_clips // global_batch
    total_steps = steps_per_epoch * course.epochs
    is_scaled = course.warmup_scaling == "linear"
    warmup_steps_per_epoch = num_clips / optimizer.base_batch if is_scaled else float(steps_per_epoch)
    warmup_steps = round(course.warmup_epochs * warmup_steps_per_epoch)
    if warmup_steps >= total_steps:
        fits = (total_steps - 1) / warmup_steps_per_epoch
        if fits > 0:  # rounded down to three digits
            unit = 10.0 ** (math.floor(math.log10(fits)) - 2)
            fits = math.floor(fits / unit) * unit
        factor = f" x {global_batch:,} / {optimizer.base_batch:,} (schedule.warmup_scaling)" if is_scaled else ""
        run = counted(total_steps, "step")
        warmup = counted(warmup_steps, "step")
        wrong = f"must be shorter than the run of {run}, got {warmup} from {course.warmup_epochs:g}{factor}"
        raise UserError(f"schedule.warmup_epochs: the warm-up {wrong}; try {fits:g} or less")
    peak_lr = peak_learning_rate(optimizer.base_lr, optimizer.base_batch, global_batch, optimizer.lr_scaling)
    if peak_lr > _LARGEST_LR:
        largest = f"{_LARGEST_LR:g} at most"
        raise UserError(f"optimizer.base_lr: the peak LR must be {largest}, got {peak_lr:.3g} of {optimizer.base_lr:g}")
    return Schedule(
        peak_lr=peak_lr,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup=course.warmup,
        decay=next(iter(course.open_decay()), course.decay),
        power=course.power,
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in course.milestones),
        factor=course.factor,
        steps_per_epoch=steps_per_epoch,
    )


def views_at_once(spec: Spec, pixels: int) -> int:
    """Compute how many test views of `pixels` pixels a frame the network processes at once.

    Together they have no more pixels than one virtual GPU's clips in a training step; a larger view is processed alone.
    """
    return max(1, min(_MOST_VIEWS, spec.scale.clips_per_gpu * math.prod(spec.data.clip_shape[1:3]) // pixels))


def sample_learning_rates(plan: Plan, points: int = 9) -> list[tuple[int, float]]:
    """(step, LR) of evenly spaced steps from the first to the last, with the end of the warm-up among them."""
    last = plan.total_steps - 1
    steps = {round(last * i / (points - 1)) for i in range(points)} | {max(0, plan.warmup_steps - 1)}
    return [(step, plan.learning_rate(step)) for step in sorted(steps)]


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan as rows of name and text, for people."""
    spec = plan.spec
    network = plan.network
    rows = [
        ("virtual GPUs", f"{plan.virtual_gpus:,} = {_shares_text(plan)} accumulation"),
        *balance_rows(plan),
        ("global batch", _batch_text(plan)),
    ]
    if network.has_bn:
        clips = counted(plan.clips_per_gpu, "clip")
        rows.append(("BN batch", f"{clips} x {spec.data.num_frames} frames of one virtual GPU"))
    warmup_epochs = counted(plan.warmup_steps / plan.steps_per_epoch, "epoch")
    is_whole = network.trained_parameters == network.parameters
    part = "" if is_whole else f", of which {network.trained_parameters:,} are trained"
    input_mb = plan.input_bytes_per_step_and_rank / 1e6
    held_mb = plan.clip_bytes_per_rank / 1e6
    workers = spec.data.workers
    rows += [
        ("steps", _steps_text(plan)),
        ("dropped clips", f"{plan.dropped_clips_per_epoch:,} of {plan.clips:,} per epoch, different ones each time"),
        ("solver", _solver_text(spec.optimizer)),
        ("warm-up", f"{counted(plan.warmup_steps, 'step')} = {warmup_epochs}, {spec.schedule.warmup}"),
        ("peak LR", f"{plan.peak_lr:.6g} ({spec.optimizer.lr_scaling} scaling of {spec.optimizer.base_lr:g})"),
        ("decay", _decay_text(spec.schedule)),
        ("parameters", f"{network.parameters:,}{part}"),
        *_communication_rows(plan),
        ("multiply-adds", f"{network.multiply_adds / 1e9:,.2f} G a clip, forward"),
        ("input", f"{input_mb:,.1f} MB a step and rank, uint8, {held_mb:,.1f} MB in memory at once"),
        ("workers", "one for each core of a rank, at most 4" if workers is None else f"{workers:,} a rank"),
        ("memory", f"about {binary_size(plan.memory_bytes_per_rank)} a rank (weights and activations)"),
    ]
    if network.note:
        rows.append(("network built", network.note))
    kept = f"{spec.checkpoint.keep} kept"
    if spec.checkpoint.keep_best is not None:
        kept += " and the best"
    if spec.checkpoint.background:
        kept += "; written alongside the steps from a copy in rank 0's memory"
    rows.append(("checkpoint", f"{plan.checkpoint_bytes / 1e6:,.0f} MB, {kept}"))
    return rows


def _shares_text(plan: Plan) -> str:
    """Count the ranks of each number of virtual GPUs: "2 ranks x 3 + 1 rank x 4"."""
    fewer, more = divmod(plan.virtual_gpus, plan.ranks)
    shares = ((plan.ranks - more, fewer), (more, fewer + 1))
    return " + ".join(f"{counted(ranks, 'rank')} x {each:,}" for ranks, each in shares if ranks)


def _batch_text(plan: Plan) -> str:
    text = f"{counted(plan.global_batch, 'clip')} = {counted(plan.frames_per_batch, 'frame')}"
    views = plan.spec.data.repeats
    return text if views == 1 else f"{text}, {views} views of each of {plan.global_batch // views:,} clips of the list"


def _steps_text(plan: Plan) -> str:
    text = f"{plan.total_steps:,} = {counted(plan.epochs, 'epoch')} x {plan.steps_per_epoch:,}"
    stop = plan.spec.schedule.early_stop
    if stop is None:
        return text
    return f"at most {text}; stops after {counted(stop.epochs, 'epoch')} without a better {stop.measure}"


def _solver_text(optimizer: OptimizerSpec) -> str:
    """Return the solver with its constants and its trust ratio: "sgd, momentum 0.9; weight decay 0.0001"."""
    solver: list[str] = [optimizer.name]
    for key in SOLVER_KEYS[optimizer.name]:
        value = getattr(optimizer, key)
        if key == "betas":
            solver.append(f"betas {value[0]:g}, {value[1]:g}")
        elif value or key != "momentum":
            solver.append(f"{key} {value:g}")
    words = [", ".join(solver), f"weight decay {optimizer.weight_decay:g}"]
    if optimizer.layer_decay != 1:
        words.append(f"layer decay {optimizer.layer_decay:g}")
    for frozen in optimizer.freeze:
        until = "" if frozen.until_epoch is None else f" for {counted(frozen.until_epoch, 'epoch')}"
        words.append(f"frozen{until}: {', '.join(frozen.names)}")
    trust = optimizer.trust_ratio
    if trust is not None:
        values = f"{trust.coefficient:g}" if trust.kind == "lars" else f"[{trust.lower:g}, {trust.upper:g}]"
        words.append(f"trust ratio {trust.kind} {values}")
    return "; ".join(words)


def _decay_text(schedule: ScheduleSpec) -> str:
    """Return the decay with its constants: "polynomial, power 2"."""
    if schedule.decay == "polynomial":
        return f"polynomial, power {schedule.power:g}"
    if schedule.decay == "steps":
        epochs = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
        return f"steps, x {schedule.factor:g} after epochs {epochs}"
    return ", ".join([schedule.decay, *(f"{name} {value}" for name, value in schedule.options.items())])


def balance_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return a row on the efficiency lost where some ranks have one virtual GPU more than others; else none."""
    if plan.load_balance == 1:
        return []
    enough = -(-plan.virtual_gpus // plan.accumulation)
    as_fast = f"; {counted(enough, 'rank')} would be as fast" if enough < plan.ranks else ""
    waits = f"ranks with {counted(plan.accumulation - 1, 'virtual GPU')} wait for those with {plan.accumulation:,}"
    return [("load balance", f"{share(plan.load_balance)} efficiency: {waits}{as_fast}")]


def _communication_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return rows on the gradients or averages that ranks exchange, and on a growing batch."""
    parallel = plan.spec.parallel
    if parallel.method == "synchronous":
        return [("gradients", f"{plan.gradient_bytes / 1e6:,.1f} MB a step through the allreduce")]
    rounds = averages_per_epoch(plan.spec, plan.steps_per_epoch)
    state = "weights and solver state" if parallel.optimizer_state == "average" else "weights"
    sent = f"{plan.averaging_bytes / 1e6:,.1f} MB of {state}"
    rows = [("averaging", f"{counted(plan.virtual_gpus, 'learner')}; {counted(rounds, 'average')} an epoch of {sent}")]
    if len(plan.ladder) > 1:
        sizes = ", ".join(f"{size.clips_per_gpu:,}" for size in plan.ladder)
        lengths = ", ".join(f"{size.steps_per_epoch:,}" for size in plan.ladder)
        rows.append(("growing batch", f"{sizes} clips of a learner: {lengths} steps an epoch"))
    return rows
