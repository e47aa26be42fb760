"""What is timed for a row: steps of training, passes with gradients or of inference; eager, compiled or a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from rows import Row, network_of, random_clips, spec_of
from torch.nn import functional

from summit_train.bench.steps import random_batches
from summit_train.core.comm import World
from summit_train.models.precision import mixed_precision
from summit_train.plan import make_plan
from summit_train.training.run import build_step
from summit_train.training.step import StepResult
from summit_train.training.stopwatch import Mark

TURN_S, MOST_RUNS = 0.25, 20  # a turn takes about so long, and has at most so many runs
WARM_UP = 3  # runs; also of what a graph captures


class Subject(Protocol):
    """Something whose runs are timed."""

    def run(self, times: int) -> None:
        """Enqueue so many steps or passes, without waiting for the last."""


class Train:
    """The product's step: bytes to the device, forward, loss, backward, update. The learning rate is 0."""

    def __init__(self, row: Row, device: torch.device, *, small: bool = False) -> None:
        spec, world = spec_of(row, small=small), World()
        self._plan = plan = make_plan(spec, 1, spec.scale.clips_per_gpu)
        self.network = network_of(row, device, small=small).train()
        self._step = build_step(spec, plan, world, self.network, device)  # type: ignore[arg-type]
        self._batches = random_batches(spec, plan, world)
        self._last: StepResult | None = None

    def run(self, times: int) -> None:
        """Take steps. Each vote is read one step late, as the loop of `train` does."""
        for _ in range(times):
            result = self._step(self._batches, 0.0)
            if self._last is not None:
                self._last.read(self._plan.global_batch, 1, 1)
            self._last = result


class Inference:
    """Forward passes as in evaluation, on clips that lie on the device. Build and run it within `rows.inferring`."""

    def __init__(self, row: Row, device: torch.device, *, small: bool = False) -> None:
        with torch.inference_mode(False):  # so that the weights are the tensors that they are in evaluation
            self.network = network_of(row, device, small=small).eval()
            self._clips = random_clips(spec_of(row, small=small), device)
        self._out = torch.empty(0)
        self._pass = captured(self._once) if row.execution == "graph" else self._once

    def run(self, times: int) -> None:
        """Make passes."""
        for _ in range(times):
            self._pass()

    def logits(self) -> torch.Tensor:
        """Return the logits (N, num_classes) of a pass, fp64."""
        self._pass()
        return self._out.double()

    def _once(self) -> None:
        self._out = self.network(self._clips)


class Pass:
    """Forward, loss and backward on clips that lie on the device, without an update."""

    def __init__(self, row: Row, device: torch.device, *, small: bool = False) -> None:
        self.network = network_of(row, device, small=small).train()
        self._clips = random_clips(spec_of(row, small=small), device)
        self._labels = torch.arange(len(self._clips), device=device)
        self._precision = spec_of(row, small=small).precision
        self._pass = captured(self._once, self.network) if row.execution == "graph" else self._once

    def run(self, times: int) -> None:
        """Make passes."""
        for _ in range(times):
            self._pass()

    def _once(self) -> None:
        self.network.zero_grad()
        with mixed_precision(self._precision, self._clips.device):  # within a capture: the graph casts the weights
            logits = self.network(self._clips)
        torch.autograd.backward(functional.cross_entropy(logits.float(), self._labels))


def captured(once: Callable[[], None], trained: torch.nn.Module | None = None) -> Callable[[], None]:
    """Return a function that replays one call of `once` as a CUDA graph.

    It is warmed up on a stream of its own, as torch's notes on CUDA graphs ask. The gradients of `trained` are made
    within the capture, so each replay writes them anew.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            once()
    torch.cuda.current_stream().wait_stream(side)
    if trained is not None:
        trained.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


KINDS: dict[str, Callable[..., Subject]] = {"train": Train, "inference": Inference, "pass": Pass}


class Timed:
    """A row's subject, warmed up. first_s: seconds of its first run on the clock, compilation included."""

    def __init__(self, row: Row, device: torch.device, *, small: bool = False) -> None:
        self.row, self.spec, self._device = row, spec_of(row, small=small), device
        self.subject = KINDS[row.mode](row, device, small=small)
        started = time.perf_counter()
        self.seconds(1)
        self.first_s = time.perf_counter() - started
        self.seconds(WARM_UP)
        once = self.seconds(1)
        self.runs = max(1, min(MOST_RUNS, round(TURN_S / once)))

    def turn(self) -> float:
        """Return the mean seconds of the runs of a turn."""
        return self.seconds(self.runs)

    def seconds(self, runs: int) -> float:
        """Return the mean seconds of so many runs, by the device's clock."""
        start = Mark(self._device)
        self.subject.run(runs)
        return start.seconds_to(Mark(self._device)) / runs
