"""`bench latency` of detectors: the network on one frame of a stream, and apart from it what follows the maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from summit_train.bench.figure3 import ForwardBench
from summit_train.bench.latency import Entry, Passes, measure_rounds, timed_values
from summit_train.bench.measure import Place, Values, spread
from summit_train.models.build import build_network
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.keys import detector_of


def frame_benches(spec: Spec, device: torch.device) -> list[ForwardBench]:
    """Return the bench of a detector with random weights, and of what follows it: the boxes of its last maps.

    The network sees one random frame as in training again and again, as a stream.
    """
    kind, model, (_, height, width, channels) = parameter_type(spec.precision), spec.model, spec.data.clip_shape
    detector = detector_of(model)
    stream = StreamNetwork(build_network(spec).to(device=device, dtype=kind))
    pixels = torch.randn(1, height, width, channels, device=device, dtype=kind)
    maps, caches = torch.empty(0), list[torch.Tensor]()

    def see(frame: torch.Tensor) -> None:
        nonlocal maps, caches
        maps, caches = stream(frame, caches)

    def find(_: torch.Tensor) -> None:
        detect(maps.float(), (height, width), detector, model.num_classes)

    channels_last = pixels.permute(0, 3, 1, 2)  # in memory, as a stream's
    network = ForwardBench([(see, channels_last)], spec.precision, device)
    return [network, ForwardBench([(find, channels_last)], "fp32", device)]


def measure_frames(entries: Sequence[Entry], settings: Passes, place: Place) -> list[Values]:
    """Return a row of each detector, all measured in turn: the network on a frame of a stream, and `boxes_ms` apart."""
    place.tell(f"building the detectors: {'; '.join(entry.label for entry in entries)}")
    benches = [bench for entry in entries for bench in frame_benches(entry.specs[0], place.device)]
    found, rows = measure_rounds(benches, 1, settings), []
    for entry, frames, boxes in zip(entries, found[::2], found[1::2], strict=True):
        times = timed_values(frames, frames, found[0], 1)
        no_clips: Values = dict.fromkeys(("clips_per_second", "clips_per_second_spread", "throughput_passes"))
        boxes_ms = spread([1000 * seconds for turn in boxes for seconds in turn])
        rows.append(entry.count_values() | times | no_clips | {"boxes_ms": boxes_ms})
    return rows
