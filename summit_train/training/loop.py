"""Train: the loop, in the order in which a step happens."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing

from summit_train.core.errors import RunFailed, describe, is_bug
from summit_train.core.run_log import CheckpointRecord
from summit_train.core.text import counted
from summit_train.core.watch import Stopped, StopRequest
from summit_train.data.batches.loader import MicroBatch
from summit_train.plan import is_due, validates
from summit_train.spec import Spec
from summit_train.training.metrics import RunLog
from summit_train.training.records import Records, StepClips
from summit_train.training.run import Run
from summit_train.training.timer import StepTimer
from summit_train.training.validation import decide, take_in_last_validation, validate
from summit_train.training.vote import Requests


def train(run: Run, records: Records, stop: StopRequest) -> None:
    """Train from run.start_step to the end, or until validations say that it is reached early.

    Raises Stopped on request, with a checkpoint, and RunFailed, with rank, host and step, if data or numbers fail.
    """
    plan = run.plan
    spec = run.spec
    take_in_last_validation(run, records.log, stop)
    with records, closing(clips_of_steps(run)) as steps:
        for clips in steps:
            # --- data, forward, backward
            lr = plan.learning_rate(clips.step, clips.batch_size)
            run.step.begin(lr, clips.timer)
            for micro_batch in read_step(run, clips):
                run.step.accumulate(micro_batch)

            # --- synchronise, update, begin to vote: from here on the step depends on the other ranks
            if run.world.size > 1:
                run.watchdog.at(f"waiting for the other ranks in step {clips.number}", waits=True)
            result = run.step.update(Requests(bool(stop), run.is_checkpoint_due(), clips.wait_s))

            # --- the previous step's vote: all ranks have begun it long since
            requests = records.end_step(clips, lr, result)

            # --- this step's own vote, where the step is waited for anyway
            step = clips.number
            epoch, inside = divmod(step, plan.steps_per_epoch)
            if inside == 0 or requests.stop or requests.checkpoint:
                latest = records.read(clips.timer)
                requests = Requests(requests.stop or latest.stop, requests.checkpoint or latest.checkpoint)

            # --- a checkpoint that is due, or that the ranks voted for
            stopping = requests.stop and step < plan.total_steps
            is_saved = stopping or requests.checkpoint or (inside == 0 and saves(spec, epoch))
            if is_saved:
                save(run, records.log, step)
                clips.timer.lap("checkpoint")
            if stopping:
                raise Stopped

            # --- the end of an epoch
            if inside == 0:
                if validates(spec, epoch):
                    try:
                        decide(run, records.log, epoch, validate(run, records.log, stop, epoch))
                    except Stopped:
                        if not is_saved:
                            save(run, records.log, step)
                        raise
                    clips.timer.lap("validation")
                if (number := run.step.unfreeze(epoch)) and records.log is not None:
                    records.log.say(f"epoch {epoch}: optimizer.freeze ends for {counted(number, 'parameter')}")
            if records.trace is not None:
                records.trace.end_step(step)


def clips_of_steps(run: Run) -> Generator[StepClips, None, None]:
    """Yield the clips of each step that is left, before any of them is read.

    A batch that has grown gets new worker processes, and an epoch of it fewer steps.
    """
    plan = run.plan
    world = run.world
    step = run.start_step
    opened_size = None  # that `batches` are of
    with ExitStack() as open_batches:
        while step < plan.total_steps and not run.decisions.is_stop_reached:
            size = run.decisions.batch_size
            step = max(step, plan.first_step(step // plan.steps_per_epoch, size))
            number = step + 1
            run.watchdog.at(f"loading the clips of step {number}")
            timer = StepTimer(run.device, number)
            began = time.perf_counter()
            if size != opened_size:
                open_batches.close()
                steps = range(step, plan.total_steps)
                batches = run.train_set.training_batches(plan.order(size), world.rank, world.size, steps)
                open_batches.callback(batches.close)
                opened_size = size
            yield StepClips(step, number, size, batches, timer, time.perf_counter() - began)
            step += 1


def read_step(run: Run, clips: StepClips) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of a step, one for each of its virtual GPUs.

    Raises RunFailed with rank and step where a clip cannot be read.
    """
    number = clips.number
    for _ in run.plan.virtual_gpus_of(run.world.rank):
        run.watchdog.at(f"loading the clips of step {number}")
        began = time.perf_counter()
        try:
            batch = next(clips.batches)
        except Exception as error:
            if is_bug(error):
                raise
            raise RunFailed(f"{run.world.who}, step {number}: {describe(error)}") from error
        clips.wait_s += time.perf_counter() - began
        clips.timer.lap("data_wait")
        run.watchdog.at(f"computing step {number}")
        assert batch.step == clips.step
        clips.finished.append(batch.without_clips())
        yield batch


def saves(spec: Spec, epoch: int) -> bool:
    """True if an epoch ends with a checkpoint: one that is due, or one that validation may call the best."""
    return is_due(spec, epoch) or (spec.checkpoint.keep_best is not None and validates(spec, epoch))


def save(run: Run, log: RunLog | None, step: int) -> None:
    """Write a checkpoint, or begin to; the other ranks wait in their next collective. Record how long steps waited."""
    run.watchdog.at(f"writing the checkpoint of step {step}", waits=run.world.rank > 0)
    began = time.perf_counter()
    run.save(step)
    if log is not None:
        log.write(CheckpointRecord(step=step, seconds=time.perf_counter() - began))
