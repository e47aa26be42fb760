"""Record a run while it goes on: metrics.jsonl, TensorBoard events, and a line for the person who looks."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from summit_train.core.files import naming
from summit_train.core.result import say
from summit_train.core.text import duration, noise_text

METRICS_FILE = "metrics.jsonl"
_SECONDS_BETWEEN_LINES = 10.0
_RATES = ("clips_per_second", "step_s", "data_wait_s", "noise_scale")
_SCALARS = ("loss", "lr", "top1", *_RATES)  # of a step
_NO_MEASURES = ("kind", "time", "epoch", "step", "videos", "clips", "seconds", "classes")  # of a validation


class RunLog(AbstractContextManager["RunLog"]):
    """Rank 0's record of the run, with a few lines a minute for the person who looks."""

    def __init__(self, run_path: Path, title: str, start_step: int, total_steps: int) -> None:
        # Unbuffered: if the disk was full, a buffer would be written again on closing.
        self._file = open(run_path / METRICS_FILE, "a+b", buffering=0)  # noqa: SIM115  (closed in __exit__)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append("\n")  # a run that was killed can leave half a line
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

    def _append(self, text: str) -> None:
        remaining = text.encode()
        with naming(self._file.name):
            while remaining:
                remaining = remaining[self._file.write(remaining) :]

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; a number that is not finite becomes null, as JSON has no NaN."""
        broken = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        record = {"kind": kind, "time": time.time(), **values, **dict.fromkeys(broken)}
        self._append(json.dumps(record) + "\n")
        names = {"step": _SCALARS, "eval": [name for name in record if name not in _NO_MEASURES]}.get(kind, ())
        shown = {f"{kind}/{name}": record.get(name) for name in names}
        shown |= {f"{kind}/{name}": ratio for name, ratio in values.get("ratios", {}).items()}
        with naming(self._events.log_dir):  # the error of an earlier write, from TensorBoard's own thread
            for name, value in shown.items():
                if value is not None:
                    self._events.add_scalar(name, value, record["step"])

    def step(self, **values: Any) -> None:
        self.write("step", **values)
        step = values["step"]
        wait = 100 * values["data_wait_s"] / values["step_s"] if values["step_s"] else 0.0
        state = (
            f"epoch {values['epoch']}  loss {values['loss']:.4f}  lr {values['lr']:.4g}  "
            f"{values['clips_per_second']:.1f} clips/s  data wait {wait:.0f} %"
        )
        self._noise_scale = values.get("noise_scale", self._noise_scale)
        if self._noise_scale is not None:
            state += f"  noise scale {noise_text(self._noise_scale)}"
        if values.get("bad_clips"):
            state += f"  {values['bad_clips']} bad clips"
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or step == self._total:
            self._last_line = now
            remaining_s = (now - self._began) / max(1, step - self._start) * (self._total - step)
            self.say(f"{self._title}: step {step}/{self._total}  {state}  {duration(remaining_s)} left")

    def warn(self, step: int, text: str) -> None:
        """Record and print a warning after a step."""
        self.write("warning", step=step, text=text)
        self.say(f"{self._title}: WARNING: {text}")

    def say(self, text: str) -> None:
        """Print a line. The first one that cannot be printed leaves a record; the run continues."""
        if (lost := say(text)) is not None:
            self.write("log_lost", reason=lost.strerror)


def record_end(run_path: Path) -> None:
    """Record that the run is trained, evaluated and reported."""
    path = run_path / METRICS_FILE
    with naming(path), open(path, "ab", buffering=0) as file:
        file.write(json.dumps({"kind": "done", "time": time.time()}).encode() + b"\n")
