"""A spec's own training step, run and timed: step, optimizer and loader of `train`; its memory and seconds."""

from __future__ import annotations

import resource
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from summit_train.bench.measure import Turns, pair_ratios, spread
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.data.batches.workers import PREFETCHED_PER_WORKER, Batches
from summit_train.data.dataset import Dataset
from summit_train.plan import Plan
from summit_train.spec import Spec
from summit_train.training.run import build_step, fresh_model
from summit_train.training.step import StepResult
from summit_train.training.stopwatch import Recorder

Phases = Mapping[str, float]


@dataclass(frozen=True)
class Place:
    """Where a bench runs: the ranks, this rank's device, and `tell`, which reports progress to a person."""

    world: World
    device: torch.device
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A spec that is measured, and its plan for these ranks. dataset None: random clips."""

    spec: Spec
    plan: Plan
    dataset: Dataset | None

    def values(self) -> dict[str, Any]:
        """Return what is measured as a JSON object."""
        synthetic, data = self.dataset is None, self.spec.data
        of_plan = ("ranks", "accumulation", "clips_per_gpu", "global_batch", "gradient_bytes")
        clips = {"clips": None, "workers": 0} if synthetic else {"clips": data.train, "workers": data.workers}
        sizes = {name: getattr(self.plan, name) for name in of_plan}
        return network_values(self.spec) | sizes | {"synthetic": synthetic} | clips


def network_values(spec: Spec) -> dict[str, Any]:
    """Return the spec's name, network and clip as a JSON object."""
    model, data = spec.model, spec.data
    network = {"name": spec.name, "arch": model.arch, "backbone": model.backbone}
    return network | {"frames": data.num_frames, "crop": data.crop, "precision": spec.precision}


class Activations:
    """Counts the bytes that autograd holds between forward and backward pass; `most_bytes` is their peak.

    Tensors that share memory count once. The given parameters do not count: they are in memory anyway.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: Counter[int] = Counter()  # by address
        self._bytes = 0
        self.most_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is saved within the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._hold, lambda saved: saved.tensor):
            yield

    def _hold(self, tensor: torch.Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        saved, key = _Saved(tensor), storage.data_ptr()
        if key not in self._ignored:
            self._bytes += 0 if self._holders[key] else storage.nbytes()
            self.most_bytes = max(self.most_bytes, self._bytes)
            self._holders[key] += 1
            weakref.finalize(saved, self._release, key, storage.nbytes()).atexit = False
        return saved

    def _release(self, key: int, num_bytes: int) -> None:
        self._holders[key] -= 1
        self._bytes -= 0 if self._holders[key] else num_bytes


@dataclass(eq=False)
class _Saved:
    """A saved tensor that tells its release."""

    tensor: torch.Tensor


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the device's tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux


class StepBench:
    """An experiment's network, optimizer and batches on this rank.

    Random clips are the same in every step and need no loader. The learning rate is 0: every number is computed, and no
    weight of an untrained network diverges.
    """

    def __init__(self, experiment: Experiment, world: World, device: torch.device, watchdog: Watchdog) -> None:
        self._experiment, self._world, self._watchdog = experiment, world, watchdog
        self._spec, self._plan = experiment.spec, experiment.plan
        model = fresh_model(self._spec, device)
        self._step = build_step(self._spec, self._plan, world, model, device)
        self._recorder = Recorder(device)
        self._activations = Activations(model.parameters())
        self._last: StepResult | None = None
        self._next_step = 0
        self._batches: Batches[MicroBatch] | None = None
        self._random = [] if experiment.dataset is not None else random_batches(self._spec, self._plan, world)

    @property
    def activation_bytes(self) -> int:
        """Return the most bytes that autograd has held in a step, counted while warming up."""
        return self._activations.most_bytes

    def warm_up(self, at_least: int) -> None:
        """Run steps without timing them, until the loader has used up what it read ahead when it opened."""
        ahead = 0 if self._experiment.dataset is None else PREFETCHED_PER_WORKER * self._spec.data.workers
        with self._activations.counted():
            self.repeat(1)
        if rest := max(at_least, -(-ahead // self._plan.accumulation)) - 1:
            self.repeat(rest)

    def repeat(self, steps: int) -> dict[str, float]:
        """Return the seconds of each phase, the mean over `steps` steps. They begin when all ranks are here."""
        self._world.barrier()
        for _ in range(steps):
            self._watchdog.at(f"loading clips to measure {self._spec.name}")
            self._recorder.begin_step()
            micro_batches = self._take()
            self._recorder.lap("data_wait")
            self._watchdog.at(f"in a measured step of {self._spec.name}", waits=self._world.size > 1)
            result = self._step(micro_batches, 0.0, end_phase=self._recorder.lap)
            if self._last is not None:  # as the loop does, one step late
                self._last.read(self._plan.global_batch, self._plan.virtual_gpus, self._world.size)
            self._last = result
            self._recorder.lap("other")
        return mean_phases(self._recorder.read())

    def turn(self, turns: Turns, alone: bool) -> dict[str, float]:
        """Take a turn: warm up, measure, and end the loader before another bench's turn.

        alone: there is no other bench, so only the first turn warms up, and the loader stays.
        """
        if self._last is None or not alone:
            self.warm_up(turns.warm_up)
        seconds = self.repeat(turns.steps)
        if not alone:
            self.close()
        return seconds

    def close(self) -> None:
        """End the loader. The next step opens another one."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _take(self) -> list[MicroBatch]:
        dataset, world = self._experiment.dataset, self._world
        if dataset is None:
            return self._random
        if self._batches is None:
            # Without an end: the keys are made one by one, as steps are asked for.
            steps = range(self._next_step, self._next_step + 10**9)
            self._batches = dataset.training_batches(self._plan.order(), world.rank, world.size, steps)
        self._next_step += 1
        return [next(self._batches) for _ in range(self._plan.accumulation)]


