"""Train: the loop, in the order in which a step happens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from summit_train.core.errors import AgreedError, RunFailed, describe, is_bug
from summit_train.core.text import counted
from summit_train.core.watch import Stopped, StopRequest, Watchdog
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.workers import Batches
from summit_train.evaluation.measures import left_out, measures_of, say_left_out
from summit_train.spec import Spec
from summit_train.tasks.task import task_named
from summit_train.training.checkpoint import is_due
from summit_train.training.metrics import RunLog, validated
from summit_train.training.run import Run
from summit_train.training.step import Requests, StepResult, Vote
from summit_train.training.stopwatch import Mark, Stopwatch
from summit_train.training.trace import Trace


def train(run: Run, log: RunLog | None, watchdog: Watchdog, stop: StopRequest, traced: range) -> None:
    """Train from run.start_step to the end; record the steps `traced`, numbers from 1.

    Raises Stopped on request, with a checkpoint, and RunFailed, with rank, host, step and clips, if the data or the
    numbers fail.
    """
    plan, spec, world = run.plan, run.spec, run.world
    unread = UnreadStep(run, log)
    replay_missed_validation(run, log, watchdog, stop)
    saved_at, seconds_between = time.monotonic(), 60 * (spec.checkpoint.every_minutes or math.inf)
    with Trace(traced, run, watchdog, log) as trace, closing(load_steps(run, watchdog)) as steps:
        for step, start, batches, opening_s in steps:
            # --- data: this rank's virtual GPUs, one micro-batch each, which the step reads as it computes
            stopwatch = trace.begin_step(step + 1, start)
            rung = run.growth.rung
            lr = plan.learning_rate(step, rung)
            waits, finished = [opening_s], list[MicroBatch]()
            micro_batches = read_step(run, batches, step, waits, finished, stopwatch, watchdog)
            requests = partial(requests_at_vote, run, stop, saved_at + seconds_between, waits)
            # --- forward, backward, synchronise, vote, update
            note_wait = partial(watchdog.at, f"waiting for the other ranks in step {step + 1}", waits=True)
            result = run.step(micro_batches, lr, requests, stopwatch, note_wait if world.size > 1 else lambda: None)
            launched = LaunchedStep(step + 1, lr, rung.global_batch, finished, result, start, Mark(run.device))

            # --- the previous step's vote: the device has finished that step, so reading it waits for nothing
            vote = unread.read()
            unread.step = launched
            stopwatch.lap("other")

            # --- the end of an epoch, or a checkpoint that the ranks voted for
            epochs_done, inside = divmod(step + 1, plan.steps_per_epoch)
            stopping = vote is not None and vote.stop and step + 1 < plan.total_steps
            requested = stopping or (vote is not None and vote.checkpoint)
            is_saved = requested or (inside == 0 and saves(spec, epochs_done))
            if is_saved:
                unread.read()
                save(run, log, watchdog, step + 1)
                saved_at = time.monotonic()
                stopwatch.lap("checkpoint")
            if stopping:
                raise Stopped
            if inside == 0:
                unread.read()
                if validates(spec, epochs_done):
                    try:
                        measures = validate(run, log, watchdog, stop, epochs_done)
                    except Stopped:
                        if not is_saved:
                            save(run, log, watchdog, step + 1)
                        raise
                    run.compare_with_best(step + 1, measures)
                    grow(run, log, epochs_done, measures)
                    stopwatch.lap("validation")
            trace.end_step(step + 1)


def load_steps(run: Run, watchdog: Watchdog) -> Generator[tuple[int, Mark, Batches[MicroBatch], float], None, None]:
    """Yield each step that is left, its start, the loader, and the seconds that opening it took.

    A batch that has grown gets new worker processes.
    """
    plan, world, rung = run.plan, run.world, run.growth.rung
    batches: Batches[MicroBatch] | None = None
    step = run.start_step
    try:
        while step < plan.total_steps:
            step = max(step, plan.first_step(step // plan.steps_per_epoch, run.growth.rung))
            watchdog.at(f"loading the clips of step {step + 1}")
            start, began = Mark(run.device), time.perf_counter()
            if batches is None or rung != run.growth.rung:
                if batches is not None:
                    batches.close()
                rung, steps = run.growth.rung, range(step, plan.total_steps)
                batches = run.train_set.training_batches(plan.order(rung), world.rank, world.size, steps)
            yield step, start, batches, time.perf_counter() - began
            step += 1
    finally:
        if batches is not None:
            batches.close()


def read_step(
    run: Run,
    batches: Iterator[MicroBatch],
    step: int,
    waits: list[float],
    finished: list[MicroBatch],
    stopwatch: Stopwatch,
    watchdog: Watchdog,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of a step, each when it is asked for; without clips they stay in `finished`.

    waits: gets the seconds of each wait. Raises RunFailed with rank and step where a clip cannot be read.
    """
    for _ in range(run.plan.accumulation):
        watchdog.at(f"loading the clips of step {step + 1}")
        began = time.perf_counter()
        try:
            batch = next(batches)
        except Exception as error:
            if is_bug(error):
                raise
            raise RunFailed(f"{run.world.who}, step {step + 1}: {describe(error)}") from error
        waits.append(time.perf_counter() - began)
        stopwatch.lap("data_wait")
        watchdog.at(f"computing step {step + 1}")
        assert batch.step == step
        finished.append(batch.without_clips())
        yield batch


