"""The time of a step and of a run on a machine that is not here.

    step = compute + exposed communication + stragglers + waiting for data

compute        A passes (accumulation, the largest share of a rank), each a fixed part and n clips at the machine's rate
               (machine file)
communication  the part of the allreduces that is left after the backward pass: `overlap` over `network`; with model
               averaging, a step's share of the epoch's averages, which nothing hides
stragglers     all ranks wait for the slowest of the p that have A passes: the expected maximum of p normal deviations,
               times one rank's deviation (David and Nagaraja, "Order Statistics", section 4.5)
data           the frames of a step over the node's frames a second, less all of the above, under which the loader
               works ahead (the paper's Figure 3b counts only this, unhidden part)

A run is steps an epoch, rounded at the epoch's edge, times epochs. Evaluation is counted apart, because the paper does
not say whether its "train time" has it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import NormalDist

from summit_train.core.errors import UserError
from summit_train.counts import count_model, count_network
from summit_train.plan import averaged_elements, averages_per_epoch, evaluations
from summit_train.scaling.collectives import BACKWARD_SHARE, allreduce_seconds, layer_gradients, overlap
from summit_train.scaling.machines import RATE_KEYS, Machine, find_rate
from summit_train.spec import ModelSpec, Spec
from summit_train.spec.catalog import RGB

# The area of a full frame over a square of the same short side: Kinetics' videos are 4:3 (340 x 256).
_FULL_FRAME = 4 / 3


@dataclass(frozen=True)
class ScaledJob:
    """A spec on a number of nodes. virtual_gpus None: one a rank, so that the batch grows with the nodes."""

    spec: Spec
    machine: Machine
    nodes: int
    clips: int
    videos: int
    virtual_gpus: int | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.machine.gpus_per_node

    @property
    def batches(self) -> int:
        """Return the micro-batches of a step, one for each virtual GPU."""
        return self.virtual_gpus or self.gpus

    @property
    def accumulation(self) -> int:
        """Return the largest share of a rank."""
        return -(-self.batches // self.gpus)

    @property
    def views(self) -> int:
        """Return the clips of an epoch, each data.repeats times."""
        return self.clips * self.spec.data.repeats

    @property
    def global_batch(self) -> int:
        return self.batches * self.spec.scale.clips_per_gpu


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, communication without what runs under the backward pass."""

    compute_s: float
    communication_s: float
    stragglers_s: float
    data_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.stragglers_s + self.data_s


@dataclass(frozen=True)
class Forecast:
    """One row of `simulate`. efficiency: speed over one node's speed times the nodes.

    run_s and node_hours are of the training alone; evaluation_s comes on top.
    """

    nodes: int
    gpus: int
    accumulation: int
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    step_s: float
    parts: dict[str, float]
    clips_per_second: float
    efficiency: float
    run_s: float
    evaluation_s: float
    node_hours: float


def forecast(job: ScaledJob) -> Forecast:
    """Compute a job's row. Raises UserError if the machine lacks a figure, or ranks, batch and clips do not fit."""
    if job.gpus > job.batches:
        wrong = f"scale.gpus must be at least the {job.gpus:,} ranks of {job.nodes:,} nodes, got {job.batches:,}"
        raise UserError(f"{wrong}; choose fewer nodes, or let the batch grow with them (without --fixed-batch)")
    step = step_time(job)
    one_node = replace(job, nodes=1)
    per_epoch = steps_per_epoch(job.views, job.global_batch, job.machine.last_batch)
    total_steps = per_epoch * job.spec.schedule.epochs
    speed = job.global_batch / step.step_s
    run_s = total_steps * step.step_s
    return Forecast(
        nodes=job.nodes,
        gpus=job.gpus,
        accumulation=job.accumulation,
        global_batch=job.global_batch,
        steps_per_epoch=per_epoch,
        total_steps=total_steps,
        step_s=step.step_s,
        parts=asdict(step),
        clips_per_second=speed,
        efficiency=speed / (job.nodes * one_node.global_batch / step_time(one_node).step_s),
        run_s=run_s,
        evaluation_s=evaluation_seconds(job),
        node_hours=job.nodes * run_s / 3600,
    )