def random_batches(spec: Spec, plan: Plan, world: World) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, of random bytes."""
    data, clips = spec.data, plan.clips_per_gpu
    generator = torch.Generator().manual_seed(world.rank)
    shape = (clips, *data.input.clip_shape(data.num_frames, data.crop))
    batches = []
    for virtual_gpu in virtual_gpus_of(world.rank, world.size, plan.virtual_gpus):
        frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
        batch = MicroBatch(0, virtual_gpu, frames, labels, torch.arange(clips))
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def mean_phases(steps: Sequence[Phases]) -> dict[str, float]:
    """Return each phase's mean over the steps of one repeat."""
    return {phase: fmean(step[phase] for step in steps) for phase in steps[0]}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each phase: ranks[r][i] are rank r's in repeat i, the mean over the repeat's steps."""

    ranks: tuple[tuple[Phases, ...], ...]

    @property
    def step_s(self) -> list[float]:
        """Return a step's seconds in each repeat, on the slowest rank."""
        return [max(sum(phases.values()) for phases in repeat) for repeat in zip(*self.ranks, strict=True)]

    @property
    def phases_s(self) -> dict[str, list[float]]:
        """Return each phase's seconds in each repeat, the mean over the ranks. Their sum is the mean step."""
        repeats = [mean_phases(repeat) for repeat in zip(*self.ranks, strict=True)]
        return {phase: [repeat[phase] for repeat in repeats] for phase in repeats[0]}

    @property
    def shares(self) -> dict[str, float]:
        """Return each phase's part of all the time. The parts sum to 1."""
        sums = {phase: sum(seconds) for phase, seconds in self.phases_s.items()}
        total = sum(sums.values())
        return {phase: seconds / total for phase, seconds in sums.items()}

    def ratios(self, other: StepTimes) -> dict[str, dict[str, float]]:
        """Return this over the other, repeat by repeat: the step, and each phase of at least 1 % of both steps."""
        both = {"step": (self.step_s, other.step_s)}
        for phase, seconds in self.phases_s.items():
            if min(self.shares[phase], other.shares[phase]) >= 0.01:
                both[phase] = (seconds, other.phases_s[phase])
        return {name: spread(pair_ratios(mine, others)) for name, (mine, others) in both.items()}


def step_values(times: StepTimes, plan: Plan, training_multiply_adds: int, peak: float | None) -> dict[str, Any]:
    """Return a JSON object: seconds, clips and multiply-adds a second, and utilisation (mfu), by part.

    training_multiply_adds: of one clip, forward and backward. peak: of all ranks, in multiply-adds/s; None leaves the
    utilisation out, which is achieved over peak (the paper, section 3 a).
    """
    step_s, phases, clips = times.step_s, times.phases_s, plan.global_batch
    forward, training = clips * plan.multiply_adds, clips * training_multiply_adds

    def utilisation(multiply_adds: int, seconds: Sequence[float]) -> dict[str, float] | None:
        return None if peak is None or min(seconds) == 0 else spread([multiply_adds / s / peak for s in seconds])

    return {
        "step_s": spread(step_s),
        "clips_per_second": spread([clips / seconds for seconds in step_s]),
        "phases_s": {phase: spread(seconds) for phase, seconds in phases.items()},
        "shares": times.shares,
        "multiply_adds_per_step": training,
        "multiply_adds_per_second": spread([training / seconds for seconds in step_s]),
        "mfu": utilisation(training, step_s),
        "forward_mfu": utilisation(forward, phases["forward"]),
        "backward_mfu": utilisation(training - forward, phases["backward"]),
        "repeats_s": [list(map(dict, rank)) for rank in times.ranks],
    }
