"""A detector's latency: a frame of its stream, and apart from it the boxes that are made of the frame's maps."""

from __future__ import annotations

import torch

from summit_train.bench.compare import ForwardBench
from summit_train.detection.detect import detect
from summit_train.models.network import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec


class FrameBench(ForwardBench):
    """A detector with random weights, and the caches of a stream of one random frame as in training."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._device, self._precision, kind = device, spec.precision, parameter_type(spec.precision)
        self._stream = StreamNetwork(build_network(spec).to(device=device, dtype=kind))
        pixels = torch.randn(1, *spec.data.clip_shape[1:], device=device, dtype=kind)
        self._networks = [(self._see, pixels.permute(0, 3, 1, 2))]  # channels last in memory, as a stream's
        self.maps, self._caches = torch.empty(0), list[torch.Tensor]()

    def _see(self, frame: torch.Tensor) -> None:
        self.maps, self._caches = self._stream(frame, self._caches)


class BoxBench(ForwardBench):
    """What follows a detector's network: the boxes of the last maps of `frames`."""

    def __init__(self, frames: FrameBench, spec: Spec, device: torch.device) -> None:
        self._device, self._precision = device, "fp32"
        self._frames, self._model, self._size = frames, spec.model, spec.data.clip_shape[1:3]
        self._networks = [(self._find, torch.empty(0))]

    def _find(self, _: torch.Tensor) -> None:
        assert self._model.detector is not None
        detect(self._frames.maps.float(), self._size, self._model.detector, self._model.num_classes)
