"""A detector's latency: a frame of its stream, and apart from it the boxes that are made of the frame's maps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from summit_train.detection.detect import detect
from summit_train.models.network import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import mixed_precision, parameter_type
from summit_train.spec import Spec
from summit_train.training.stopwatch import idle_mark


class Repeated:
    """Work that is done and timed again and again."""

    def __init__(self, work: Callable[[], object], device: torch.device) -> None:
        self._work, self._device = work, device

    def passes(self, clips: int, most: int, seconds: float = math.inf) -> list[float]:
        """Return the seconds of each of `most` passes; of fewer, and one at least, after `seconds`."""
        times: list[float] = []
        with torch.inference_mode():
            while not times or (len(times) < most and sum(times) < seconds):
                start = idle_mark(self._device)
                self._work()
                times.append(start.seconds_to(idle_mark(self._device)))
        return times


class Detector:
    """A detector with random weights, and the caches of a stream of one random frame of side data.crop.

    network: computes the maps of the next frame. boxes: finds the boxes of the last ones.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        assert spec.model.detector is not None
        kind = parameter_type(spec.precision)
        self._spec, self._detector, self._device = spec, spec.model.detector, device
        self._network = StreamNetwork(build_network(spec).to(device=device, dtype=kind))
        pixels = torch.randn(1, spec.data.crop, spec.data.crop, spec.data.input.channels, device=device, dtype=kind)
        self._frame = pixels.permute(0, 3, 1, 2)  # channels last in memory, as a stream's
        self._maps, self._caches = torch.empty(0), list[torch.Tensor]()
        self.network, self.boxes = Repeated(self._see, device), Repeated(self._find, device)

    def _see(self) -> None:
        with mixed_precision(self._spec.precision, self._device):
            self._maps, self._caches = self._network(self._frame, self._caches)

    def _find(self) -> None:
        side = self._spec.data.crop
        detect(self._maps.float(), (side, side), self._detector, self._spec.model.num_classes)
