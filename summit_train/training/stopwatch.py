"""Measure the phases of a training step without waiting for the device inside the step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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

    def host_time(self, now: Mark) -> float:
        """Return when the device passed this mark, by the host's clock; `now`: a mark on a device without work."""
        return now._time - self.seconds_to(now)


def idle_mark(device: torch.device) -> Mark:
    """Wait until the device has no work; return a mark whose time is the same on the device and the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Mark(device)


class Stopwatch:
    """Hears when the phases and messages of a step begin and end. This one takes no notice."""

    def lap(self, phase: str) -> None:
        """Note that what happened since the lap before was `phase`."""

    def sent(self, message: str, num_bytes: int) -> None:
        """Note that this rank begins to exchange `message` with the others."""

    def arrived(self, message: str) -> None:
        """Note that the ranks' mean of `message` is here."""


UNTIMED = Stopwatch()


class Laps(Stopwatch):
    """Remembers the phases of one step, each with its end; the first one is the start of the step."""

    def __init__(self, device: torch.device, start: Mark) -> None:
        self._device, self.laps = device, [("", start)]

    def lap(self, phase: str) -> None:
        self.laps.append((phase, Mark(self._device)))


@dataclass
class TimedStep:
    """What a recorder heard of a step. laps: each phase with its end; the first one is the start of the step."""

    number: int
    laps: list[tuple[str, Mark]]
    sent: dict[str, tuple[Mark, int]] = field(default_factory=dict)
    arrived: dict[str, Mark] = field(default_factory=dict)


class Recorder(Stopwatch):
    """Remembers some steps.

    On a GPU a mark is an event in the stream, so the times are the device's: a wait of the host while the device still
    has work costs nothing and counts as nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[TimedStep] = []

    def begin_step(self, step: int, start: Mark) -> None:
        self._steps.append(TimedStep(step, [("", start)]))

    def lap(self, phase: str) -> None:
        self._steps[-1].laps.append((phase, Mark(self._device)))

    def sent(self, message: str, num_bytes: int) -> None:
        self._steps[-1].sent[message] = Mark(self._device), num_bytes

    def arrived(self, message: str) -> None:
        self._steps[-1].arrived[message] = Mark(self._device)

    def take(self) -> list[TimedStep]:
        """Return the steps since the last call, and forget them."""
        steps, self._steps = self._steps, []
        return steps

    def read(self) -> list[dict[str, float]]:
        """Wait for the device; return the seconds of each phase in each step since the last reading."""
        steps = []
        for step in self.take():
            steps.append(dict.fromkeys(PHASES, 0.0))
            for (_, before), (phase, mark) in pairwise(step.laps):
                steps[-1][phase] += before.seconds_to(mark)
        return steps