def requests_at_vote(run: Run, stop: StopRequest, save_at: float, waits: Sequence[float]) -> Requests:
    """Return what this rank brings to the vote, which comes when its last micro-batch is there."""
    # A checkpoint that could not be written ends all ranks in the next one.
    is_due = run.world.rank == 0 and (run.writer.has_failed or time.monotonic() >= save_at)
    return Requests(bool(stop), is_due, sum(waits))


def grow(run: Run, log: RunLog | None, epoch: int, measures: Mapping[str, Any] | None) -> None:
    """Let the batch grow by rank 0's validation after `epoch`. Collective where it may grow."""
    if run.spec.parallel.grow_batch is None or epoch == run.spec.schedule.epochs:
        return
    main = measures_of(run.spec.loss.kind).main.key
    accuracy = run.world.broadcast(None if measures is None else measures[main])
    before, decision = run.growth.rung.clips_per_gpu, run.growth.decide(accuracy)
    if log is not None and decision is not None:
        best, rung = decision
        size, batch = rung.clips_per_gpu, rung.global_batch
        log.write("batch", epoch=epoch, clips_per_gpu=size, global_batch=batch, accuracy=accuracy, best=best)
        grows = f"grows from {counted(before, 'clip')} to {size:,}, {counted(rung.steps_per_epoch, 'step')} an epoch"
        change = grows if size > before else f"stays at {counted(size, 'clip')}"
        log.say(f"epoch {epoch}: batch of a learner {change} ({accuracy:.2f} %, best before {best:.2f} %)")


def validates(spec: Spec, epoch: int) -> bool:
    every = spec.evaluate.every_epochs  # 0: never
    return every > 0 and (epoch % every == 0 or epoch == spec.schedule.epochs)


def saves(spec: Spec, epoch: int) -> bool:
    """Return whether an epoch ends with a checkpoint: one that is due, or one that validation may call the best."""
    return is_due(spec, epoch) or (spec.checkpoint.keep_best is not None and validates(spec, epoch))


