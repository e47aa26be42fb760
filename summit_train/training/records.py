"""Record the steps of a run: each one's numbers, a step late, and on request a trace of the ranks."""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from summit_train.core.errors import AgreedError
from summit_train.core.run_log import AverageRecord, StepRecord, TrustRatioRecord
from summit_train.core.watch import Stopped
from summit_train.data.batches.loader import Batches, MicroBatch
from summit_train.plan import BatchSize
from summit_train.training.metrics import RunLog
from summit_train.training.run import Run
from summit_train.training.slow_ranks import SlowRanks
from summit_train.training.timer import Mark, StepTimer
from summit_train.training.trace import Trace
from summit_train.training.vote import Requests, StepResult, Vote


@dataclass
class StepClips:
    """This rank's clips of one step.

    step: counted from 0. number: counted from 1, as in records and messages: that of the updates after the step.
    batches: the loader. wait_s: waited for them so far. finished: the micro-batches that were read, without clips.
    """

    step: int
    number: int
    batch_size: BatchSize
    batches: Batches[MicroBatch]
    timer: StepTimer
    wait_s: float
    finished: list[MicroBatch] = field(default_factory=list)


class LaunchedStep(NamedTuple):
    """A step whose work was given to the device, up to `end`."""

    clips: StepClips
    lr: float
    result: StepResult
    end: Mark


class Records(AbstractContextManager["Records"]):
    """Records the steps of a run, on rank 0 in `log`, and those that are `traced` on all ranks.

    A step is read when the next one is launched: the device has finished it by then.
    """

    def __init__(self, run: Run, log: RunLog | None, traced: range) -> None:
        self.log = log
        self._run = run
        self.trace = Trace(traced, run, log) if traced else None
        self._slow_ranks = SlowRanks(run, log)
        self._unread: LaunchedStep | None = None
        self._ratio_every = max(1, run.plan.total_steps // 100)  # steps between two records of the trust ratios
        self._broken: deque[tuple[bool, str]] = deque(maxlen=run.spec.watch.nonfinite_steps)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or kind is Stopped:  # on all ranks
            self._slow_ranks.finish()
        if kind is Stopped and self.trace is not None:
            self.trace.write()

    def end_step(self, clips: StepClips, lr: float, result: StepResult) -> Requests:
        """Take in a step that was launched; read the one before, and return its ranks' requests."""
        launched = LaunchedStep(clips, lr, result, clips.timer.laps[-1][1])
        if self.trace is not None:
            self.trace.add(clips.timer)
        requests = self.read(clips.timer)
        self._unread = launched
        clips.timer.lap("other")
        return requests

    def read(self, timer: StepTimer) -> Requests:
        """Wait for the unread step, if there is one, and record it; return its ranks' requests.

        timer: of the current step; the wait for the other ranks counts as its allreduce. Raises AgreedError on all
        ranks at too many broken steps or bad clips.
        """
        launched = self._unread
        self._unread = None
        if launched is None:
            return Requests()
        run = self._run
        clips = launched.clips
        result = launched.result
        number = clips.number
        epoch = clips.step // run.plan.steps_per_epoch
        vote = result.read(clips.batch_size.global_batch, run.plan.virtual_gpus, run.world.size)
        timer.lap("allreduce")
        self._check(launched, vote)
        run.bad_clips.add(vote.bad_clips, clips.finished, number, epoch)
        self._slow_ranks.end_step(clips.timer, len(clips.finished))
        noise = {} if vote.squares is None else run.noise.add(vote.squares)
        if (log := self.log) is not None:
            step_s = clips.timer.start.seconds_to(launched.end)
            record = StepRecord(
                step=number,
                epoch=epoch,
                loss=vote.loss,
                lr=launched.lr,
                clips_per_second=clips.batch_size.global_batch / step_s,
                step_s=step_s,
                data_wait_s=vote.data_wait_s,
                top1=vote.top1,
                skipped=vote.skipped,
                bad_clips=run.bad_clips.total,
                **noise,
            )
            log.step(record)
            if (warning := run.health.of_step(number, vote.loss)) is not None:
                log.warn(number, warning)
            if (averaging := result.averaging) is not None:
                seconds = averaging.start.seconds_to(averaging.end)
                log.write(AverageRecord(step=number, epoch=epoch, seconds=seconds, bytes=averaging.num_bytes))
            if result.ratios is not None and not vote.skipped and number % self._ratio_every == 0:
                log.write(TrustRatioRecord(step=number, ratios=result.ratios.read()))
        return Requests(vote.stop, vote.checkpoint)

    def _check(self, launched: LaunchedStep, vote: Vote) -> None:
        """Raise AgreedError on all ranks at too many broken steps; rank 0's names the ranks with a bad loss."""
        if not vote.broken:
            self._broken.clear()
            return
        run = self._run
        loss = launched.result.local_loss.item()
        number = launched.clips.number
        ids = (int(i) for batch in launched.clips.finished for i in batch.ids)
        clips = ", ".join(map(run.train_set.manifest.path, ids))
        self._broken.append((not math.isfinite(loss), f"step {number}, loss {loss:g}, clips {clips}"))
        if self.log is not None:
            finite = "the loss is not finite but the gradient is; the weights were updated"
            wrong = f"the gradient is not finite; {run.step.on_skip}" if vote.skipped else finite
            self.log.say(f"step {number}: {wrong}")
        if len(self._broken) == self._broken.maxlen:
            at_fault = any(is_bad for is_bad, _ in self._broken)
            steps = "; ".join(text for _, text in self._broken)
            ranks = run.world.gather((at_fault, f"{run.world.who}: {steps}")) or []
            texts = [text for is_at_fault, text in ranks if is_at_fault] or [text for _, text in ranks]
            wrong = "steps in a row had a loss or gradient that is not finite"
            raise AgreedError(f"{len(self._broken)} {wrong}. {' | '.join(texts)}")
