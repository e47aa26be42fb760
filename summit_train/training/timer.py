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

    def host_time(self, now: Mark) -> float:
        """Return when the device passed this mark, by the host's clock; `now`: a mark on a device without work."""
        return now._time - self.seconds_to(now)


def idle_mark(device: torch.device) -> Mark:
    """Wait until the device has no work; return a mark whose time is the same on the device and the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Mark(device)


class StepTimer:
    """Record when the phases and messages of one step begin and end, without waiting for the device.

    On a GPU a mark is an event in the stream, so the times are the device's: a wait of the host while the device still
    has work costs nothing and counts as nothing.

    number: the step's number in the records. laps: each phase with its end; the first one is the start of the step.
    sent: when this rank began to exchange a message, by its name, and the message's bytes. arrived: when the ranks' sum
    arrived.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._device = device
        self.number = number
        self.laps = [("", Mark(device))]
        self.sent = dict[str, tuple[Mark, int]]()
        self.arrived = dict[str, Mark]()

    @property
    def start(self) -> Mark:
        return self.laps[0][1]

    def lap(self, phase: str) -> None:
        """Record the time since the previous lap as `phase`."""
        self.laps.append((phase, Mark(self._device)))

    def send(self, message: str, num_bytes: int) -> None:
        """Note that this rank begins to exchange `message` with the others."""
        self.sent[message] = Mark(self._device), num_bytes

    def arrive(self, message: str) -> None:
        """Note that the ranks' sum of `message` has arrived."""
        self.arrived[message] = Mark(self._device)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, once the device has passed the last lap."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, mark) in pairwise(self.laps):
            seconds[phase] = seconds.get(phase, 0.0) + before.seconds_to(mark)
        return seconds
