"""A spec's own training step, run and timed again and again: the step, the optimizer and the loader are `train`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from summit_train.comm import World
from summit_train.data.loader import MicroBatch
from summit_train.data.manifest import Manifest
from summit_train.data.order import virtual_gpus_of
from summit_train.data.workers import PREFETCHED_PER_WORKER, Batches
from summit_train.plan import Plan
from summit_train.scaling.memory import Activations
from summit_train.scaling.step_times import mean_phases
from summit_train.spec import Spec
from summit_train.training.loop import batches_between
from summit_train.training.network import fresh_model
from summit_train.training.run import build_step
from summit_train.training.step import StepResult
from summit_train.training.stopwatch import Recorder
from summit_train.training.watch import Watchdog


class StepBench:
    """One spec's network, optimizer and batches on this rank.

    manifest None: random clips, the same ones in every step, and no loader. The learning rate is 0: all is computed as
    ever, and no weight of a network that nobody trains runs away.
    """

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        world: World,
        device: torch.device,
        manifest: Manifest | None,
        watchdog: Watchdog,
    ) -> None:
        self._spec, self._plan, self._world = spec, plan, world
        self._manifest, self._watchdog = manifest, watchdog
        self._model = fresh_model(spec, device)
        _, self._step = build_step(spec, plan, world, self._model, device)
        self._recorder = Recorder(device)
        self._activations = Activations(self._model.parameters())
        self._last: StepResult | None = None
        self._next_step = 0
        self._batches: Batches[MicroBatch] | None = None
        self._random = [] if manifest is not None else random_batches(spec, plan, world)

    @property
    def activation_bytes(self) -> int:
        """The most that autograd has held in a step, counted while warming up."""
        return self._activations.most_bytes

    def warm_up(self, at_least: int) -> None:
        """Steps that are not timed: also until the loader has used up what it read ahead when it was opened."""
        ahead = 0 if self._manifest is None else PREFETCHED_PER_WORKER * self._spec.data.workers
        with self._activations.counted():
            self.repeat(1)
        rest = max(at_least, -(-ahead // self._plan.accumulation)) - 1
        if rest:
            self.repeat(rest)

    def repeat(self, steps: int) -> dict[str, float]:
        """Seconds of each phase, the mean over `steps` steps that begin when all ranks are here."""
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

    def close(self) -> None:
        """End the loader; the next step opens another one."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _take(self) -> list[MicroBatch]:
        if self._manifest is None:
            return self._random
        if self._batches is None:
            # Nobody knows how many steps will be asked for; the keys are made one by one.
            end = self._next_step + 10**9
            self._batches = batches_between(self._spec, self._plan, self._world, self._manifest, self._next_step, end)
        self._next_step += 1
        return [next(self._batches) for _ in range(self._plan.accumulation)]


def random_batches(spec: Spec, plan: Plan, world: World) -> list[MicroBatch]:
    """This rank's micro-batches of a step, of random bytes."""
    data, clips = spec.data, plan.clips_per_gpu
    generator = torch.Generator().manual_seed(world.rank)
    shape = (clips, data.num_frames, data.crop, data.crop, 3)
    batches = []
    for virtual_gpu in virtual_gpus_of(world.rank, world.size, plan.virtual_gpus):
        frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, spec.model.num_classes, (clips,), generator=generator)
        batch = MicroBatch(0, virtual_gpu, frames, labels, torch.arange(clips))
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def turn(bench: StepBench, warm_up: int, steps: int) -> Callable[[], dict[str, float]]:
    """One turn of a bench among others: warmed up anew, timed, its loader ended before the next one's turn."""

    def run() -> dict[str, float]:
        bench.warm_up(warm_up)
        seconds = bench.repeat(steps)
        bench.close()
        return seconds

    return run


def repeats_alone(bench: StepBench, warm_up: int, steps: int, repeats: int) -> Iterator[dict[str, float]]:
    """The repeats of a bench that has the machine to itself: warmed up once, one loader."""
    bench.warm_up(warm_up)
    for _ in range(repeats):
        yield bench.repeat(steps)
    bench.close()
