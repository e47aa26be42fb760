"""Record a run while it goes on: metrics.jsonl, TensorBoard events, and a line for the person who looks."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from summit_train.core.files import naming
from summit_train.core.result import say
from summit_train.core.run_log import (
    METRICS_FILE,
    DoneRecord,
    EvalRecord,
    LogLostRecord,
    Record,
    StepRecord,
    TrustRatioRecord,
    WarningRecord,
    line_of,
)
from summit_train.core.text import duration, noise_text

_SECONDS_BETWEEN_LINES = 10.0


class RunLog(AbstractContextManager["RunLog"]):
    """Rank 0's record of the run, with a few lines a minute for the person who looks."""

    def __init__(self, run_path: Path, title: str, start_step: int, total_steps: int) -> None:
        # Unbuffered: if the disk was full, a buffer would be written again on closing.
        self._file = open(run_path / METRICS_FILE, "a+b", buffering=0)  # noqa: SIM115  (closed in __exit__)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append(b"\n")  # a run that was killed can leave half a line
        # Imported here: `plan` reads the log of a run, and writes none.
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what the run wrote beyond the checkpoint that it resumes from
        with naming(run_path / "tensorboard"):
            self._events = SummaryWriter(str(run_path / "tensorboard"), purge_step=start_step + 1)
        self._title = title
        self._start = start_step
        self._total = total_steps
        self._began = self._last_line = time.monotonic()
        self._noise_scale: float | None = None  # as measured last

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with naming(self._events.log_dir):
            self._events.close()

    def _append(self, line: bytes) -> None:
        with naming(self._file.name):
            while line:
                line = line[self._file.write(line) :]

    def write(self, record: Record) -> None:
        """Append a record, with the present time, to the log and what it has for TensorBoard to the events."""
        self._append(line_of(replace(record, time=time.time())))
        if isinstance(record, StepRecord | EvalRecord | TrustRatioRecord):
            with naming(self._events.log_dir):  # the error of an earlier write, from TensorBoard's own thread
                for name, value in record.scalars().items():
                    self._events.add_scalar(f"{record.kind}/{name}", value, record.step)

    def step(self, record: StepRecord) -> None:
        """Record a step; print it where the last line is some seconds old, or it is the last step."""
        self.write(record)
        wait = 100 * record.data_wait_s / record.step_s if record.step_s else 0.0
        state = (
            f"epoch {record.epoch}  loss {record.loss:.4f}  lr {record.lr:.4g}  "
            f"{record.clips_per_second:.1f} clips/s  data wait {wait:.0f} %"
        )
        if record.noise_scale is not None:
            self._noise_scale = record.noise_scale
        if self._noise_scale is not None:
            state += f"  noise scale {noise_text(self._noise_scale)}"
        if record.bad_clips:
            state += f"  {record.bad_clips} bad clips"
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or record.step == self._total:
            self._last_line = now
            remaining_s = (now - self._began) / max(1, record.step - self._start) * (self._total - record.step)
            self.say(f"{self._title}: step {record.step}/{self._total}  {state}  {duration(remaining_s)} left")

    def warn(self, step: int, text: str) -> None:
        """Record and print a warning after a step."""
        self.write(WarningRecord(step=step, text=text))
        self.say(f"{self._title}: WARNING: {text}")

    def say(self, text: str) -> None:
        """Print a line. The first one that cannot be printed leaves a record; the run continues."""
        if (lost := say(text)) is not None:
            self.write(LogLostRecord(reason=lost.strerror))


def record_end(run_path: Path) -> None:
    """Record that the run is trained, evaluated and reported."""
    path = run_path / METRICS_FILE
    with naming(path), open(path, "ab", buffering=0) as file:
        file.write(line_of(DoneRecord(time=time.time())))
