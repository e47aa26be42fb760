"""`bench latency` of detectors: the network on one frame of a stream, and apart from it what follows the maps."""

from __future__ import annotations

import torch

from summit_train.bench.figure3 import ForwardBench
from summit_train.models.build import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec
from summit_train.tasks.detection.detect import detect


def frame_benches(spec: Spec, device: torch.device) -> list[ForwardBench]:
    """Return the bench of a detector with random weights, and of what follows it: the boxes of its last maps.

    The network sees one random frame as in training again and again, as a stream.
    """
    kind = parameter_type(spec.precision)
    _, height, width, channels = spec.data.clip_shape
    detector = spec.model.detector
    assert detector is not None
    stream = StreamNetwork(build_network(spec).to(device=device, dtype=kind))
    pixels = torch.randn(1, height, width, channels, device=device, dtype=kind)
    maps, caches = torch.empty(0), list[torch.Tensor]()

    def see(frame: torch.Tensor) -> None:
        nonlocal maps, caches
        maps, caches = stream(frame, caches)

    def find(_: torch.Tensor) -> None:
        detect(maps.float(), (height, width), detector, spec.model.num_classes)

    channels_last = pixels.permute(0, 3, 1, 2)  # in memory, as a stream's
    network = ForwardBench([(see, channels_last)], spec.precision, device)
    return [network, ForwardBench([(find, channels_last)], "fp32", device)]
