"""The clips of each step, which a rank reads as it computes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from summit_train.core.errors import RunFailed, describe, is_bug
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.workers import Batches
from summit_train.plan import Rung
from summit_train.training.run import Run
from summit_train.training.stopwatch import Mark, Stopwatch


@dataclass
class StepClips:
    """This rank's clips of one step, counted from 0, which began at `start`.

    batches: the loader. wait_s: the seconds that the rank has waited for them so far. finished: the micro-batches that
    were read, without their clips.
    """

    step: int
    rung: Rung
    batches: Batches[MicroBatch]
    start: Mark
    wait_s: float
    finished: list[MicroBatch] = field(default_factory=list)


def clips_of_steps(run: Run) -> Generator[StepClips, None, None]:
    """Yield the clips of each step that is left, before any of them is read.

    A batch that has grown gets new worker processes, and an epoch of it fewer steps.
    """
    plan, world, step = run.plan, run.world, run.start_step
    rung, batches = run.growth.rung, None
    with ExitStack() as held:
        while step < plan.total_steps:
            step = max(step, plan.first_step(step // plan.steps_per_epoch, run.growth.rung))
            run.watchdog.at(f"loading the clips of step {step + 1}")
            start, began = Mark(run.device), time.perf_counter()
            if batches is None or rung != run.growth.rung:
                held.close()
                rung, steps = run.growth.rung, range(step, plan.total_steps)
                batches = run.train_set.training_batches(plan.order(rung), world.rank, world.size, steps)
                held.callback(batches.close)
            yield StepClips(step, rung, batches, start, time.perf_counter() - began)
            step += 1


def read_step(run: Run, clips: StepClips, stopwatch: Stopwatch) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of a step, one for each of its virtual GPUs, each when it is asked for.

    Raises RunFailed with rank and step where a clip cannot be read.
    """
    for _ in range(run.plan.accumulation):
        run.watchdog.at(f"loading the clips of step {clips.step + 1}")
        began = time.perf_counter()
        try:
            batch = next(clips.batches)
        except Exception as error:
            if is_bug(error):
                raise
            raise RunFailed(f"{run.world.who}, step {clips.step + 1}: {describe(error)}") from error
        clips.wait_s += time.perf_counter() - began
        stopwatch.lap("data_wait")
        run.watchdog.at(f"computing step {clips.step + 1}")
        assert batch.step == clips.step
        clips.finished.append(batch.without_clips())
        yield batch
