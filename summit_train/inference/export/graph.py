"""A trained network as a graph to export: fixed shapes, named inputs and outputs, shifts that exporters keep."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork, cache_shapes
from summit_train.models.shift import TemporalShift, num_shifted_channels

_EXAMPLE = 2  # the example's batch if any batch is allowed: exporters take 0 and 1 for constants


@dataclass(frozen=True)
class Graph:
    """What an exporter takes: `module`, an example of each input by name, and the names of its outputs in order.

    any_batch: the inputs' first length may differ in each call.
    """

    module: nn.Module
    inputs: dict[str, torch.Tensor]
    outputs: tuple[str, ...]
    any_batch: bool = False


class ConcatenatedShift(nn.Module):
    """A `TemporalShift` written as slices and concatenations; the same result.

    An exporter may take an assignment to a slice of zeros for a constant, and the file is wrong without an error
    (mit-han-lab/temporal-shift-module, issues 77, 181 and 189).
    """

    def __init__(self, shift: TemporalShift) -> None:
        super().__init__()
        self.num_frames, self.fraction, self.direction = shift.num_frames, shift.fraction, shift.direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift frames (N*T, C, H, W)."""
        fold = num_shifted_channels(x.shape[1], self.fraction)
        if fold == 0:
            return x
        clips = x.view(-1, self.num_frames, *x.shape[1:])
        from_next = fold if self.direction == "both" else 0
        zeros = torch.zeros_like(clips[:, :1, :fold])
        later = [torch.cat([clips[:, 1:, :fold], zeros], 1)] if from_next else []
        earlier = torch.cat([zeros, clips[:, :-1, from_next : from_next + fold]], 1)
        return torch.cat([*later, earlier, clips[:, :, from_next + fold :]], 2).flatten(0, 1)


class _StreamGraph(nn.Module):
    """A stream as a function of tensors alone: a frame and the caches in, logits and the caches out.

    A shift of no channel hands nothing on. Its cache is neither an input nor an output.
    """

    def __init__(self, network: VideoNetwork, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.stream = StreamNetwork(network)
        self.shapes = shapes

    def forward(self, frame: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits (N, num_classes) of the next frame (N, C, H, W), and the caches for the one after it."""
        given = iter(caches)
        before = [next(given) if shape[0] else frame.new_zeros(len(frame), *shape) for shape in self.shapes]
        logits, after = self.stream(frame, before)
        return (logits, *(cache for cache, shape in zip(after, self.shapes, strict=True) if shape[0]))


def clip_graph(network: VideoNetwork, batch: int | None, height: int, width: int) -> Graph:
    """Return the graph of a plain network: `clip` float (N, T, C, H, W) to `logits` (N, num_classes).

    batch: N, None for any.
    """
    module = copy.deepcopy(network).eval()
    for name, shift in list(module.named_modules()):
        if isinstance(shift, TemporalShift):
            module.set_submodule(name, ConcatenatedShift(shift))
    clip = torch.zeros(batch or _EXAMPLE, network.num_frames, network.in_channels, height, width)
    return Graph(module, {"clip": clip}, ("logits",), batch is None)


def stream_graph(network: VideoNetwork, batch: int | None, height: int, width: int) -> Graph:
    """Return the graph of a plain past-only network's stream.

    `frame` float (N, C, H, W) and `cache_in_i` (N, fold, H', W') to `logits` (N, num_classes) and `cache_out_i`, each
    the next frame's `cache_in_i`. Caches are zero where a stream starts. batch: N, None for any.
    """
    shapes = cache_shapes(network, height, width)
    caches = [torch.zeros(batch or _EXAMPLE, *shape) for shape in shapes if shape[0]]
    frame = torch.zeros(batch or _EXAMPLE, network.in_channels, height, width)
    inputs = {"frame": frame} | {f"cache_in_{number}": cache for number, cache in enumerate(caches)}
    outputs = ("logits", *(f"cache_out_{number}" for number in range(len(caches))))
    return Graph(_StreamGraph(network, shapes).eval(), inputs, outputs, batch is None)