def replay_missed_validation(run: Run, log: RunLog | None, watchdog: Watchdog, stop: StopRequest) -> None:
    """Validate if the run ended between the checkpoint of an epoch and its validation.

    Grow the batch by the result, and name the best checkpoint, if the checkpoint does not include that yet. The curve,
    the batch and the best then equal those of a run that was not stopped.
    """
    epoch, inside = divmod(run.start_step, run.plan.steps_per_epoch)
    if epoch and not inside and validates(run.spec, epoch):
        first = run.world.rank == 0
        measures = run.world.broadcast(validated(run.spec.run_path, run.start_step) if first else None)
        if measures is None:
            measures = validate(run, log, watchdog, stop, epoch)
        run.compare_with_best(run.start_step, measures)
        if run.growth.lacks(epoch // run.spec.evaluate.every_epochs):
            grow(run, log, epoch, measures)
    if log is not None:
        run.best.write()


def save(run: Run, log: RunLog | None, watchdog: Watchdog, step: int) -> None:
    """Write a checkpoint, or begin to; the other ranks wait in their next collective. Record how long steps waited."""
    watchdog.at(f"writing the checkpoint of step {step}", waits=run.world.rank > 0)
    began = time.perf_counter()
    run.save(step)
    if log is not None:
        log.write("checkpoint", step=step, seconds=time.perf_counter() - began)


def validate(
    run: Run, log: RunLog | None, watchdog: Watchdog, stop: StopRequest, epoch: int
) -> dict[str, float | None] | None:
    """Score one clip and one crop of every video, as for the curve in the paper's Figure 5; return rank 0's measures.

    With evaluate.mode "stream", stream all frames in one crop. The loss is that of training on those logits, without
    mixing. Raises Stopped on request.
    """
    watchdog.at(f"validating after epoch {epoch}")
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        watchdog.at(f"validating video {done} of {total} after epoch {epoch}", waits=done == total)

    task = task_named(run.spec.task)
    one_view = run.spec.evaluate.model_copy(update={"clips": 1, "crops": "full" if task.whole_frames else 1})
    spec = run.spec.model_copy(update={"evaluate": one_view})
    scorer = task.part("scorer")(spec, run.val_set, run.world, run.device, stop)
    scores = scorer.score(run.model, progress, source=f"validation after epoch {epoch}")
    if scores is None:
        return None
    known = measures_of(spec.loss.kind, spec.model.num_classes)
    measures, seconds = known.values(scores), time.perf_counter() - began
    if log is not None:
        step, videos = epoch * run.plan.steps_per_epoch, len(scores.videos)
        bad = f"{scores.num_bad} unreadable, counted as wrong" if scores.num_bad else ""
        missing = say_left_out(left_out(scores, run.val_set.manifest.class_names))
        views, clips = ("one clip each", 1) if spec.evaluate.mode == "clips" else ("all frames streamed", None)
        loss = run.val_loss.of_scores(scores)
        record = measures | {"val_loss": loss, "videos": videos, "clips": clips, "seconds": seconds}
        log.write("eval", epoch=epoch, step=step, **record)
        unknown = "" if measures[known.main.key] is not None else "unknown measure: best checkpoint and batch stay"
        about = "; ".join(filter(None, (f"{counted(videos, 'video')}, {views}", bad, missing, unknown)))
        log.say(f"epoch {epoch}: {known.text(measures)}{'' if loss is None else f'  loss {loss:.4f}'}  ({about})")
        log.warn(step, run.health.of_validation(step, scores, run.val_set.manifest.class_names))
    return measures


@dataclass(frozen=True)
class LaunchedStep:
    """One step as it was launched; `step` counts finished updates. micro_batches: without their clips."""

    step: int
    lr: float
    global_batch: int
    micro_batches: list[MicroBatch]
    result: StepResult
    start: Mark
    end: Mark


class UnreadStep:
    """The launched step whose vote has not been read: reading it records the step, and may end the run."""

    def __init__(self, run: Run, log: RunLog | None) -> None:
        self._run, self._log = run, log
        self.step: LaunchedStep | None = None
        self._ratio_every = max(1, run.plan.total_steps // 100)  # steps between two records of the trust ratios
        self._broken: deque[tuple[bool, str]] = deque(maxlen=run.spec.watch.nonfinite_steps)

    def read(self) -> Vote | None:
        """Wait for the step, if there is one, and record it; return its vote.

        Raises AgreedError on all ranks at too many broken steps or bad clips.
        """
        launched, self.step = self.step, None
        if launched is None:
            return None
        plan = self._run.plan
        vote = launched.result.read(launched.global_batch, plan.virtual_gpus, self._run.world.size)
        self._check(launched, vote)
        bad_clips, epoch = self._run.bad_clips, (launched.step - 1) // plan.steps_per_epoch
        bad_clips.add(vote.bad_clips, launched.micro_batches, launched.step, epoch)
        noise = {} if vote.squares is None else self._run.noise.add(vote.squares)
        if self._log is not None:
            step_s = launched.start.seconds_to(launched.end)
            self._log.step(
                step=launched.step,
                epoch=epoch,
                loss=vote.loss,
                lr=launched.lr,
                clips_per_second=launched.global_batch / step_s,
                step_s=step_s,
                data_wait_s=vote.data_wait_s,
                top1=vote.top1,
                skipped=int(vote.skipped),
                bad_clips=bad_clips.total,
                **noise,
            )
            self._log.warn(launched.step, self._run.health.of_step(launched.step, vote.loss))
            if (averaging := launched.result.averaging) is not None:
                seconds, sent = averaging.start.seconds_to(averaging.end), averaging.num_bytes
                self._log.write("average", step=launched.step, epoch=epoch, seconds=seconds, bytes=sent)
            if launched.result.ratios is not None and not vote.skipped and launched.step % self._ratio_every == 0:
                self._log.write("trust_ratio", step=launched.step, ratios=launched.result.ratios.read())
        return vote

    def _check(self, launched: LaunchedStep, vote: Vote) -> None:
        """Raise AgreedError on all ranks at too many broken steps; rank 0's names the ranks with a bad loss."""
        if not vote.broken:
            self._broken.clear()
            return
        run, loss = self._run, launched.result.local_loss.item()
        ids = (int(i) for batch in launched.micro_batches for i in batch.ids)
        clips = ", ".join(map(run.train_set.manifest.path, ids))
        self._broken.append((not math.isfinite(loss), f"step {launched.step}, loss {loss:g}, clips {clips}"))
        if self._log is not None:
            self._log.say(f"step {launched.step}: a loss or gradient is not finite; {run.step.on_skip}")
        if len(self._broken) == self._broken.maxlen:
            at_fault = any(is_bad for is_bad, _ in self._broken)
            steps = "; ".join(text for _, text in self._broken)
            everyone = run.world.gather((at_fault, f"{run.world.who}: {steps}")) or []
            named = [text for fault, text in everyone if fault] or [text for _, text in everyone]
            wrong = "steps in a row had a loss or gradient that is not finite"
            raise AgreedError(f"{len(self._broken)} {wrong}. {' | '.join(named)}")
