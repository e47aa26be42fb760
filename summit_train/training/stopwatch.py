"""Where the time of a training step goes, without a wait for the device inside the step."""

from __future__ import annotations

import time

import torch

# In the order in which a step passes through them first. data_wait: until this rank's clips are there. allreduce: what
# of it shows, the wait for the ranks' mean after the backward pass, and the vote. other: bytes to normalised floats,
# the gradient's norm, BN's statistics.
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
        """Seconds between two marks; waits until the device has passed the later one."""
        if self._event is not None and later._event is not None:
            later._event.synchronize()
            return float(self._event.elapsed_time(later._event)) / 1000
        return later._time - self._time


class Stopwatch:
    """Hear a step's phases. This one forgets them, for training that nobody measures."""

    def lap(self, phase: str) -> None:
        """Note that what happened since the lap before was `phase`, one of PHASES."""

    def wait(self) -> None:
        """Note that the step now depends on the other ranks, up to its end."""


class Recorder(Stopwatch):
    """Remembers the laps of some steps.

    On a GPU a lap is an event in the stream: the time between two is the device's, so a wait of the host that the
    device does not notice, because it still has work, counts as nothing. That is the wait which costs something.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[tuple[str, Mark]]] = []

    def begin_step(self) -> None:
        """The next laps are those of a new step."""
        self._steps.append([("", Mark(self._device))])

    def lap(self, phase: str) -> None:
        assert phase in PHASES, phase
        self._steps[-1].append((phase, Mark(self._device)))

    def read(self) -> list[dict[str, float]]:
        """Seconds of each phase in each step since the last reading; waits for the device. A step is their sum."""
        steps, self._steps = self._steps, []
        return [_seconds(laps) for laps in steps]


def _seconds(laps: list[tuple[str, Mark]]) -> dict[str, float]:
    seconds = dict.fromkeys(PHASES, 0.0)
    for i in range(1, len(laps)):
        phase, mark = laps[i]
        seconds[phase] += laps[i - 1][1].seconds_to(mark)
    return seconds