def step_time(job: ScaledJob) -> StepTime:
    """Compute one training step by part. Raises UserError where the machine's file lacks a figure."""
    machine = job.machine
    clips = job.spec.scale.clips_per_gpu
    clips_s = clips * seconds_per_clip(job.spec, machine)
    pass_s = machine.compute.step_overhead_s + clips_s
    backward_s = BACKWARD_SHARE * clips_s
    exposed_s = _communication(job, backward_s)
    compute_s = job.accumulation * pass_s
    # Passes deviate independently, so the deviations of A passes add up as their squares.
    deviation_s = machine.compute.straggler_cv * math.sqrt(job.accumulation) * pass_s
    stragglers_s = deviation_s * expected_maximum(job.batches - (job.accumulation - 1) * job.gpus)
    frames = -(-job.batches // job.nodes) * clips * job.spec.data.num_frames  # of the node with most
    data_s = max(0.0, frames / frame_rate(job) - (compute_s + exposed_s + stragglers_s))
    return StepTime(compute_s, exposed_s, stragglers_s, data_s)


def _communication(job: ScaledJob, backward_s: float) -> float:
    """Return the seconds of communication that a step waits for."""
    spec = job.spec
    network = job.machine.network
    seconds_of = partial(allreduce_seconds, network, job.nodes, job.machine.gpus_per_node)
    if spec.parallel.method == "averaging":
        steps = steps_per_epoch(job.views, job.global_batch, job.machine.last_batch)
        average_s = seconds_of(averaged_elements(spec, count_network(spec)) * spec.weight_bytes)
        return average_s * averages_per_epoch(spec, steps) / steps
    gradients = layer_gradients(count_network(spec), backward_s, gradient_element_bytes(spec))
    return overlap(gradients, backward_s, seconds_of, network) if job.gpus > 1 else 0.0


def seconds_per_clip(spec: Spec, machine: Machine) -> float:
    """Return the training seconds of a clip on one GPU: the machine's rate for that network, by multiply-adds."""
    rate = find_rate(machine, spec.model.arch, spec.precision)
    known = rate.multiply_adds
    clip_shape = (rate.num_frames, rate.crop, rate.crop, RGB.channels)
    if known is None:
        known = count_model(ModelSpec(**rate.model_dump(include=RATE_KEYS)), clip_shape).multiply_adds
    return count_network(spec).multiply_adds / known / rate.clips_per_second


def gradient_element_bytes(spec: Spec) -> int:
    return 2 if spec.optimizer.compression == "fp16" else spec.weight_bytes


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normal numbers: 0 for one, 3.4 for 2,304.

    It is the integral of 1 - F(x)^count - F(-x)^count over x > 0 (with F(-x)^count = P(the largest is below -x)).
    """
    if count == 1:
        return 0.0
    cdf = NormalDist().cdf
    per_unit = 64
    heights = [1 - cdf(i / per_unit) ** count - cdf(-i / per_unit) ** count for i in range(9 * per_unit + 1)]
    return (sum(heights) - (heights[0] + heights[-1]) / 2) / per_unit  # by the trapezoidal rule


def steps_per_epoch(clips: int, global_batch: int, last_batch: str) -> int:
    """Return the steps of an epoch: without the last, partial batch ('drop', as `train`), or with it ('keep')."""
    if clips < global_batch:
        raise UserError(f"{clips:,} clips do not fill one global batch of {global_batch:,}: fewer nodes, or more clips")
    return clips // global_batch if last_batch == "drop" else math.ceil(clips / global_batch)


def frame_rate(job: ScaledJob) -> float:
    """Return the frames a second that one node gets; infinite where the machine's file has no limit."""
    return math.inf if job.machine.shared is None else job.machine.shared.frames_per_second_per_node


def evaluation_seconds(job: ScaledJob) -> float:
    """Return the seconds of the validations in training and of the final evaluation. A rank takes whole videos.

    The final one also evaluates the average of the weights.
    """
    evaluate = job.spec.evaluate
    in_training, networks, views = evaluations(job.spec)
    area = evaluate.short_side**2 / math.prod(job.spec.data.clip_shape[1:3])
    whole = area * (_FULL_FRAME if evaluate.crops == "full" else 1)
    video_s = in_training * _view_seconds(job, area) + networks * views * _view_seconds(job, whole)
    precise_clips = networks * evaluate.precise_bn * job.accumulation * job.spec.scale.clips_per_gpu
    return math.ceil(job.videos / job.gpus) * video_s + precise_clips * _view_seconds(job, 1.0)


def _view_seconds(job: ScaledJob, area: float) -> float:
    """Return the seconds of a view on one GPU: a forward pass, or loading the frames if that takes longer."""
    forward_s = (1 - BACKWARD_SHARE) * seconds_per_clip(job.spec, job.machine) * area
    return max(forward_s, job.spec.data.num_frames * job.machine.gpus_per_node / frame_rate(job))
