"""Measure the phases of a training step without waiting for the device inside the step."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

# In a step's order. data_wait: until this rank's clips are there. allreduce: the wait for the ranks' mean after the
# backward pass, and the vote. other: normalising the clips, the gradient's norm, BN's statistics.
PHASES = ("data_wait", "forward", "backward", "allreduce", "update", "other")


class Mark:
    """A point in the device's time: an event on a GPU, the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_to(self, later: Mark) -> float:
        """Return the seconds between two marks, once the device has passed the later one."""
        if self._event is not None and later._event is not None:
            later._event.synchronize()
            return float(self._event.elapsed_time(later._event)) / 1000
        return later._time - self._time


class Recorder:
    """Remember the laps of some steps.

    On a GPU a lap is an event in the stream, so the times are the device's: a wait of the host while the device still
    has work costs nothing and counts as nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[tuple[str, Mark]]] = []

    def begin_step(self) -> None:
        self._steps.append([("", Mark(self._device))])

    def lap(self, phase: str) -> None:
        """Note that what happened since the lap before was `phase`, one of PHASES."""
        assert phase in PHASES, phase
        self._steps[-1].append((phase, Mark(self._device)))

    def read(self) -> list[dict[str, float]]:
        """Wait for the device; return the seconds of each phase in each step since the last reading."""
        steps = []
        for laps in self._steps:
            steps.append(dict.fromkeys(PHASES, 0.0))
            for (_, before), (phase, mark) in pairwise(laps):
                steps[-1][phase] += before.seconds_to(mark)
        self._steps = []
        return steps
