"""A spec's own training step, run and timed. Step, optimizer and loader are those of `train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from summit_train.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import virtual_gpus_of
from summit_train.data.batches.workers import PREFETCHED_PER_WORKER, Batches
from summit_train.data.manifest import Manifest
from summit_train.modality import RGB
from summit_train.plan import Plan
from summit_train.scaling.measure import Turns
from summit_train.scaling.memory import Activations
from summit_train.scaling.step_times import mean_phases
from summit_train.spec import Spec
from summit_train.training.loop import batches_between
from summit_train.training.network import fresh_model
from summit_train.training.run import build_step
from summit_train.training.step import StepResult
from summit_train.training.stopwatch import Recorder
from summit_train.training.watch import Watchdog


@dataclass(frozen=True)
class Place:
    """Where a bench runs: the ranks, this rank's device, and `tell`, which reports progress to a person."""

    world: World
    device: torch.device
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A spec that is measured, and its plan for the ranks at hand. manifest None: random clips."""

    spec: Spec
    plan: Plan
    manifest: Manifest | None

    def values(self) -> dict[str, Any]:
        """Return what is measured as a JSON object."""
        model, data, plan = self.spec.model, self.spec.data, self.plan
        return {
            "name": self.spec.name,
            "arch": model.arch,
            "backbone": model.backbone,
            "frames": data.num_frames,
            "crop": data.crop,
            "precision": self.spec.precision,
            "ranks": plan.ranks,
            "accumulation": plan.accumulation,
            "clips_per_gpu": plan.clips_per_gpu,
            "global_batch": plan.global_batch,
            "gradient_bytes": plan.gradient_bytes,
            "synthetic": self.manifest is None,
            "clips": None if self.manifest is None else data.train,
            "workers": 0 if self.manifest is None else data.workers,
        }


class StepBench:
    """An experiment's network, optimizer and batches on this rank.

    Random clips are the same in every step and need no loader. The learning rate is 0: every number is computed, and no
    weight of an untrained network diverges.
    """

    def __init__(self, experiment: Experiment, world: World, device: torch.device, watchdog: Watchdog) -> None:
        self._experiment, self._world, self._watchdog = experiment, world, watchdog
        self._spec, self._plan = experiment.spec, experiment.plan
        model = fresh_model(self._spec, device)
        _, self._step = build_step(self._spec, self._plan, world, model, device)
        self._recorder = Recorder(device)
        self._activations = Activations(model.parameters())
        self._last: StepResult | None = None
        self._next_step = 0
        self._batches: Batches[MicroBatch] | None = None
        self._random = [] if experiment.manifest is not None else random_batches(self._spec, self._plan, world)

    @property
    def activation_bytes(self) -> int:
        """Return the most bytes that autograd has held in a step, counted while warming up."""
        return self._activations.most_bytes

    def warm_up(self, at_least: int) -> None:
        """Run steps without timing them, until the loader has used up what it read ahead when it opened."""
        ahead = 0 if self._experiment.manifest is None else PREFETCHED_PER_WORKER * self._spec.data.workers
        with self._activations.counted():
            self.repeat(1)
        rest = max(at_least, -(-ahead // self._plan.accumulation)) - 1
        if rest:
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
            result = self._step(micro_batches, 0.0, stopwatch=self._recorder)
            if self._last is not None:  # as the loop does, one step late
                self._last.read(self._plan.global_batch, self._plan.virtual_gpus, self._world.size)
            self._last = result
            self._recorder.lap("other")
        return mean_phases(self._recorder.read())

    def turn(self, turns: Turns) -> dict[str, float]:
        """Take one turn among other benches: warm up anew, measure, and end the loader before the next bench's turn."""
        self.warm_up(turns.warm_up)
        seconds = self.repeat(turns.steps)
        self.close()
        return seconds

    def close(self) -> None:
        """End the loader. The next step opens another one."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _take(self) -> list[MicroBatch]:
        manifest = self._experiment.manifest
        if manifest is None:
            return self._random
        if self._batches is None:
            # Nobody knows how many steps will be asked for; the keys are made one by one.
            end = self._next_step + 10**9
            self._batches = batches_between(self._spec, self._plan, self._world, manifest, self._next_step, end)
        self._next_step += 1
        return [next(self._batches) for _ in range(self._plan.accumulation)]


def random_batches(spec: Spec, plan: Plan, world: World) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, of random bytes."""
    data, clips = spec.data, plan.clips_per_gpu
    generator = torch.Generator().manual_seed(world.rank)
    shape = (clips, *RGB.clip_shape(data.num_frames, data.crop))
    batches = []
    for virtual_gpu in virtual_gpus_of(world.rank, world.size, plan.virtual_gpus):
        frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
        batch = MicroBatch(0, virtual_gpu, frames, labels, torch.arange(clips))
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches
